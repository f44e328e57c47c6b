"""Reads the mask without having said so."""

from typing import ClassVar

import sparsebench


class UndeclaredRelevance(sparsebench.Strategy):
    name: ClassVar[str] = "undeclared_relevance"

    def scores(self, view):
        return view.relevance


@sparsebench.hookimpl
def sparsebench_strategies():
    return [UndeclaredRelevance]
