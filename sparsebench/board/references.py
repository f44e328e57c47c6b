"""Rows beside dense, and beside random tokens inside the network at the same budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from sparsebench.board.columns import Row
from sparsebench.board.entries import DENSE
from sparsebench.stats.marks import marks
from sparsebench.stats.paired import Pairs
from sparsebench.strategy.budget import amount_of

RANDOM = "random_inside"
"""The strategy that every other is marked against at its own budget, as it is against dense."""


def compare_with_dense(rows: Sequence[Row], pairs: Pairs, judged: Collection[int]) -> None:
    """Add the differences of rows to dense, and which of those in some places are better or worse than it."""
    place = next((i for i, row in enumerate(rows) if row["strategy"] == DENSE), None)
    if place is not None:
        _compare(rows, pairs, judged, "dense", "accuracy_delta", dict.fromkeys(range(len(rows)), place))


def compare_with_random(rows: Sequence[Row], pairs: Pairs, judged: Collection[int]) -> None:
    """Add the same beside random tokens inside the network, if there are at a row's budget.

    In the same blocks, if there are, or else in others: the budget is how much is left.
    """
    places: dict[str, int] = {}
    for i, row in reversed(list(enumerate(rows))):
        if row["strategy"] == RANDOM:
            places |= {row["budget"]: i, amount_of(row["budget"]): i}
    wanted = [places.get(row["budget"], places.get(amount_of(row["budget"]))) for row in rows]
    _compare(rows, pairs, judged, RANDOM, f"{RANDOM}_delta", {i: j for i, j in enumerate(wanted) if j is not None})


def _compare(
    rows: Sequence[Row], pairs: Pairs, judged: Collection[int], name: str, delta: str, others: Mapping[int, int]
) -> None:
    """Add the differences of rows to others, by their places, with intervals and marks; all judged together."""
    for i, j in others.items():
        mean, half = float(pairs.mean[i, j]), float(pairs.half[i, j])
        ends = {"": mean, "_low": mean - half, "_high": mean + half}
        rows[i] |= {f"{delta}{end}": None if math.isnan(x) else x + 0.0 for end, x in ends.items()}  # no minus zero
    marked = {i: j for i, j in others.items() if i != j and i in judged and j in judged}
    for i, word in marks(pairs, marked).items():
        rows[i][f"versus_{name}"] = word
