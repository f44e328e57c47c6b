"""Rows beside dense, and beside random tokens inside the network at the same budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from sparsebench.board.board import Row
from sparsebench.board.entries import DENSE
from sparsebench.budget import amount_of
from sparsebench.stats.marks import marks
from sparsebench.stats.paired import Pairs

RANDOM = "random_inside"
"""The strategy that every other is marked against at its own budget, as it is against dense."""


def add_accuracies(rows: Sequence[Row], pairs: Pairs) -> None:
    """Add the interval of each row's accuracy, and its differences to dense and to random tokens at its budget."""
    for row, ends in zip(rows, pairs.accuracy.tolist(), strict=True):
        row["accuracy_low"], row["accuracy_high"] = (None if math.isnan(x) else min(1.0, max(0.0, x)) for x in ends)
    for name, references in (("accuracy_delta", dense(rows)), ("random_inside_delta", random(rows))):
        add_differences(rows, pairs, name, references)


def add_differences(rows: Sequence[Row], pairs: Pairs, name: str, references: Mapping[int, int]) -> None:
    """Add the differences of rows to others, by their places, with intervals."""
    for i, j in references.items():
        mean, half = float(pairs.mean[i, j]), float(pairs.half[i, j])
        named = {"": mean, "_low": mean - half, "_high": mean + half}
        rows[i] |= {f"{name}{end}": None if math.isnan(x) else x + 0.0 for end, x in named.items()}  # no minus zero


def add_marks(
    rows: Sequence[Row], pairs: Pairs, name: str, references: Mapping[int, int], places: Collection[int]
) -> None:
    """Mark which of some rows are better or worse than others, by their places; all of them judged together."""
    judged = {i: j for i, j in references.items() if i != j and i in places and j in places}
    for i, word in marks(pairs, judged).items():
        rows[i][name] = word


def dense(rows: Sequence[Row]) -> dict[int, int]:
    """Return the place of dense for each row's."""
    place = next((i for i, row in enumerate(rows) if row["strategy"] == DENSE), None)
    return {} if place is None else dict.fromkeys(range(len(rows)), place)


def random(rows: Sequence[Row]) -> dict[int, int]:
    """Return for the place of each row that of random tokens inside the network, if there are at its budget.

    In the same blocks, if there are, or else in others: the budget is how much is left.
    """
    places: dict[str, int] = {}
    for i, row in reversed(list(enumerate(rows))):
        if row["strategy"] == RANDOM:
            places |= {row["budget"]: i, amount_of(row["budget"]): i}
    wanted = [places.get(row["budget"], places.get(amount_of(row["budget"]))) for row in rows]
    return {i: j for i, j in enumerate(wanted) if j is not None}
