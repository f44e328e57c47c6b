"""Misspells its hook."""

import sparsebench


class WrongHook(sparsebench.Strategy):
    name = "wrong_hook"

    def scores(self, view):
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategy():
    return [WrongHook]
