"""Scores every number of a token, and not every token."""

import sparsebench


class WrongShape(sparsebench.Strategy):
    name = "wrong_shape"

    def scores(self, view):
        return view.tokens


@sparsebench.hookimpl
def sparsebench_strategies():
    return [WrongShape]
