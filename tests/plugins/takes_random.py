"""Takes the name of a strategy that is installed."""

import sparsebench


class TakesRandom(sparsebench.Strategy):
    name = "random"

    def scores(self, view):
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [TakesRandom]
