"""Strategies over their budgets: the curve of each strategy, and ranks by the areas under the curves.

A curve is the accuracy over realised MACs, linear between its points and dense. Curves are compared by their mean
height from the lowest common budget to dense, see docs/understand/judging.md, "Over several budgets". Three rules make
this fair. The points are those at the common budgets, as a mean over other budgets would be another quantity. Only a
curve with a point at the lowest common budget has a height, so that all heights span the same budgets. And this point
must spend less than the next budget: otherwise nothing was measured near the lowest one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from sparsebench.board import columns
from sparsebench.board.columns import BY_KEY, interval_row
from sparsebench.board.comparison import Comparison
from sparsebench.board.ranks import add_ranks, in_order, remove_ranks
from sparsebench.board.reading import DENSE, VARIANT, over_seeds, speed_ups
from sparsebench.records.reports import CHECKS
from sparsebench.stats import curves, paired
from sparsebench.stats.paired import Pairs, Results
from sparsebench.strategy.budget import AUTO

HALF = 0.5


class Curves(NamedTuple):
    """The strategies of one comparison over their budgets.

    Attributes:
        budgets: requested shares of dense MACs, falling.
        middle: the budget that is nearest to one half.
        rows: one row for each strategy, dense first. Besides the values over all budgets, a row has those of the
            strategy at `middle`.
        pairs: comparisons of the ranked strategies by the areas under their curves.
    """

    budgets: tuple[float, ...]
    middle: float
    rows: pd.DataFrame
    pairs: Pairs


def with_curves(main: Comparison, rows: pd.DataFrame, unranked: Collection[int]) -> tuple[pd.DataFrame, Curves | None]:
    """Return the rows with the columns of their curves, and the curves.

    Curves are None if no strategy has two budgets in shares of dense MACs, or if dense was not measured.

    Args:
        main: the comparison of the rows.
        rows: a row for each strategy and budget, in order.
        unranked: entries that are not ranked because of missing or failed cells.
    """
    measured = rows[rows["accuracy"].notna() & rows["macs_ratio"].notna()]
    dense = measured.index[measured["strategy"] == DENSE]
    has_several_budgets = measured["curve_key"].dropna().duplicated().any()
    if dense.empty or not has_several_budgets:
        return rows.assign(curve=None), None

    rows = _with_names_of_curves(rows, measured, dense[0])
    rows = rows.assign(
        how=_reductions(main),
        speed_up=speed_ups(main.tested),
        p_label=over_seeds(main.tested, {"p_label": "mean"})["p_label"],
    )
    common = main.common.budgets.common
    compared = compared_points(rows, common)
    heights, values = _heights(main, rows.loc[compared], common)
    empty_columns = [name for name in values if name in rows]
    rows = rows.drop(columns=empty_columns).join(values, on="curve")

    points = rows.dropna(subset="curve")
    budgets = tuple(sorted(set(points["asked"]) - {1.0}, reverse=True))
    middle = middle_of(common or budgets)
    table = _rows_of_curves(main, points, compared, budgets, middle)
    pairs = _rank(table, heights, points.loc[compared, "curve"], main.common.incomplete, unranked)
    rows["kept_accuracy_rank"] = rows["curve"].map(table["rank"])

    return rows, Curves(budgets, middle, _in_order(table), pairs)


def compared_points(rows: pd.DataFrame, common: Collection[float]) -> pd.Index:
    """Return the entries of the points at the common budgets, and of dense."""
    is_at_common = rows["asked"].isin(common) | (rows["curve"] == DENSE)
    return rows.index[rows["curve"].notna() & is_at_common]


def middle_of(budgets: Collection[float]) -> float:
    """Return the budget that is nearest to one half; the smaller one of two that are equally near."""
    return nearest(budgets, HALF)


def nearest(budgets: Collection[float], share: float) -> float:
    """Return the budget that is nearest to a share; the smaller one of two that are equally near."""

    def by_distance(budget: float) -> tuple[float, float]:
        distance = round(abs(budget - share), 9)  # 0.7 and 0.3 are equally near to 0.5, apart from rounding
        return distance, budget

    return min(budgets, key=by_distance)


def _in_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of curves in order: dense, ranked ones by falling kept accuracy, others, oracles."""
    return in_order(
        table,
        {
            "not dense": table.index != DENSE,
            "oracle": table["kind"] == "oracle",
            "not ranked": table["rank_low"].isna(),
            "kept accuracy": -table["kept_accuracy"],
            "name": table.index,
        },
    )


