"""Raises an error of two lines."""

import sparsebench


class Raises(sparsebench.Strategy):
    name = "raises"

    def scores(self, view):
        raise ValueError("no idea which token\nmatters")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Raises]
