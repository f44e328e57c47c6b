"""Ends the process without a word."""

import os

import sparsebench


class Exits(sparsebench.Strategy):
    name = "exits"

    def scores(self, view):
        os._exit(0)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Exits]
