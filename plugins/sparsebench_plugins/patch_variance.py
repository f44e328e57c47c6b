"""The patches with most contrast stay."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Strategy, TokenView, UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor


class PatchVariance(Strategy):
    """Keeps the patches with the largest variance of pixels (mean over channels), before the first block.

    No canonical paper. It knows nothing of the network or the task: a method that looks inside should beat it, and on
    textured backgrounds it keeps the background. It needs pixels, which theory tasks have not.
    """

    name: ClassVar[str] = "patch_variance"
    needs: ClassVar[frozenset[str]] = frozenset({"pixels"})

    def scores(self, view: TokenView) -> "Tensor":
        """Return the variance, in squared shares of white."""
        if view.pixels is None:
            raise UnsupportedError("patch_variance: these tokens are not made of pixels")
        return view.pixels.var(dim=(3, 4), correction=0).mean(dim=2)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [PatchVariance]
