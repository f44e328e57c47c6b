"""Probes on a board: images to a target, nearest neighbours, and accuracies by the number of training images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from sparsebench.board.columns import BY_KEY, LIMITS, Column, Row, interval_row, rank_text
from sparsebench.board.comparison import Comparison
from sparsebench.board.ranks import in_order
from sparsebench.board.reading import DENSE, entry_of_dense, over_seeds
from sparsebench.stats import targets
from sparsebench.stats.paired import Results, halves
from sparsebench.stats.targets import Target, combined

PART = "images to target"
"""The part of a board's columns that probes have."""
COLUMNS = tuple(
    BY_KEY[key] for key in ("strategy", "budget", "images_to_target_rank", "images_to_target", "images_to_fixed_target")
)
"""The columns of the table of images to target."""
OF_LARGEST = tuple(
    BY_KEY[key]
    for key in (
        "strategy",
        "budget",
        "linear_accuracy",
        "neighbour_accuracy",
        "linear_delta",
        "neighbour_delta",
        "linear_random_delta",
        "neighbour_random_delta",
        "linear_images_per_s",
    )
)
"""The columns of the table of both kinds of probes with the most training images."""
KINDS = {
    "accuracy": ("Linear probe", "accuracy of the linear probe with N training images"),
    "neighbour_accuracy": ("Nearest neighbours", "accuracy of the nearest neighbours with N training images"),
}
"""For the accuracy of each kind of probe a title, and the meaning of the columns of a table by training images."""


def columns_of(comparison: Comparison, fixed: float = 0.0) -> pd.DataFrame:
    """Return the columns of probes for each entry, except differences to random tokens and ranks, see `add_random` and
    `add_ranks`.

    Args:
        comparison: a comparison of the track probe.
        fixed: the accuracy that is the second target; 0 for none.
    """
    dense = entry_of_dense(comparison.records)
    rows = over_seeds(comparison.tested, {"accuracy": "mean", "images_per_s": "median"})[["images_per_s"]]
    rows = rows.rename(columns={"images_per_s": "linear_images_per_s"})
    for name, results in _at_largest(comparison).items():
        rows = rows.join(column_of_results(f"{name}_accuracy", results, comparison.lone))
        if dense is not None and dense in results:
            to_dense = {entry: _difference(one, results[dense]) for entry, one in results.items()}
            rows = rows.join(column_of_results(f"{name}_delta", to_dense, comparison.lone))

    sizes = sizes_of(comparison)
    if len(sizes) < 2:
        return rows
    by_size = [comparison.results_at(n) for n in sizes]
    entries = [entry for entry in rows.index if all(entry in results for results in by_size)]
    curves = [[results[entry] for results in by_size] for entry in entries]
    of_dense = by_size[-1][dense] if dense is not None and dense in entries else None
    for name, (target, reference) in _targets(comparison, of_dense, fixed).items():
        reached = targets.images_to_target(curves, sizes, target, reference, comparison.lone)
        values = [interval_row(name, interval) for interval in reached]
        rows = rows.join(pd.DataFrame(values, entries, dtype=float))
    rows[LIMITS] = [(sizes[0], sizes[-1])] * len(rows)
    return rows


def _targets(
    comparison: Comparison, of_dense: Results | None, fixed: float
) -> dict[str, tuple[Target, Results | None]]:
    """Return the targets that can be set, by the column of images to each, with the results that a target follows.

    Args:
        comparison: the comparison.
        of_dense: results of dense with the most training images, if it has results at each number.
        fixed: see `columns_of`.
    """
    of_columns: dict[str, tuple[Target, Results | None]] = {}
    if of_dense is not None and comparison.n_classes:  # the classes are those of stored test items
        of_columns["images_to_target"] = Target.of_dense(1 / comparison.n_classes), of_dense
    if fixed:
        of_columns["images_to_fixed_target"] = Target(fixed), None
    return of_columns


def _difference(results: Results, others: Results) -> Results:
    """Return the results minus the others."""
    return combined([(1.0, results), (-1.0, others)])


