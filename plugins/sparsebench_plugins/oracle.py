"""The relevant tokens stay: the upper end of the scale."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Kind, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class Oracle(Strategy):
    """Removes irrelevant tokens first, by the relevance mask. Never ranked.

    Equally relevant tokens are selected at random, as in Li et al. (ICLR 2023), Section 4.1. The oracle is never
    ranked, because no deployable method has the relevance mask.
    """

    name: ClassVar[str] = "oracle"
    kind: ClassVar[Kind] = "oracle"
    needs: ClassVar[frozenset[str]] = frozenset({"relevance"})
    draws_random: ClassVar[bool] = True

    def scores(self, view: TokenView) -> "Tensor":
        """Return the relevance plus random numbers that order equal tokens; they are smaller than all differences."""
        return view.relevance + 1e-4 * view.random()


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [Oracle]
