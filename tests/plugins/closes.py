"""Puts other files where descriptors were."""

import os
from typing import ClassVar

import sparsebench


class Closes(sparsebench.Strategy):
    name: ClassVar[str] = "closes"

    def scores(self, view):
        file = os.open(os.devnull, os.O_RDWR)
        for number in range(64):
            os.dup2(file, number)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Closes]
