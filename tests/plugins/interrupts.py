"""Raises what Ctrl-C raises."""

from typing import ClassVar

import sparsebench


class Interrupts(sparsebench.Strategy):
    name: ClassVar[str] = "interrupts"

    def scores(self, view):
        raise KeyboardInterrupt


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Interrupts]
