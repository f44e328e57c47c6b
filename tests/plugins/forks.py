"""Goes on in two processes."""

import os

import sparsebench


class Forks(sparsebench.Strategy):
    name = "forks"

    def scores(self, view):
        os.fork()
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Forks]
