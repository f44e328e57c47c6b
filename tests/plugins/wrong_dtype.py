"""Keeps positions that are no 64-bit integers."""

from typing import ClassVar

import sparsebench


class WrongDtype(sparsebench.Strategy):
    name: ClassVar[str] = "wrong_dtype"

    def plan(self, view, keep):
        return sparsebench.Keep(view.index[:, :keep].int())


@sparsebench.hookimpl
def sparsebench_strategies():
    return [WrongDtype]