def _with_names_of_curves(rows: pd.DataFrame, measured: pd.DataFrame, dense: int) -> pd.DataFrame:
    """Return rows with the name of their curve in column `curve`. Dense is a curve with one point, at budget 1."""
    names = names_of_curves(set(measured["curve_key"].dropna()))
    rows = rows.assign(curve=measured["curve_key"].map(names.get).astype(object))
    rows.loc[dense, "curve"] = DENSE
    rows.loc[dense, "asked"] = 1.0
    return rows


def names_of_curves(curve_keys: Collection[tuple[str, str, str]]) -> dict[tuple[str, str, str], str]:
    """Return the names of curves: that of the strategy, with the form of the budget if the strategy has several.

    The default schedule beside a chosen one is called so, and the curve of the chosen one has the strategy's name.

    Args:
        curve_keys: the curves, see `Comparison.every`.
    """
    n_curves = Counter((strategy, kind) for strategy, kind, _ in curve_keys)
    names = {}
    for strategy, kind, form in curve_keys:
        has_others = n_curves[strategy, kind] > 1
        chooses = (strategy, kind, AUTO) in curve_keys
        if form == AUTO:
            name = strategy
        elif form == "" and chooses:
            name = f"{strategy}, default schedule"
        else:
            name = f"{strategy} {form}" if has_others and form else strategy
        names[strategy, kind, form] = name
    return names


def _reductions(main: Comparison) -> pd.Series:
    """Return for each entry what it does with tokens; "" if versions of the strategy differ."""
    reductions = main.tested["how"].astype(str).groupby(main.tested["entry"])
    return reductions.first().where(reductions.nunique() == 1, "")


