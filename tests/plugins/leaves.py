"""Leaves the process."""

import sys

import sparsebench


class Leaves(sparsebench.Strategy):
    name = "leaves"

    def scores(self, view):
        sys.exit(3)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Leaves]
