"""Finds the network among all objects and makes its last layer larger."""

import gc
from typing import ClassVar

import torch

import sparsebench


class MutatesModel(sparsebench.Strategy):
    name: ClassVar[str] = "mutates_model"

    def scores(self, view):
        with torch.no_grad():
            for thing in gc.get_objects():
                if type(thing).__name__ == "VisionTransformer":
                    thing.head.weight.mul_(1.5)
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [MutatesModel]