def points_of(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return for each curve the rows with fewer MACs than dense, by rising MACs."""
    below = rows[rows["macs_ratio"] < 1].sort_values(["macs_ratio", "asked"])
    return {str(name): points for name, points in below.groupby("curve")}


def _heights(
    main: Comparison, compared: pd.DataFrame, budgets: Sequence[float]
) -> tuple[dict[str, Results], pd.DataFrame]:
    """Return the mean height of each curve, by which curves are ranked, and kept accuracy and MACs at -2 points.

    Args:
        main: the comparison of the rows.
        compared: the points of all curves at the common budgets, and of dense.
        budgets: the common budgets.
    """
    values = {DENSE: {"kept_accuracy": 1.0, "macs_at_2": 1.0}}
    if not budgets:
        return {}, pd.DataFrame.from_dict(values, orient="index")
    lowest, *higher = sorted(budgets)
    next_budget = higher[0] if higher else 1.0
    spent_at_lowest = compared[compared["asked"] == lowest].groupby("curve")["macs_ratio"].min()

    dense = main.results[compared.index[compared["curve"] == DENSE][0]]
    heights = {}
    for name, points in points_of(compared).items():
        if name not in spent_at_lowest:
            continue
        spent = points["macs_ratio"].tolist()
        results = [main.results[entry] for entry in points.index]
        results.append(dense)
        height = curves.area(results, spent, lowest)
        if height is None:  # the points have no seed in common
            continue
        # A curve that spends as much as the next budget at the lowest one was not measured near the lowest. It has no
        # height, but it has MACs at -2 points.
        if spent_at_lowest[name] < next_budget:
            heights[name] = height
        row = interval_row("macs_at_2", curves.least_macs(results, spent, main.lone))
        # A curve that never falls below has the smallest share itself as value, unrounded: it is an upper bound.
        if row["macs_at_2"] == spent[0]:
            row["macs_at_2_at_most"] = True
        values[name] = row

    kept = curves.kept_accuracy(list(heights.values()), dense, main.lone)
    for name, interval in zip(heights, kept, strict=True):
        values[name] |= interval_row("kept_accuracy", interval)
    return heights, pd.DataFrame.from_dict(values, orient="index")


def _rows_of_curves(
    main: Comparison, points: pd.DataFrame, compared: pd.Index, budgets: Sequence[float], middle: float
) -> pd.DataFrame:
    """Return a row for each curve: its values at the middle budget, those of the curve, and accuracies at all budgets.

    Args:
        main: the comparison of the rows.
        points: the points of all curves, and dense.
        compared: the entries of the points at common budgets, and of dense.
        budgets: all budgets.
        middle: the budget that is nearest to one half.
    """
    first = points.drop_duplicates("curve").set_index("curve")
    at_middle = points[(points["asked"] == middle) | (points["curve"] == DENSE)]
    table = at_middle.set_index("curve").reindex(first.index)
    # These values belong to the whole curve: a curve without a point at the middle budget has them too.
    of_curve = [BY_KEY[key] for key in ("kind", VARIANT, "how", "kept_accuracy", "macs_at_2", CHECKS, "badge")]
    shared = [key for key in (*columns.keys_of(of_curve), "macs_at_2_at_most") if key in first]
    table = table.assign(**first[shared])
    table["strategy"] = table.index
    table["n_seeds"] = table.index.map(_seeds_of_curves(main, points.loc[compared, "curve"])).fillna(0).astype(int)
    remove_ranks(table)

    # At a budget that is not common, an incomplete point may have fewer seeds than the others. It is left out here,
    # because it would not be comparable, and is shown in its own row.
    is_left_out = ~points.index.isin(compared) & points.index.isin(main.common.incomplete)
    shown = points[~is_left_out]
    for budget in budgets:
        key = columns.accuracy_at(budget).key
        of_budget = shown[shown["asked"] == budget].set_index("curve")
        misses_budget = (of_budget["macs_ratio"] / budget - 1).abs() > columns.TOLERANCE
        table[key] = of_budget["accuracy"]
        table[f"{key}_spent"] = of_budget["macs_ratio"].where(misses_budget)
    return table


def _seeds_of_curves(main: Comparison, curve_of: pd.Series) -> dict[str, int]:
    """Return the number of seeds that all compared points of a curve have, by name.

    Args:
        main: the comparison.
        curve_of: the name of the curve of each compared entry.
    """
    numbers = {}
    for name, of_points in curve_of.groupby(curve_of):
        seeds = [set(main.results[entry].means) for entry in of_points.index]
        numbers[str(name)] = len(set.intersection(*seeds))
    return numbers


def _rank(
    table: pd.DataFrame,
    heights: Mapping[str, Results],
    curve_of: pd.Series,
    incomplete: Collection[int],
    unranked: Collection[int],
) -> Pairs:
    """Write the ranks of curves by their heights, and return the comparisons of the ranked ones.

    Ranked are all curves except oracles and those with an unranked compared point. A curve with an incomplete point
    lacks seeds of the others: it has no influence on their variances.

    Args:
        table: a row for each curve.
        heights: the mean heights of curves.
        curve_of: the name of the curve of each compared entry.
        incomplete: the incomplete entries.
        unranked: the entries that are not ranked.
    """
    names = list(heights)
    incomplete_curves = set(curve_of[curve_of.index.isin(incomplete)])
    unranked_curves = set(curve_of[curve_of.index.isin(unranked)])
    outsiders = [place for place, name in enumerate(names) if name in incomplete_curves]
    ranked = []
    for place, name in enumerate(names):
        if name not in unranked_curves and table.loc[name, "kind"] != "oracle":
            ranked.append(place)
    pairs = paired.compare(list(heights.values()), outsiders).among(ranked)
    add_ranks(table, [names[place] for place in ranked], pairs)
    return pairs
