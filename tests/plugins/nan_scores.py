"""Scores every token with NaN."""

from typing import ClassVar

import sparsebench


class NanScores(sparsebench.Strategy):
    name: ClassVar[str] = "nan_scores"

    def scores(self, view):
        return view.tokens.mean(dim=-1) * float("nan")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [NanScores]
