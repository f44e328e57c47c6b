"""Says that it cannot act here."""

from typing import ClassVar

import sparsebench


class Unsupported(sparsebench.Strategy):
    name: ClassVar[str] = "unsupported"

    def scores(self, view):
        raise sparsebench.UnsupportedError("only for round tokens")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Unsupported]
