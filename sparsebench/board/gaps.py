"""Spurious correlations: gaps and worst groups of entries, and of strategies over their budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from sparsebench.board.columns import BY_KEY, Column, Row, accuracy_at, interval_row
from sparsebench.board.columns import points as in_points
from sparsebench.board.comparison import Comparison, beside_chosen, is_stated
from sparsebench.board.over_budgets import names_of_curves
from sparsebench.board.ranks import in_order
from sparsebench.board.reading import DENSE, ON_BACKGROUND, SEED, entry_of_dense, over_seeds
from sparsebench.stats import curves
from sparsebench.stats.intervals import Interval, mean_interval
from sparsebench.strategy.budget import AUTO


class Gaps(NamedTuple):
    """The gaps of strategies over their budgets.

    Attributes:
        budgets: requested shares of dense MACs, falling.
        points: a row for each strategy and budget, with the columns of gaps, and `name`, that of its curve.
        rows: a row for each curve, dense first, then by falling reduction at the lowest budget, oracles last.
        columns: their columns.
    """

    budgets: tuple[float, ...]
    points: pd.DataFrame
    rows: pd.DataFrame
    columns: tuple[Column, ...]


def gaps_over_budgets(rows: pd.DataFrame) -> Gaps | None:
    """Return the gaps over budgets; None without the gap of dense or with fewer than two budgets.

    The number of a strategy is its reduction at the lowest budget, where most of the background can be removed. A
    schedule that is chosen for outputs close to dense may keep more of the gap than others. So stated schedules at the
    same budget as a chosen one are no curves: they give the range of the reduction over schedules. A default schedule
    beside a chosen one is a curve, and in the range too.

    Args:
        rows: the rows of a board, see `Ranking.every`.
    """
    if "aligned_gap_reduction" not in rows:
        return None
    measured = rows[rows["aligned_gap_reduction"].notna()]
    is_dense = measured["strategy"] == DENSE
    in_range = beside_chosen(measured) & is_stated(measured)
    points = measured[is_dense | (measured["curve_key"].notna() & ~in_range)]
    budgets = tuple(sorted(set(points.loc[points["strategy"] != DENSE, "asked"]), reverse=True))
    if not is_dense.any() or len(budgets) < 2:
        return None

    names = names_of_curves(set(points["curve_key"].dropna()))
    points = points.assign(name=points["curve_key"].map(names.get).where(points["strategy"] != DENSE, DENSE))
    ranges = _ranges(points, measured[in_range])
    table, columns = _table(points, budgets, ranges)
    return Gaps(budgets, points, table, columns)


def _ranges(points: pd.DataFrame, stated: pd.DataFrame) -> dict[tuple[str, float], str]:
    """Return the smallest and the largest reduction over schedules as text, by the chosen one's curve and budget.

    Args:
        points: the points of curves.
        stated: rows with stated schedules beside chosen ones.
    """
    ranges = {}
    for chosen in points[points["budget_places"] == AUTO].itertuples():
        values = [chosen.aligned_gap_reduction]
        for others in (points, stated):
            same_owner = (others["strategy"] == chosen.strategy) & (others["kind"] == chosen.kind)
            values += others.loc[same_owner & (others["asked"] == chosen.asked), "aligned_gap_reduction"].tolist()
        has_stated = ((stated["strategy"] == chosen.strategy) & (stated["asked"] == chosen.asked)).any()
        if has_stated:
            ranges[chosen.name, chosen.asked] = f"{in_points(min(values))} to {in_points(max(values))}"
    return ranges


def _table(
    points: pd.DataFrame, budgets: Sequence[float], ranges: dict[tuple[str, float], str]
) -> tuple[pd.DataFrame, tuple[Column, ...]]:
    """Return a row for each curve, with its reduction at each budget and its gap at the lowest, and the columns."""
    lowest = budgets[-1]
    rows: dict[str, Row] = {}
    for point in points.to_dict("records"):
        row = rows.setdefault(point["name"], {"strategy": point["name"], "kind": point["kind"]})
        is_dense = point["name"] == DENSE
        if not is_dense:
            _copy(point, row, "aligned_gap_reduction", _reduction_at(point["asked"]))
        if is_dense or point["asked"] == lowest:
            _copy(point, row, "aligned_gap", _gap_at(lowest))
            row[_worst_at(lowest).key] = point["worst_group_accuracy"]
    for (name, budget), text in ranges.items():
        rows[name][_range_at(budget).key] = text
    columns = [BY_KEY["strategy"], *map(_reduction_at, budgets)]
    columns += [_range_at(budget) for budget in sorted({budget for _, budget in ranges}, reverse=True)]
    columns += [_gap_at(lowest), _worst_at(lowest)]
    table = pd.DataFrame.from_dict(rows, orient="index")
    order = {
        "not dense": table.index != DENSE,
        "oracle": table["kind"] == "oracle",
        "reduction": -table[_reduction_at(lowest).key],
        "name": table.index,
    }
    return in_order(table, order), tuple(columns)


def _copy(point: Row, row: Row, key: str, column: Column) -> None:
    """Copy a value of a point with its interval to a column of a row."""
    for of_point, of_row in zip(BY_KEY[key].keys, column.keys, strict=True):
        row[of_row] = point[of_point]


def _reduction_at(budget: float) -> Column:
    return _at(budget, "aligned_gap_reduction", "gap_reduction")


def _gap_at(budget: float) -> Column:
    return _at(budget, "aligned_gap", "gap")


def _worst_at(budget: float) -> Column:
    return _at(budget, "worst_group_accuracy", "worst_group")


def _at(budget: float, key: str, name: str) -> Column:
    """Return the column of a quantity at one budget."""
    column = BY_KEY[key]
    return column._replace(key=f"{name}_at_{budget:g}", heading=f"{column.heading} {accuracy_at(budget).heading}")


def _range_at(budget: float) -> Column:
    meaning = "smallest and largest gap reduction over all schedules with these MACs, in points"
    return Column(f"gap_reductions_at_{budget:g}", f"over schedules {accuracy_at(budget).heading}", "text", meaning)


def columns_of(comparison: Comparison) -> pd.DataFrame:
    """Return the columns of gaps for each entry; `aligned_gap` only if the task has groups on backgrounds."""
    tested = comparison.tested
    gaps = tested.groupby(["entry", SEED])["spurious_gap"].mean().unstack().dropna(how="all")
    means = dict.fromkeys(("spurious_gap", "worst_group_accuracy", "accuracy", "macs_ratio"), "mean")
    rows = over_seeds(tested, means).loc[gaps.index]
    rows = rows.rename(columns={"accuracy": "accuracy_with_gap", "macs_ratio": "macs_ratio_with_gap"})

    # The worst group over all seeds, if items are known, instead of the mean over each seed's worst group.
    worst = [curves.worst_group(comparison.results[entry], comparison.groups[entry]) for entry in rows.index]
    rows["worst_group_accuracy"] = pd.Series(worst, rows.index, dtype=float).fillna(rows["worst_group_accuracy"])

    intervals = _intervals_of_gaps(comparison, gaps, entry_of_dense(tested))
    for name, of_entries in intervals.items():
        values = [interval_row(name, interval) for interval in of_entries]
        rows = rows.join(pd.DataFrame(values, rows.index, dtype=float))
    return rows


def _intervals_of_gaps(
    comparison: Comparison, gaps: pd.DataFrame, dense: int | None
) -> dict[str, Sequence[Interval | None]]:
    """Return by column the interval of each entry.

    Args:
        comparison: the comparison.
        gaps: the gap of each entry (row) on each seed (column).
        dense: the entry of dense; None without dense.
    """
    intervals: dict[str, Sequence[Interval | None]] = {}
    if dense in gaps.index:
        reductions: list[Interval | None] = []
        for _, reduction_by_seed in (gaps.loc[dense] - gaps).iterrows():
            differences = reduction_by_seed.dropna().tolist()
            reductions.append(mean_interval(differences) if differences else None)
        intervals["spurious_gap_reduction"] = reductions

    # The aligned gap is defined for four groups: two classes, each on two backgrounds.
    names_of_groups = [name for name in comparison.tested if ON_BACKGROUND.fullmatch(name)]
    has_all_groups = sum(comparison.has(name) for name in names_of_groups) == 4
    if has_all_groups:
        results = [comparison.results[entry] for entry in gaps.index]
        groups = [comparison.groups[entry] for entry in gaps.index]
        lone = comparison.lone
        intervals["aligned_gap"] = curves.aligned_gaps(results, groups, lone)
        if dense is not None:
            of_dense = comparison.results[dense]
            intervals["aligned_gap_reduction"] = curves.gap_reductions(results, of_dense, groups, lone)
    return intervals
