"""The tokens that matter stay: the upper end of the scale."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Kind, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class Oracle(Strategy):
    """Removes irrelevant tokens first, by the relevance mask. Never ranked.

    Tokens that matter equally are drawn at random, as in Li et al. (ICLR 2023), Section 4.1. It reads the relevance
    mask, which no deployable method has, and so is never ranked.
    """

    name: ClassVar[str] = "oracle"
    kind: ClassVar[Kind] = "oracle"
    needs: ClassVar[frozenset[str]] = frozenset({"relevance"})

    def scores(self, view: TokenView) -> "Tensor":
        """Return the relevance; a random amount, smaller than any difference between shares, orders equals."""
        return view.relevance + 1e-4 * view.random()


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [Oracle]
