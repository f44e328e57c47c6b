"""The patches with the most edges stay."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class GradientEnergy(Strategy):
    """Keeps the patches with the largest mean |grad I|^2, before the first block.

    No canonical paper. The gradient consists of the differences of neighbouring pixels inside the patch; its square is
    averaged for each direction over these differences and over channels. Unlike in `patch_variance`, a slope across the
    patch counts little. It needs patches of at least 2 x 2 pixels; theory tasks have no pixels.
    """

    name: ClassVar[str] = "gradient_energy"
    needs: ClassVar[frozenset[str]] = frozenset({"pixels"})

    def scores(self, view: TokenView) -> "Tensor":
        """Return the energy; pixels are in [0, 1], and distances are in pixels."""
        P = view.pixels
        if P is None or min(P.shape[3:]) < 2:
            raise UnsupportedError("gradient_energy: these tokens are not made of two pixels a side or more")
        down, across = (P.diff(dim=dim).square().mean(dim=(2, 3, 4)) for dim in (3, 4))
        return down + across


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [GradientEnergy]
