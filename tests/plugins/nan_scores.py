"""Scores every token with NaN."""

import sparsebench


class NanScores(sparsebench.Strategy):
    name = "nan_scores"

    def scores(self, view):
        return view.tokens.mean(dim=-1) * float("nan")


@sparsebench.hookimpl
def sparsebench_strategies():
    return [NanScores]
