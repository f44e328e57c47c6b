"""Relevant tokens are removed first: the lower end of the scale."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Kind, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class AntiOracle(Strategy):
    """Removes relevant tokens first, the opposite of `oracle`. Never ranked."""

    name: ClassVar[str] = "anti_oracle"
    kind: ClassVar[Kind] = "oracle"
    needs: ClassVar[frozenset[str]] = frozenset({"relevance"})
    draws_random: ClassVar[bool] = True

    def scores(self, view: TokenView) -> "Tensor":
        """Return the negative relevance; equal tokens are ordered at random."""
        return 1e-4 * view.random() - view.relevance


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [AntiOracle]
