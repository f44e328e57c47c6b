"""Finds the network in the frames of its callers and makes its weights larger."""

import sys
from typing import ClassVar

import torch

import sparsebench


class MutatesModel(sparsebench.Strategy):
    name: ClassVar[str] = "mutates_model"

    def scores(self, view):
        frame = sys._getframe()
        while frame is not None:
            module = getattr(frame.f_locals.get("self"), "module", None)
            if isinstance(module, torch.nn.Module):
                with torch.no_grad():
                    for weight in module.parameters():
                        weight.mul_(1.01)
                break
            frame = frame.f_back
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    return [MutatesModel]
