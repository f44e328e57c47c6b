"""Makes legal plans but in the third batch of the test."""

from typing import ClassVar, Literal

import torch
from pydantic import PrivateAttr

import sparsebench


class WrongLater(sparsebench.Strategy):
    name: ClassVar[str] = "wrong_later"
    site: ClassVar = "block"
    wrong: Literal["past_the_end", "twice", "nan", "empty_group"] = "twice"
    _plans: list[int] = PrivateAttr(default_factory=list)

    def plan(self, view, keep):
        B, N = view.index.shape
        if not view.training:
            self._plans.append(B)
        first = torch.arange(N).expand(B, N)
        if self.wrong == "empty_group":
            return sparsebench.Merge(first % (keep if len(self._plans) != 3 else keep - 1))
        if len(self._plans) != 3:
            return sparsebench.Keep(first[:, :keep])
        if self.wrong == "nan":
            return sparsebench.Keep(first[:, :keep], scores=torch.full((B, N), torch.nan))
        return sparsebench.Keep(first[:, :keep] * (0 if self.wrong == "twice" else N))


@sparsebench.hookimpl
def sparsebench_strategies():
    return [WrongLater]
