"""Reads address 0, which ends the process."""

import ctypes

import sparsebench


class Segfaults(sparsebench.Strategy):
    name = "segfaults"

    def scores(self, view):
        return ctypes.string_at(0)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Segfaults]
