"""The picture of what the theory is about: training samples that are needed, over the share of relevant tokens.

Each strategy and budget is a point. Its place is the share of relevant tokens among the tokens that stay at the end; of
merged tokens the first one counts. Its height is the number of training images with which a probe reaches the target,
or for tasks with trials N50. The rank correlation of both is Spearman's over all points. Numbers that were not reached,
and numbers below the smallest one tried, are ties. Its interval resamples strategies with all their budgets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from sparsebench.board.board import Board
from sparsebench.board.judge import Ranking
from sparsebench.board.picture import LOOK_OF_KIND, new_figure, sheet, use_logarithm
from sparsebench.board.reading import DENSE, over_seeds
from sparsebench.errors import UserError, plain, unknown
from sparsebench.stats import style
from sparsebench.stats.intervals import BELOW, Interval, percentiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTITY = "relevance"
RESAMPLES = 2000
QUANTITIES = {"images_to_target": "images to target", "sample_complexity": "N50 of trials"}
"""The columns that are the height of a point, and their names. The first one that a task has is drawn."""
ALWAYS_NAMED = (DENSE, "oracle")
MARGIN = 1.25
"""Factor by which the axis extends beyond the smallest and the largest number of samples."""


class Points(NamedTuple):
    """The points of one task.

    Attributes:
        title: task, model and track.
        quantity: a value of QUANTITIES.
        rows: a row for each strategy and budget: strategy, budget, kind, relevant (the share), value, low, high.
        limits: the smallest and the largest number of training samples that were tried.
        correlation: the rank correlation of `relevant` and `value` with its 95 % interval.
    """

    title: str
    quantity: str
    rows: pd.DataFrame
    limits: tuple[int, int]
    correlation: Interval


def points_of(board: Board) -> list[Points]:
    """Return the points of each task that has both quantities."""
    every = (_points(ranking) for ranking in board.by_task.rankings)
    return [points for points in every if points is not None]


def _points(ranking: Ranking) -> Points | None:
    """Return the points of a ranking; None if one of the quantities was not measured for two rows."""
    comparison = ranking.comparison
    key = next((key for key in QUANTITIES if key in ranking.every and ranking.every[key].notna().any()), None)
    if key is None:
        return None
    rows = ranking.every[["strategy", "budget", "asked", "kind", key, f"{key}_low", f"{key}_high"]]
    rows.columns = pd.Index(["strategy", "budget", "asked", "kind", "value", "low", "high"])
    relevant = over_seeds(comparison.tested, {"selection_precision": "mean"})["selection_precision"]
    rows = rows.assign(relevant=relevant).astype({"value": float, "low": float, "high": float})
    rows = rows[rows["value"].notna() & rows["relevant"].notna()]
    if len(rows) < 2:
        return None
    sizes = comparison.records["n_train"]
    limits = int(sizes.min()), int(sizes.max())
    return Points(comparison.title, QUANTITIES[key], rows, limits, correlation(rows))


def correlation(rows: pd.DataFrame) -> Interval:
    """Return Spearman's rank correlation of relevant and value with its 95 % interval over strategies.

    NaN if one of them does not vary. The interval is from a percentile bootstrap.
    """
    of_strategies = [part[["relevant", "value"]].to_numpy(float) for _, part in rows.groupby("strategy")]
    value = _spearman(np.concatenate(of_strategies))
    n = len(of_strategies)
    if n < 2 or math.isnan(value):
        return value, None, None
    rng = np.random.default_rng(0)
    samples = rng.integers(0, n, (RESAMPLES, n))
    resampled = []
    for sample in samples:
        pairs = [of_strategies[i] for i in sample]
        resampled.append(_spearman(np.concatenate(pairs)))
    low, high = percentiles(np.array(resampled), n)
    return value, max(-1.0, low), min(1.0, high)


def _spearman(pairs: np.ndarray) -> float:
    """Return the rank correlation of (n, 2) numbers, of which the second may be infinite; NaN if one does not vary."""
    ranks = pd.DataFrame(pairs).rank().to_numpy()
    if (np.ptp(ranks, axis=0) == 0).any():
        return math.nan
    return float(np.corrcoef(ranks.T)[0, 1])


def draw(board: Board, strategies: Sequence[str] = (), width: str = "two") -> Figure:
    """Return the picture, with one chart for each task that has both quantities.

    Args:
        board: the board.
        strategies: strategies that are named besides dense and the oracle.
        width: one of `style.COLUMNS`.

    Raises:
        UserError: no task has both quantities, or a strategy has no point.
    """
    tasks = points_of(board)
    if not tasks:
        raise UserError(
            "no task has both the share of relevant tokens and images to a target or N50",
            next_step="run the suite probe, or quick, whose tasks know the relevant tokens",
        )
    known = {name for points in tasks for name in points.rows["strategy"]}
    for name in strategies:
        if name not in known:
            raise unknown("strategy in the picture", name, known)
    with sheet(width):
        high = style.HEIGHTS[width] * len(tasks)
        figure = new_figure(
            width, high, "Training samples that are needed, over the share of relevant tokens.", CAPTION
        )
        for place, points in enumerate(tasks, 1):
            axis = figure.add_subplot(len(tasks), 1, place)
            _draw_points(axis, points, (*ALWAYS_NAMED, *strategies))
    return figure


CAPTION = (
    "A point is a strategy at a budget; bars are 95 % intervals. Circles: strategies. Squares: baselines. Filled "
    "triangles: oracles, which know the relevant tokens. Diamonds: dense. Hollow triangles lie beyond the numbers "
    "tried. rho: Spearman's rank correlation of all points, with its 95 % interval over strategies."
)


def _draw_points(axis: Axes, points: Points, named: Sequence[str]) -> None:
    """Draw the chart of one task. Numbers that lie beyond those tried are drawn at the edges."""
    smallest, largest = points.limits
    bottom, top = smallest / MARGIN, largest * MARGIN
    use_logarithm(axis, "y")
    axis.set_ylim(bottom / MARGIN, top * MARGIN)
    rows = _within(points.rows, bottom, top)
    for kind, (_, color, marker) in {**LOOK_OF_KIND, DENSE: (DENSE, style.BLACK, "D")}.items():
        of_kind = rows[rows["kind"] == kind]
        if of_kind.empty:
            continue
        axis.vlines(of_kind["relevant"], of_kind["low"], of_kind["high"], color=color, linewidth=0.8, alpha=0.6)
        inside = of_kind[~of_kind["above"] & ~of_kind["below"]]
        above = of_kind[of_kind["above"]]
        below = of_kind[of_kind["below"]]
        axis.plot(inside["relevant"], inside["value"], marker, color=color)
        axis.plot(above["relevant"], above["value"], "^", color=color, mfc="white")
        axis.plot(below["relevant"], below["value"], "v", color=color, mfc="white")
    _set_texts(axis, points, rows["value"], named)


def _within(rows: pd.DataFrame, bottom: float, top: float) -> pd.DataFrame:
    """Return rows with value and interval between these numbers, and whether the value was above or below all tried.

    Dense is a kind of its own. A point without an interval has a bar of no length.
    """

    def clipped(values: pd.Series) -> pd.Series:
        return values.replace({BELOW: bottom, math.inf: top}).clip(bottom, top)

    value = rows["value"]
    return rows.assign(
        kind=rows["kind"].mask(rows["strategy"] == DENSE, DENSE),
        value=clipped(value),
        low=clipped(rows["low"].fillna(value)),
        high=clipped(rows["high"].fillna(value)),
        above=np.isinf(value),
        below=value == BELOW,
    )


def _set_texts(axis: Axes, points: Points, value: pd.Series, named: Sequence[str]) -> None:
    """Write the names of some points at their heights `value`, the title with the correlation, and the labels."""
    rows = points.rows
    texts = set()
    for entry in rows.index[rows["strategy"].isin(named)]:
        strategy, asked, budget = rows.loc[entry, ["strategy", "asked", "budget"]]
        text = strategy
        if strategy != DENSE:
            text += f" {budget}" if math.isnan(asked) else f" {asked:g}"
        # Several schedules at one budget have one text.
        if text in texts:
            continue
        texts.add(text)
        axis.annotate(
            plain(text),
            (rows.loc[entry, "relevant"], value[entry]),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=7,
        )
    rho, first, last = points.correlation
    text = "" if math.isnan(rho) else f"; rho {rho:.2f}"
    text += "" if first is None else f" [{first:.2f}, {last:.2f}]"
    axis.set_title(plain(f"{points.title}{text}", 200), loc="left", fontsize=style.SIZES["one"])
    axis.set_ylabel(points.quantity)
    axis.set_xlabel("share of relevant tokens among those that stay")
    axis.grid(axis="both")
