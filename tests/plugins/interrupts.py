"""Raises what Ctrl-C raises."""

import sparsebench


class Interrupts(sparsebench.Strategy):
    name = "interrupts"

    def scores(self, view):
        raise KeyboardInterrupt


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Interrupts]
