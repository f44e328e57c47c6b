"""Writes to all descriptors there are."""

import os
from contextlib import suppress

import sparsebench


class Scribbles(sparsebench.Strategy):
    name = "scribbles"

    def scores(self, view):
        for number in range(64):
            with suppress(OSError):
                os.write(number, b"nobody can read this")
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Scribbles]
