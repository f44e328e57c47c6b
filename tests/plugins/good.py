"""The longest tokens stay."""

from typing import ClassVar

import sparsebench


class Norm(sparsebench.Strategy):
    """Keeps the tokens with the largest norm, or with the smallest."""

    name: ClassVar[str] = "norm"
    largest: bool = True

    def scores(self, view):
        return (1 if self.largest else -1) * view.tokens.norm(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Norm]
