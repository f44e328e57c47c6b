"""Probes on a board: images to a target, nearest neighbours, and accuracies by the number of training images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sparsebench.board.columns import BY_KEY, LIMITS, Column, Row, interval_row, rank_text
from sparsebench.board.comparison import Comparison
from sparsebench.board.reading import DENSE, entry_of_dense, over_seeds
from sparsebench.stats import targets
from sparsebench.stats.intervals import Interval
from sparsebench.stats.paired import Results, halves
from sparsebench.stats.targets import Target, combined

PART = "images to target"
"""The part of a board's columns that probes have."""
COLUMNS = tuple(
    BY_KEY[key]
    for key in (
        "strategy",
        "budget",
        "images_to_target_rank",
        "images_to_target",
        "images_to_fixed_target",
        "neighbour_accuracy",
        "neighbour_delta",
    )
)
"""The columns of the table of probes."""


def columns_of(comparison: Comparison, fixed: float = 0.0) -> pd.DataFrame:
    """Return the columns of probes for each entry.

    Args:
        comparison: a comparison of the track probe.
        fixed: the accuracy that is the second target; 0 for none.
    """
    dense = entry_of_dense(comparison.records)
    near = comparison.neighbours_at(comparison.largest)
    rows = over_seeds(comparison.tested, {"neighbour_accuracy": "mean"})
    for name, of_entries in _of_neighbours(near, dense, comparison.lone).items():
        values = pd.DataFrame([interval_row(name, interval) for interval in of_entries], list(near), dtype=float)
        rows = rows.drop(columns=name, errors="ignore").join(values)

    sizes = sizes_of(comparison)
    if len(sizes) < 2:
        return rows
    by_size = [comparison.results_at(n) for n in sizes]
    entries = [entry for entry in rows.index if all(entry in results for results in by_size)]
    curves = [[results[entry] for results in by_size] for entry in entries]
    of_targets: dict[str, tuple[Target, Results | None]] = {}
    if dense in entries:
        of_targets["images_to_target"] = Target.of_dense(1 / comparison.n_classes), by_size[-1][dense]
    if fixed:
        of_targets["images_to_fixed_target"] = Target(fixed), None
    for name, (target, of_dense) in of_targets.items():
        reached = targets.images_to_target(curves, sizes, target, of_dense, comparison.lone)
        values = pd.DataFrame([interval_row(name, interval) for interval in reached], entries, dtype=float)
        rows = rows.join(values)
    if "images_to_target" in rows:
        rows["images_to_target_rank"] = _ranks(rows["images_to_target"], comparison.entries["kind"])
    rows[LIMITS] = [(sizes[0], sizes[-1])] * len(rows)
    return rows


def sizes_of(comparison: Comparison) -> list[int]:
    """Return the rising numbers of training images of the cells that are compared."""
    return sorted(set(comparison.records["n_train"]))


def _of_neighbours(near: dict[int, Results], dense: int | None, lone: bool) -> dict[str, list[Interval]]:
    """Return the accuracies of neighbours, and their differences to dense, with intervals, by column."""
    results = list(near.values())
    columns = {"neighbour_accuracy": results}
    if dense in near:
        columns["neighbour_delta"] = [combined([(1.0, result), (-1.0, near[dense])]) for result in results]
    intervals: dict[str, list[Interval]] = {}
    for name, values in columns.items():
        widths = halves(values, lone).tolist()
        means = [float(np.mean(list(value.means.values()))) if value.means else np.nan for value in values]
        least = 0.0 if name == "neighbour_accuracy" else -1.0
        intervals[name] = [
            (mean, None, None) if np.isnan(half) else (mean, max(least, mean - half), min(1.0, mean + half))
            for mean, half in zip(means, widths, strict=True)
        ]
    return intervals


def _ranks(values: pd.Series, kinds: pd.Series) -> pd.Series:
    """Return the ranks of strategies by images to target as text; oracles have none."""
    ranked = values[kinds.reindex(values.index) != "oracle"]
    texts = [None if ends is None else rank_text(*ends) for ends in targets.ties(ranked.tolist())]
    return pd.Series(texts, ranked.index, dtype=object)


def by_size(comparison: Comparison, rows: Sequence[Row]) -> tuple[list[Row], list[Column]]:
    """Return a row for each strategy and budget with its accuracies at each number of training images, and the columns.

    Args:
        comparison: a comparison of the track probe.
        rows: the rows of the board for its entries, in order, with `entry`.
    """
    columns = [BY_KEY["strategy"], BY_KEY["budget"]]
    kinds = {"linear": "accuracy", "neighbours": "neighbour_accuracy"}
    values: dict[int, Row] = {row["entry"]: {**row} for row in rows}
    for name, metric in kinds.items():
        for n in sizes_of(comparison):
            of_size = over_seeds(comparison.records[comparison.records["n_train"] == n], {metric: "mean"})[metric]
            meaning = f"accuracy of the {'linear probe' if name == 'linear' else 'nearest neighbours'} with N images"
            column = Column(f"{metric}_with_{n}", f"{name} N={n}", "percent", meaning)
            columns.append(column)
            for entry, row in values.items():
                row[column.key] = of_size.get(entry)
    return list(values.values()), columns


def in_order_of_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with a probe: dense first, then by images to target if known, oracles last."""
    measured = rows[rows["neighbour_accuracy"].notna()]
    images = measured["images_to_target"] if "images_to_target" in measured else pd.Series(np.nan, measured.index)
    order = pd.DataFrame(
        {
            "not dense": measured["strategy"] != DENSE,
            "oracle": measured["kind"] == "oracle",
            "images": images.astype(float),
            "accuracy": -measured["accuracy"].astype(float),
        }
    )
    return measured.loc[order.sort_values(list(order)).index]
