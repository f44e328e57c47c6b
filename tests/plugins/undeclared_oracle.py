"""Says that it reads the mask, and not that it is an oracle."""

from typing import ClassVar

import sparsebench


class UndeclaredOracle(sparsebench.Strategy):
    name: ClassVar[str] = "undeclared_oracle"
    needs: ClassVar[frozenset[str]] = frozenset({"relevance"})

    def scores(self, view):
        return view.relevance


@sparsebench.hookimpl
def sparsebench_strategies():
    return [UndeclaredOracle]
