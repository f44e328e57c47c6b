"""Ends the process without a word."""

import os
from typing import ClassVar

import sparsebench


class Exits(sparsebench.Strategy):
    name: ClassVar[str] = "exits"

    def scores(self, view):
        os._exit(0)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Exits]
