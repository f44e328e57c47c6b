"""Goes on in two processes."""

import os

import sparsebench

FORKED: list[int] = []


class Forks(sparsebench.Strategy):
    name = "forks"

    def scores(self, view):
        if not FORKED:  # once, as copies that fork again at every call are soon too many for the machine
            FORKED.append(os.fork())
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Forks]
