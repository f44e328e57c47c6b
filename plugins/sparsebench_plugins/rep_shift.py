"""The tokens that attention changes most stay."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Site, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class RepShift(Strategy):
    """Keeps the tokens to which the block's attention added most: ||x_j' - x_j||_2, its Representation Shift.

    Choi et al. (2025): a token's importance is the distance between what goes into a layer and what comes out of it;
    no attention map is needed. The paper allows any layer and mostly shows the MLP; tokens leave before the MLP here,
    so it is the attention's, the residual branch as it is added. The theory model adds nothing and cannot have it.
    """

    name: ClassVar[str] = "rep_shift"
    site: ClassVar[Site] = "attention"
    needs: ClassVar[frozenset[str]] = frozenset({"branch"})
    citation: ClassVar[str] = "Choi et al., Representation shift, ICCV 2025"
    differs: ClassVar[str] = "the change that attention makes is measured, where the paper mostly shows the MLP's"

    def scores(self, view: TokenView) -> "Tensor":
        """Return the norm of what was added."""
        return view.branch.norm(dim=2)


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [RepShift]
