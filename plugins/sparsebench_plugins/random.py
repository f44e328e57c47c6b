"""Random tokens stay: a method that does not beat this has found nothing."""

from typing import TYPE_CHECKING, ClassVar

import sparsebench
from sparsebench import Kind, Strategy, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class Random(Strategy):
    """Keeps tokens drawn uniformly, from one stream a sample, so that the batch it comes in does not matter."""

    name: ClassVar[str] = "random"
    kind: ClassVar[Kind] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset()

    def scores(self, view: TokenView) -> "Tensor":
        """Return independent uniform scores."""
        return view.random()


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Bring in the strategy."""
    return [Random]
