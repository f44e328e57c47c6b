"""Leaves the process."""

import sys
from typing import ClassVar

import sparsebench


class Leaves(sparsebench.Strategy):
    name: ClassVar[str] = "leaves"

    def scores(self, view):
        sys.exit(3)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Leaves]
