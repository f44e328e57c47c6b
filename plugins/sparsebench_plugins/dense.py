"""All tokens stay: the network that all strategies are compared with."""

from typing import ClassVar

import sparsebench
from sparsebench import Kind, Strategy, TokenView


class Dense(Strategy):
    """Keeps all tokens, independent of the budget."""

    name: ClassVar[str] = "dense"
    kind: ClassVar[Kind] = "baseline"
    needs: ClassVar[frozenset[str]] = frozenset()
    budgeted: ClassVar[bool] = False

    def plan(self, view: TokenView, keep: int) -> None:
        """Leave the tokens as they are."""
        return None


@sparsebench.hookimpl
def sparsebench_strategies() -> list[type[Strategy]]:
    """Return the strategy class."""
    return [Dense]
