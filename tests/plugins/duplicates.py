"""Keeps the first token again and again."""

import sparsebench


class Duplicates(sparsebench.Strategy):
    name = "duplicates"

    def plan(self, view, keep):
        return sparsebench.Keep(view.index[:, :keep] * 0)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Duplicates]
