"""The patches with most edges stay."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class GradientEnergy(Strategy):
    """Keeps the patches with the largest mean |grad I|^2, before the first block.

    No canonical paper. The gradient is made of differences of neighbouring pixels inside the patch, and of each
    direction the mean over them and over channels is taken. Unlike `patch_variance` it takes a slope across the patch
    for little. It needs pixels, which theory tasks have not, two a side at least.
    """

    name: ClassVar[str] = "gradient_energy"
    needs: ClassVar[frozenset[str]] = frozenset({"pixels"})

    def scores(self, view: TokenView) -> "Tensor":
        """Return the energy, in squared shares of white a pixel."""
        P = view.pixels
        if P is None or min(P.shape[3:]) < 2:
            raise UnsupportedError("gradient_energy: these tokens are not made of two pixels a side or more")
        down, across = (P.diff(dim=dim).square().mean(dim=(2, 3, 4)) for dim in (3, 4))
        return down + across


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [GradientEnergy]
