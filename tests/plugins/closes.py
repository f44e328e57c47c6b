"""Puts other files where descriptors were."""

import os

import sparsebench


class Closes(sparsebench.Strategy):
    name = "closes"

    def scores(self, view):
        file = os.open(os.devnull, os.O_RDWR)
        for number in range(64):
            os.dup2(file, number)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Closes]
