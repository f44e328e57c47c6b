"""Takes memory as long as there is any."""

import torch

import sparsebench

HELD = []


class Allocates(sparsebench.Strategy):
    name = "allocates"

    def scores(self, view):
        while True:
            HELD.append(torch.ones(64 * 2**20))


@sparsebench.hookimpl
def sparsebench_strategies():
    return [Allocates]
