"""Writes to the standard output in each pass."""

import os

import sparsebench


class Prints(sparsebench.Strategy):
    name = "prints"

    def scores(self, view):
        print("a line\nand another")  # noqa: T201
        os.write(1, b'{"not": "a record"}\n')
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Prints]
