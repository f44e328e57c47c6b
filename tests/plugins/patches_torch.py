"""Replaces a function of torch while it is loaded."""

from typing import ClassVar

import torch

import sparsebench

cosine_similarity = torch.nn.functional.cosine_similarity


class PatchesTorch(sparsebench.Strategy):
    name: ClassVar[str] = "patches_torch"

    def scores(self, view):
        return view.tokens.sum(dim=-1)


@sparsebench.hookimpl
def sparsebench_strategies():
    torch.nn.functional.cosine_similarity = lambda *given, **more: cosine_similarity(*given, **more)
    return [PatchesTorch]
