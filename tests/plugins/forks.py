"""Goes on in two processes."""

import os
from typing import ClassVar

import sparsebench


class Forks(sparsebench.Strategy):
    name: ClassVar[str] = "forks"

    def scores(self, view):
        os.fork()
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Forks]
