"""Leaves a process behind."""

import os
import time
from typing import ClassVar

import sparsebench


class Leaves(sparsebench.Strategy):
    name: ClassVar[str] = "leaves"

    def scores(self, view):
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Leaves]
