"""Says that it cannot act here."""

import sparsebench


class Unsupported(sparsebench.Strategy):
    name = "unsupported"

    def scores(self, view):
        raise sparsebench.UnsupportedError("only for round tokens")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Unsupported]
