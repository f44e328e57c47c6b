"""Predicted patches on a board: intersection over union, with its differences to dense and to random tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.board.columns import BY_KEY
from sparsebench.board.comparison import Comparison
from sparsebench.board.probes import column_of_results
from sparsebench.board.ranks import in_order
from sparsebench.board.reading import DENSE, ENTRY, SEED, entry_of_dense, over_seeds
from sparsebench.measure.patches import Overlap
from sparsebench.records.record import numbers_of
from sparsebench.records.table import FOREGROUNDS, ITEMS, LABELS, PREDICTIONS
from sparsebench.stats.paired import Results
from sparsebench.stats.targets import combined

PART = "patches"
"""The part of a board's columns that predicted patches have."""
MEANS = ("iou_pixels", "accuracy_relevant", "accuracy_irrelevant", "accuracy_boundary")
"""The metrics that are means over seeds, without an interval."""
COLUMNS = tuple(
    BY_KEY[key]
    for key in ("strategy", "budget", "macs_ratio", "iou", "iou_delta", "iou_random_delta", *MEANS, "speed_up")
)
"""The columns of the table of predicted patches."""


def columns_of(comparison: Comparison) -> pd.DataFrame:
    """Return the columns of predicted patches for each entry, except differences to random tokens, see `add_random`."""
    results = results_of(comparison.tested)
    rows = over_seeds(comparison.tested, dict.fromkeys(MEANS, "mean"))
    rows = rows.join(column_of_results("iou", results, comparison.lone))
    dense = entry_of_dense(comparison.records)
    if dense is not None and dense in results:
        to_dense = {entry: combined([(1.0, one), (-1.0, results[dense])]) for entry, one in results.items()}
        rows = rows.join(column_of_results("iou_delta", to_dense, comparison.lone))
    return rows


def add_random(rows: pd.DataFrame, comparison: Comparison, references: Mapping[int, int]) -> pd.DataFrame:
    """Return rows with the differences to random tokens; see `probes.add_random`."""
    results = results_of(comparison.tested)
    differences = {}
    for entry, random in references.items():
        if entry in results and random in results and entry != random:
            differences[entry] = combined([(1.0, results[entry]), (-1.0, results[random])])
    if not differences:
        return rows
    values = column_of_results("iou_random_delta", differences, comparison.lone)
    return rows.drop(columns=list(values), errors="ignore").join(values)


def results_of(records: pd.DataFrame) -> dict[int, Results]:
    """Return the intersection over union of each entry and seed, with a pseudo-value for each picture.

    A probe has one record for each entry and seed. Pictures are those of the objects, or whole test images.
    """
    measured = records[records["iou"].notna() & (records[ITEMS] > 0)]
    names = [ENTRY, SEED, ITEMS, LABELS, PREDICTIONS, FOREGROUNDS]
    rows_of: dict[int, list[Any]] = {}
    for row in measured[names].itertuples(index=False):
        rows_of.setdefault(row.entry, []).append(row)
    return {entry: _results(rows) for entry, rows in rows_of.items()}


def _results(rows: list[Any]) -> Results:
    """Return the results of an entry from its records, one for each seed."""
    means, scores, clusters = {}, {}, {}
    for row in rows:
        n = row.test_items
        predicted, labels = numbers_of(row.test_predictions, n), numbers_of(row.test_labels, n)
        if not row.test_foregrounds:  # the pictures are unknown, so this seed has no interval over them
            means[row.seed] = Overlap.of(predicted, labels, np.zeros(n, dtype=np.int64)).mean_iou()
            continue
        clusters[row.seed], units = np.unique(numbers_of(row.test_foregrounds, n), return_inverse=True)
        overlap = Overlap.of(predicted, labels, units)
        means[row.seed] = overlap.mean_iou()
        scores[row.seed] = ((row.test_labels, row.test_foregrounds), overlap.scores())
    return Results(means, scores, clusters)


def in_order_of_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with predicted patches: dense first, then by intersection over union; oracles last."""
    measured = rows[rows[list(MEANS)].notna().any(axis=1)]
    return in_order(
        measured,
        {
            "not dense": measured["strategy"] != DENSE,
            "oracle": measured["kind"] == "oracle",
            "iou": -measured["iou"].astype(float),
        },
    )