def add_random(rows: pd.DataFrame, comparison: Comparison, references: Mapping[int, int]) -> pd.DataFrame:
    """Return rows with the differences of probes to random tokens.

    Args:
        rows: the rows of a board.
        comparison: a comparison of the track probe.
        references: the entry of random tokens at the same site and budget, by the entry of a row.
    """
    for name, results in _at_largest(comparison).items():
        differences = {}
        for entry, random in references.items():
            if entry in results and random in results and entry != random:
                differences[entry] = _difference(results[entry], results[random])
        if differences:
            key = f"{name}_random_delta"
            values = column_of_results(key, differences, comparison.lone)
            rows = rows.drop(columns=list(values), errors="ignore").join(values)
    return rows


def _at_largest(comparison: Comparison) -> dict[str, dict[int, Results]]:
    """Return the results of linear probes and of neighbours with the most training images, by entry."""
    near = comparison.neighbours_at(comparison.largest)
    return {"linear": comparison.results_at(comparison.largest), "neighbour": near}


def column_of_results(key: str, results: Mapping[int, Results], lone: bool) -> pd.DataFrame:
    """Return the means of results over seeds with 95 % intervals as a column with its ends.

    Intervals are clipped to [0, 1], and those of differences to [-1, 1].
    """
    lowest = -1.0 if key.endswith("_delta") else 0.0
    widths = halves(list(results.values()), lone).tolist()
    values = []
    for one, half in zip(results.values(), widths, strict=True):
        mean = float(np.mean(list(one.means.values()))) if one.means else np.nan
        ends = (None, None) if np.isnan(half) else (max(lowest, mean - half), min(1.0, mean + half))
        values.append(interval_row(key, (mean, *ends)))
    return pd.DataFrame(values, list(results), dtype=float)


def sizes_of(comparison: Comparison) -> list[int]:
    """Return the rising numbers of training images of the cells that are compared."""
    return sorted(set(comparison.records["n_train"]))


def add_ranks(rows: pd.DataFrame, unranked: pd.Index) -> pd.DataFrame:
    """Return rows with the ranks by images to target as text, if these are known. Oracles have none.

    Args:
        rows: the rows of a board.
        unranked: the entries that a board does not rank.
    """
    if "images_to_target" not in rows:
        return rows
    may_have_rank = (rows["kind"] != "oracle") & ~rows.index.isin(unranked)
    values = rows.loc[may_have_rank, "images_to_target"].astype(float)
    texts = [None if ends is None else rank_text(*ends) for ends in targets.ties(values.tolist())]
    return rows.assign(images_to_target_rank=pd.Series(texts, values.index, dtype=object))


def by_size(comparison: Comparison, rows: Sequence[Row], metric: str) -> tuple[list[Row], list[Column]]:
    """Return a row for each strategy and budget with its accuracies at each number of training images, and the columns.

    Args:
        comparison: a comparison of the track probe.
        rows: the rows of the board for its entries, in order, with `entry`.
        metric: a key of KINDS.
    """
    columns = [BY_KEY["strategy"], BY_KEY["budget"]]
    values: dict[int, Row] = {row["entry"]: {**row} for row in rows}
    for n in sizes_of(comparison):
        of_size = over_seeds(comparison.records[comparison.records["n_train"] == n], {metric: "mean"})[metric]
        column = Column(f"{metric}_with_{n}", f"N={n}", "percent", KINDS[metric][1])
        columns.append(column)
        for entry, row in values.items():
            row[column.key] = of_size.get(entry)
    return list(values.values()), columns


def in_order_of_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with a probe: dense first, then by images to target if known, then by accuracy; oracles last."""
    measured = rows[rows["linear_accuracy"].notna()]
    images = measured["images_to_target"] if "images_to_target" in measured else pd.Series(np.nan, measured.index)
    return in_order(
        measured,
        {
            "not dense": measured["strategy"] != DENSE,
            "oracle": measured["kind"] == "oracle",
            "images": images.astype(float),
            "accuracy": -measured["linear_accuracy"].astype(float),
        },
    )
