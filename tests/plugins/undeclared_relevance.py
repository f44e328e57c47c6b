"""Reads the mask without having said so."""

import sparsebench


class UndeclaredRelevance(sparsebench.Strategy):
    name = "undeclared_relevance"

    def scores(self, view):
        return view.relevance


@sparsebench.hookimpl
def sparsebench_strategies():
    return [UndeclaredRelevance]
