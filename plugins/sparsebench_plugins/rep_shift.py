"""The tokens that change most by attention stay."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class RepShift(Strategy):
    """Keeps the tokens to which the block's attention added most: ||x_j' - x_j||_2, its Representation Shift.

    Choi et al. (2025): the importance of a token is the distance between the input and the output of a layer; no
    attention map is needed. The paper allows any layer and mostly shows the MLP. Here tokens are removed before the
    MLP, so the layer is the attention, and the distance is the norm of its residual branch. The theory model has no
    residual branch, so the strategy cannot act on it.
    """

    name: ClassVar[str] = "rep_shift"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"branch"})
    citation: ClassVar[str] = "Choi et al., Representation shift, ICCV 2025"
    differs: ClassVar[str] = "measures the change by the attention, while the paper mostly shows that by the MLP"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the norm of the residual branch."""
        return view.branch.norm(dim=2)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [RepShift]
