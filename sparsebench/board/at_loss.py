"""MACs and images/s at a loss of accuracy: where the curve of a strategy first falls further below dense.

docs/understand/judging.md, "Over several budgets", says how curves are interpolated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sparsebench.board.columns import BY_KEY, Column, interval_row
from sparsebench.board.comparison import Comparison
from sparsebench.board.judge import Ranking
from sparsebench.board.over_budgets import compared_points, points_of
from sparsebench.board.reading import DENSE, SEED
from sparsebench.board.tables import Table
from sparsebench.stats import curves
from sparsebench.stats.intervals import Interval

LOSS = 100 * curves.LOSS
"""The loss of accuracy in points, if the user states none."""
MACS, LARGE, ONE = "macs_at_loss", "images_per_s", "images_per_s_1"
COLUMNS = (
    Column("matched", "matched", "text", "what the rows have in common: the loss of accuracy"),
    Column("task", "task", "text", "name of the task"),
    BY_KEY["strategy"],
    BY_KEY["kind"],
    Column(
        MACS,
        "MACs / dense",
        "fraction",
        "smallest MACs / dense down to which accuracy loses no more, linearly interpolated; not reached: the largest "
        "budget loses more; <=: the lowest budget loses less",
        True,
        falling=False,
    ),
    Column(LARGE, "images/s", "speed", "images/s at these MACs; time is interpolated linearly between budgets", True),
    Column(ONE, "images/s, batch 1", "speed", "the same for single images", True),
)


class Times(NamedTuple):
    """Images/s of rows, measured apart from the records.

    Attributes:
        large: images/s at the largest batch, by strategy and budget; the budget of dense is "".
        one: the same for single images.
        batch: the largest batch.
    """

    large: Mapping[tuple[str, str], float]
    one: Mapping[tuple[str, str], float]
    batch: int


def table_of(ranking: Ranking, loss: float, times: Times | None = None) -> Table | None:
    """Return the MACs and images/s of each strategy at a loss, dense first; None without curves over budgets.

    Args:
        ranking: the ranking.
        loss: points of accuracy below dense.
        times: images/s that were measured apart; None for those of the records.
    """
    main = ranking.comparison
    common = main.common.budgets.common
    if ranking.curves is None or not common:
        return None
    every = ranking.every.loc[compared_points(ranking.every, common)]
    dense = int(every.index[every["curve"] == DENSE][0])
    curves_below = {name: points for name, points in points_of(every).items() if min(common) in set(points["asked"])}
    rows = [_row_of_dense(ranking, every.loc[[dense]], times)]
    for name in ranking.curves.rows.index:
        if name in curves_below:
            rows.append(_row(main, name, pd.concat([curves_below[name], every.loc[[dense]]]), loss / 100, times))
    at = f"at -{loss:g} points" if loss else "at the accuracy of dense"
    about = {"task": ranking.task, "matched": at}
    return Table([about | row for row in rows if row], COLUMNS, at.capitalize(), legend=_legend(main, times))


def _row_of_dense(ranking: Ranking, dense: pd.DataFrame, times: Times | None) -> dict[str, Any]:
    """Return the row of dense, which has no intervals."""
    row: dict[str, Any] = {"strategy": DENSE, "kind": dense["kind"].iloc[0], MACS: 1.0}
    for key, speeds in _speeds(ranking.comparison, dense, times).items():
        row[key] = float(1 / np.mean(1 / speeds))
    return row


def _row(main: Comparison, name: str, points: pd.DataFrame, loss: float, times: Times | None) -> dict[str, Any]:
    """Return the row of a curve; empty if its points have no seed in common.

    Args:
        main: the comparison.
        name: the name of the curve.
        points: its points by rising MACs, then dense.
        loss: the loss as a fraction.
        times: see `table_of`.
    """
    results = [main.results[entry] for entry in points.index]
    spent = points["macs_ratio"].tolist()[:-1]
    if not curves.common_seeds(results):
        return {}
    row: dict[str, Any] = {"strategy": name, "kind": points["kind"].iloc[0]}
    row |= interval_row(MACS, curves.least_macs(results, spent, main.lone, loss))
    row[f"{MACS}_at_most"] = row[MACS] == spent[0]
    for key, speeds in _speeds(main, points, times).items():
        speed: Interval = curves.speed_at_loss(results, spent, speeds, main.lone, loss)
        row |= interval_row(key, speed)
    return row


def _speeds(main: Comparison, points: pd.DataFrame, times: Times | None) -> dict[str, np.ndarray]:
    """Return images/s of some points, by column: (S, P) for the common seeds, or (1, P)."""
    if times is None:
        of_records = _of_records(main, points.index)
        return {} if of_records is None else {LARGE: of_records}
    budgets = points["budget"].mask(points["strategy"] == DENSE, "")
    keys = list(zip(points["strategy"], budgets, strict=True))
    found = {}
    for column, speeds in ((LARGE, times.large), (ONE, times.one)):
        if all(key in speeds for key in keys):
            found[column] = np.array([[speeds[key] for key in keys]])
    return found


def _of_records(main: Comparison, entries: pd.Index) -> np.ndarray | None:
    """Return (S, P) images/s of entries on the common seeds, or their means over timed seeds as (1, P).

    A seed is timed if all entries were timed on one machine with one batch. None without a timed seed.
    """
    timed = main.tested[main.tested["entry"].isin(entries) & main.tested["images_per_s"].notna()]
    where = [SEED, "device", "environment", "timed_batch"]
    by_seed = timed.astype(dict.fromkeys(where[1:3], str)).pivot_table(
        "images_per_s", where, "entry", aggfunc="median", dropna=False, observed=True
    )
    whole = by_seed.reindex(columns=entries).dropna().groupby(SEED).first()
    seeds = curves.common_seeds([main.results[entry] for entry in entries])
    if set(seeds) <= set(whole.index):
        return whole.loc[seeds].to_numpy(float)
    if whole.empty:
        return None
    return np.asarray(1 / (1 / whole).mean().to_numpy(float)[None])


def _legend(main: Comparison, times: Times | None) -> list[str]:
    """Return lines on intervals, and on where the speeds come from."""
    lines = [
        "Curves are interpolated linearly between budgets and dense. "
        "[ ]: 95 % intervals over seeds and items (one seed: items alone)."
    ]
    if times is not None:
        return [
            *lines,
            f"Images/s from sparsebench speed, at batch {times.batch} and 1; intervals are of the accuracies.",
        ]
    batches = main.tested.loc[main.tested["timed_batch"] > 0, "timed_batch"].astype(int)
    if len(batches):
        sizes = " to ".join(str(size) for size in sorted({batches.min(), batches.max()}))
        lines.append(f"Images/s of the records, at batch {sizes}; --speed FOLDER takes those of sparsebench speed.")
    return lines
