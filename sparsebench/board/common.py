"""What the strategies of a comparison have in common: only this is compared, and only who has it is ranked.

docs/understand/judging.md has the rule, "Results that not all strategies have". Tables in this module have a row for
each entry, which is a strategy at a budget, and a column for each cell: a number of training samples, a seed, a draw.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from sparsebench.board.reading import DENSE, DRAW, ENTRY, SEED
from sparsebench.records.table import FOREGROUNDS, LABELS, PREDICTIONS

if TYPE_CHECKING:
    from sparsebench.board.comparison import Comparison

CELL = ["n_train", SEED, DRAW]
"""Columns that identify a cell of an entry."""
PRETRAINING = "plain"
"""The task that trains networks for other tasks. It needs no dense."""


class Budgets(NamedTuple):
    """The budgets of a comparison, as shares of dense MACs.

    Attributes:
        common: the budgets at which at least half of the curves were run, falling; empty if no strategy was run at
            several.
        lacking: the common budgets that an entry's curve lacks, by entry, if any.
        extra: the other budgets of a strategy, by strategy, if any.
        lack_extra: the strategies that lack some of these other budgets.
    """

    common: tuple[float, ...]
    lacking: Mapping[int, set[float]]
    extra: Mapping[str, set[float]]
    lack_extra: Sequence[str]


class Common(NamedTuple):
    """What strategies are compared on, who lacks some of it, and who has more.

    A cell is common if dense and at least half of the strategies have it. A strategy has a cell if it has it at all of
    its common budgets. For a further draw on a network, only strategies that draw random numbers are counted.

    Attributes:
        lacks_dense: whether dense is missing. Then nothing is ranked.
        budgets: the common budgets, and who lacks them.
        cells: the common cells.
        lacking: whether a record of a common cell is missing. Failed and unsupported cells are not missing.
        extra: the number of other cells that a strategy has, by strategy, if any.
        lack_extra: the strategies that lack some of these other cells.
        incomplete: entries without a result in some common cell, with the other points of their curves: a strategy is
            ranked at all of its common budgets or at none.
        used: whether the board uses a result.
    """

    lacks_dense: bool
    budgets: Budgets
    cells: pd.MultiIndex
    lacking: pd.DataFrame
    extra: Mapping[str, int]
    lack_extra: Sequence[str]
    incomplete: set[int]
    used: pd.DataFrame


class _Cells(NamedTuple):
    """The C cells of a comparison, and who has them.

    A network can be tested again, with other random numbers or other pictures. A strategy without random numbers is
    tested once, unless the pictures vary, so only some strategies can have these further tests.

    Attributes:
        has_record: whether an entry has a record of a cell, be it a result or a failure.
        has_result: whether an entry has a result.
        is_further: (C,) whether a cell is a further test of a network.
        place_of_first_test: (C,) the place of the cell that is the first test of the same network, or its own place.
        can_draw: for each entry, whether it can have further tests.
    """

    has_record: pd.DataFrame
    has_result: pd.DataFrame
    is_further: np.ndarray
    place_of_first_test: np.ndarray
    can_draw: pd.Series


def common_of(comparison: Comparison) -> Common:
    """Return what the strategies of a comparison have in common.

    First budgets, then cells at these budgets. Who lacks one of them is incomplete. The rest is left out, and notes
    name it.
    """
    entries = comparison.entries
    budgets = _budgets(comparison)
    # Points of curves are compared at the common budgets only, all other entries always.
    no_common_budget = not budgets.common
    is_compared = entries["asked"].isin(budgets.common) | entries["curve_key"].isna() | no_common_budget
    strategies = entries.loc[is_compared, "strategy"]

    cells = _cells(comparison)
    is_common = _are_common(cells, strategies)
    extra, lack_extra = _extra_cells(cells, is_common, strategies)

    # An entry is expected to have the common cells that it can have.
    is_expected = is_common & (~cells.is_further | cells.can_draw.to_numpy()[:, None])
    lacking = is_expected & ~cells.has_record & is_compared.to_numpy()[:, None]
    no_common_cell = not is_common.any()
    lacks_result = (is_expected & ~cells.has_result).any(axis=1) | no_common_cell

    # A whole curve is incomplete if one of its compared points is, or if it lacks a common budget. A point that is not
    # compared can be incomplete alone.
    incomplete_points = lacks_result.index[lacks_result & is_compared]
    incomplete_curves = set(entries.loc[[*incomplete_points, *budgets.lacking], "curve_key"].dropna())
    is_incomplete = lacks_result | entries["curve_key"].isin(incomplete_curves)

    return Common(
        lacks_dense=comparison.source != PRETRAINING and DENSE not in set(entries["strategy"]),
        budgets=budgets,
        cells=cells.has_record.columns[is_common],
        lacking=lacking.loc[:, is_common],
        extra=extra,
        lack_extra=lack_extra,
        incomplete=set(is_incomplete.index[is_incomplete]),
        used=_used(cells.has_result, is_common, entries.loc[is_compared, "curve_key"]),
    )


def _budgets(comparison: Comparison) -> Budgets:
    """Return the common budgets of a comparison, and who lacks them."""
    entries = comparison.entries
    points = entries.dropna(subset="curve_key")
    # This comes before failures are added, because failures alone do not make a board of several budgets.
    has_several_budgets = points.duplicated("curve_key").any()
    if not has_several_budgets:
        return Budgets((), {}, {}, [])

    # A budget at which a curve has only failed cells was run too.
    with_failures = comparison.every.loc[np.unique(comparison.others[ENTRY])]
    points = pd.concat([points, with_failures[with_failures["curve_key"].isin(points["curve_key"])]])
    budgets_of_curve = points.groupby("curve_key")["asked"].agg(set).to_dict()

    n_curves = Counter(chain.from_iterable(budgets_of_curve.values()))
    common = {budget for budget, n in n_curves.items() if 2 * n >= len(budgets_of_curve)}
    others = set(n_curves) - common

    lacking = {}
    for entry, curve_key in entries["curve_key"].dropna().items():
        missing = common - budgets_of_curve[curve_key]
        if missing:
            lacking[entry] = missing
    extra: dict[str, set[float]] = defaultdict(set)
    lack_extra = set()
    for (strategy, _, _), budgets in budgets_of_curve.items():
        if budgets & others:
            extra[strategy] |= budgets & others
        if not others <= budgets:
            lack_extra.add(strategy)
    return Budgets(tuple(sorted(common, reverse=True)), lacking, dict(extra), sorted(lack_extra))


def _cells(comparison: Comparison) -> _Cells:
    """Return the cells of a comparison, and who has them."""
    measured = comparison.measured[[ENTRY, *CELL]]
    others = comparison.others[[ENTRY, *CELL]]
    others = others[others[ENTRY].isin(comparison.entries.index)]
    has_record = pd.concat([measured, others]).groupby([ENTRY, *CELL]).size().unstack(CELL).notna()
    results = measured.groupby([ENTRY, *CELL]).size().unstack(CELL)
    has_result = results.reindex(columns=has_record.columns).notna()

    pictures_vary = _pictures_vary(comparison.measured)
    is_further = np.asarray(has_record.columns.get_level_values(DRAW) > 0)
    can_draw = has_record.loc[:, is_further].any(axis=1) | pictures_vary

    place_of_cell = {cell: place for place, cell in enumerate(has_record.columns)}
    place_of_first_test = np.arange(len(place_of_cell))
    if not pictures_vary:  # otherwise each test of a network has other pictures, and stands for itself
        for (n_train, seed, _), place in place_of_cell.items():
            place_of_first_test[place] = place_of_cell.get((n_train, seed, 0), place)
    return _Cells(has_record, has_result, is_further, place_of_first_test, can_draw)


def _pictures_vary(measured: pd.DataFrame) -> bool:
    """Return whether repetitions test one network on different pictures."""
    tests = measured[measured["network"] != ""]
    tests = tests[tests[PREDICTIONS].map(bool).astype(bool)]
    different = tests[[ENTRY, SEED, LABELS, FOREGROUNDS]].drop_duplicates()
    return bool(different.duplicated([ENTRY, SEED]).any())


def _are_common(cells: _Cells, strategies: pd.Series) -> np.ndarray:
    """Return (C,) whether cells are common.

    At least half of the strategies that can have a cell must have it, at all budgets that are compared. Dense must have
    a result of the network's first test, and this first test must be common itself.

    Args:
        cells: the cells.
        strategies: the strategy of each entry that is compared.
    """
    compared = strategies.index
    has_at_all_budgets = cells.has_record.loc[compared].groupby(strategies).all()
    can_draw = cells.can_draw[compared].groupby(strategies).any()
    n_able = np.where(cells.is_further, can_draw.sum(), len(can_draw))
    is_common = np.array(2 * has_at_all_budgets.sum() >= n_able)
    if DENSE in strategies.array:
        dense = strategies.index[strategies == DENSE][0]
        is_common &= cells.has_result.loc[dense].to_numpy()[cells.place_of_first_test]
    return is_common & is_common[cells.place_of_first_test]


def _extra_cells(cells: _Cells, is_common: np.ndarray, strategies: pd.Series) -> tuple[dict[str, int], list[str]]:
    """Return the number of results that a strategy has in other cells, and the strategies that lack some of these.

    Args:
        cells: the cells.
        is_common: (C,) whether a cell is common.
        strategies: the strategy of each entry that is compared.
    """
    compared = strategies.index
    # A strategy has an extra cell if it has it at any of its budgets, and lacks it if it lacks it at any of them.
    of_strategy = cells.has_result.loc[compared].groupby(strategies)
    has_extra = of_strategy.any() & ~is_common
    has_at_all_budgets = of_strategy.all()
    can_draw = cells.can_draw[compared].groupby(strategies).any()
    is_able = ~cells.is_further | can_draw.to_numpy()[:, None]

    is_extra_cell = has_extra.any()  # (C,) whether any strategy has it
    lacks_cell = is_extra_cell & ~has_at_all_budgets & is_able
    lacks_some = lacks_cell.any(axis=1)
    n_extra = has_extra.sum(axis=1)
    return n_extra[n_extra > 0].to_dict(), lacks_some.index[lacks_some].tolist()


def _used(has_result: pd.DataFrame, is_common: np.ndarray, curve_keys: pd.Series) -> pd.DataFrame:
    """Return which results the board uses: common cells that all points of a curve have.

    So all numbers of a strategy rest on the same cells. If the points share no common cell, each keeps its own. An
    entry without any common cell keeps all its results.

    Args:
        has_result: whether a cell has a result.
        is_common: (C,) whether a cell is common.
        curve_keys: the curve of each entry that is compared, if any.
    """
    # 1. An entry uses its common cells.
    used = has_result & is_common

    # 2. A point of a curve uses only those that all points have, if there are any.
    curve_keys = curve_keys.dropna()
    by_all_points = used.loc[curve_keys.index].groupby(curve_keys).transform("all")
    shares_cells = by_all_points.any(axis=1)
    used.loc[shares_cells.index[shares_cells]] = by_all_points[shares_cells]

    # 3. An entry without a common cell uses all its results.
    has_no_common_cell = ~used.any(axis=1)
    used[has_no_common_cell] = has_result[has_no_common_cell]
    return used
