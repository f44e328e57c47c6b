"""Raises an error of two lines."""

from typing import ClassVar

import sparsebench


class Raises(sparsebench.Strategy):
    name: ClassVar[str] = "raises"

    def scores(self, view):
        raise ValueError("no idea which token\nmatters")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Raises]
