"""The patches with the most contrast stay."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class PatchVariance(Strategy):
    """Keeps the patches with the largest variance of pixels (mean over channels), before the first block.

    No canonical paper. The score depends on neither the network nor the task. A method that uses the network should be
    better. On textured backgrounds the background is kept. It needs pixels, which theory tasks do not have.
    """

    name: ClassVar[str] = "patch_variance"
    needs: ClassVar[frozenset[str]] = frozenset({"pixels"})

    def scores(self, view: TokenView) -> "Tensor":
        """Return the variance; pixels are in [0, 1]."""
        if view.pixels is None:
            raise UnsupportedError("patch_variance: these tokens are not made of pixels")
        return view.pixels.var(dim=(3, 4), correction=0).mean(dim=2)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [PatchVariance]
