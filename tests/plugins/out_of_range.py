"""Keeps tokens that are not there."""

import sparsebench


class OutOfRange(sparsebench.Strategy):
    name = "out_of_range"

    def plan(self, view, keep):
        return sparsebench.Keep(view.index[:, :keep] + 1000)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [OutOfRange]
