"""The pictures of a board: accuracy over MACs, and values with their intervals as dots.

Names are drawn as plain text, without formulas and line breaks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from sparsebench.board.board import Board
from sparsebench.board.columns import BY_KEY, over_budget, rank_ends
from sparsebench.board.judge import Curves, points_of
from sparsebench.board.settings import DENSE, about
from sparsebench.errors import UserError, plain, short_names, unknown
from sparsebench.stats import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

ACCURACY, GAP, SAMPLES = WHAT = ("accuracy", "gap", "samples")
"""The quantities that pictures show."""
COLUMN = {ACCURACY: "accuracy", GAP: "aligned_gap_reduction", SAMPLES: "sample_complexity"}
DOTS = {
    ACCURACY: ("Test accuracy.", "accuracy, %"),
    GAP: (
        "Reduction of the spurious gap. The gap is the accuracy where the background fits the class minus that where "
        "it does not.",
        "gap of dense minus gap of the strategy, points",
    ),
    SAMPLES: ("Training samples until half of the trials succeed (N50); fewer are better.", "training samples"),
}
"""Title and axis label of pictures of dots."""
REFERENCES = {
    "oracle": "oracle: knows the relevant tokens",
    "random_inside": "random_inside: random tokens in the network",
    "random": "random: random tokens at the input",
}
"""Strategies that others are compared with, and their explanation in the notes."""
LOOKS = {
    "oracle": style.Series(style.BLACK, (0, (5, 1.5, 1, 1.5)), ""),
    "random_inside": style.Series(style.DARK, (0, (1, 1)), ""),
    "random": style.Series(style.DARK, (0, (1, 2.2)), ""),
}
NAMED = 6
"""Number of strategies that are named unless the user chooses them."""
MOST_NAMED = 24
"""Number of strategies that colours and dashes can distinguish."""
MOST_DOTS = 120
"""Number of rows of a picture of dots. It is then about 50 cm high."""
BELOW = 4
"""The axis leaves out `random` if it loses more than this many times the largest loss of the other named strategies."""
LINEAR = 2.0
"""Points of loss below which the axis is linear; above it is logarithmic, so that small differences can be seen."""
TICKS = (0, *(sign * tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) for sign in (1, -1)))
KINDS = {
    "deployable": ("strategy", style.COLOURS[0], "o"),
    "baseline": ("baseline", style.DARK, "s"),
    "oracle": ("oracle (knows the relevant tokens)", style.COLOURS[3], "^"),
}
"""For each kind of strategy its text in the legend, and colour and marker of its dots."""


class _Line(NamedTuple):
    """A strategy's curve below the dense MACs: x in shares of dense MACs, y, low and high in points against dense."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rank: tuple[float, float]


def quantities(board: Board) -> list[str]:
    """Return the quantities of WHAT that a board has; accuracy for a board without results."""
    rows = board.judged.rows.dropna(axis="columns", how="all")
    return [quantity for quantity in WHAT if COLUMN[quantity] in rows] or [ACCURACY]


def draw(board: Board, quantity: str = ACCURACY, strategies: Sequence[str] = (), width: str = "two") -> Figure:
    """Return one of the pictures of a board.

    Args:
        board: the board.
        quantity: one of WHAT.
        strategies: strategies that curves name, or that are drawn as dots beside dense. If empty, the best are named,
            or all dots are drawn.
        width: one of `style.COLUMNS`.

    Raises:
        UserError: the quantity was not measured, or a strategy is not in the picture.
    """
    if quantity not in quantities(board):
        raise UserError("the board has no results of this quantity", got=quantity, allowed=quantities(board))
    ranking, column = board.judged.over_budgets, BY_KEY[COLUMN[quantity]]
    setting, rows = board.judged.parts.get(column.part), board.judged.rows
    words = "" if setting is None else about(setting)
    if ranking is not None and ranking.curves is not None:
        if quantity == ACCURACY and any(len(line.x) > 1 for line in _lines(ranking.every, ranking.curves).values()):
            return curves(ranking.every, ranking.curves, words, strategies, width, board.third_party)
        rows = rows[~rows["asked"].isin(set(ranking.curves.budgets) - {ranking.curves.middle})]
    # One row for each strategy, at the budget nearest to one half; without curves, one for each strategy and budget.
    values = rows.reindex(columns=["strategy", "budget", "kind", "macs_ratio", *column.keys])
    values.columns = ["strategy", "budget", "kind", "macs_ratio", "value", "low", "high"]
    values = values[values["value"].notna()]
    unique = ~values["strategy"].duplicated(keep=False) | (values["strategy"] == DENSE)
    values["label"] = values["strategy"].where(unique, values["strategy"] + ", " + values["budget"].astype(str))
    values = values.astype(dict.fromkeys(["macs_ratio", "value", "low", "high"], float))
    if quantity != SAMPLES:
        values[["value", "low", "high"]] *= 100
    title, unit = DOTS[quantity]
    budgets = values.loc[values["strategy"] != DENSE, "budget"].unique()
    budget = f"Budget: {budgets[0]}." if len(budgets) == 1 else ""
    return dots(
        values, " ".join(filter(None, (title, budget, words))), unit, strategies, width, samples=quantity == SAMPLES
    )


def curves(
    rows: pd.DataFrame,
    over: Curves,
    title: str,
    strategies: Sequence[str] = (),
    width: str = "two",
    third_party: Collection[str] = (),
) -> Figure:
    """Return the picture of the difference of accuracy to dense over realised MACs, with dense at the left.

    It names the chosen strategies, or by default those of `main_strategies`. Oracle and random tokens are references.
    All other lines are thin and grey. Strategies that cost more than dense are left out.

    Args:
        rows: a row for each strategy and budget, see `Ranking.every`.
        over: the curves.
        title: description of data, networks and track.
        strategies: the strategies to name.
        width: "one" or "two" columns of a paper.
        third_party: strategies that do not come with sparsebench.

    Raises:
        UserError: a chosen strategy is not on the board or costs as much as dense, or there are too many.
    """
    lines = _lines(rows, over)
    chosen = _choice(strategies, over, lines) if strategies else main_strategies(rows, over, third_party)
    references = [name for name in REFERENCES if name in lines and name not in chosen]
    looks = {name: LOOKS[name] for name in references}
    looks |= {name: style.series(place) for place, name in enumerate(chosen)}
    coloured, others = [lines[name] for name in looks], [line for name, line in lines.items() if name not in looks]
    bottom = _bottom(coloured)
    deep = "; lines that leave the chart lose more" if any(line.y.min() < bottom for line in others) else ""
    notes = f"Dense: {100 * over.rows.loc[DENSE, 'accuracy']:.1f} % accuracy. Bars: 95 % intervals of differences. "
    notes += f"The vertical axis is stretched near dense.{f' Grey: all others{deep}.' if others else ''} "
    notes += "" if strategies else f"In colour: {named_by_default(rows, third_party)}. "
    notes += " ".join(f"{REFERENCES[name]}." for name in references) if width == "two" else ""
    with _sheet(width):
        figure, axis = _new(width, max(style.HEIGHTS[width], 0.155 * len(looks) + 0.2), title, notes)
        axis.set_yscale("asinh", linear_width=LINEAR)
        axis.axhline(0, color=style.BLACK, linewidth=style.THIN)
        for line in others:
            axis.plot([1, *line.x], [0, *line.y], color=style.PALE, linewidth=style.THIN, zorder=1)
        for name, look in looks.items():
            line, order = lines[name], 3 if look.marker else 2
            axis.plot([1, *line.x], [0, *line.y], color=look.color, linestyle=look.linestyle, zorder=order, label=name)
            if look.marker:
                axis.plot(line.x, line.y, look.marker, color=look.color, mec="white", mew=0.4, zorder=4)
                axis.vlines(line.x, line.low, line.high, color=look.color, linewidth=0.8, alpha=0.7)
        last = min(line.x[-1] for line in coloured)
        axis.set_xlim(1, last - 0.01 * (1 - last))
        axis.xaxis.set_major_formatter("{x:g}")
        _fit(axis, bottom, max(0.2, *(line.high.max() for line in coloured)))
        axis.set_xlabel("MACs spent, share of dense")
        axis.set_ylabel("accuracy against dense, points")
        axis.grid(axis="y")
        _label(figure, axis, coloured, list(looks.values()), bottom, style.LETTERS[width])
    return figure


def main_strategies(rows: pd.DataFrame, over: Curves, third_party: Collection[str] = ()) -> list[str]:
    """Return the strategies that `curves` names by default, in the board's order.

    They are the most accurate at each budget, then those of best rank; strategies that are significantly worse than
    `random_inside` are left out. The third-party strategies of best rank are named too, however accurate they are.
    """
    lines = _lines(rows, over)
    deployable = set(over.rows.index[over.rows["kind"] == "deployable"]) & set(lines)
    ranked = {name for name in deployable if not math.isnan(lines[name].rank[0])} or deployable
    points = rows[~over_budget(rows)].dropna(subset="line")  # other rows have budgets that are no shares
    accuracies = points.pivot(index="line", columns="asked", values="accuracy")
    accuracies = accuracies.reindex([name for name in lines if name in ranked])
    most_accurate = accuracies.reindex(columns=sorted(over.budgets)).dropna(axis="columns", how="all").idxmax().tolist()
    by_rank = sorted(ranked, key=lambda name: (*np.nan_to_num(lines[name].rank, nan=math.inf), list(lines).index(name)))
    best = list(dict.fromkeys([*most_accurate, *by_rank]))[:NAMED]
    limit = lines["random_inside"].rank[1] if "random_inside" in lines else math.nan
    best = [name for name in best if not lines[name].rank[0] > limit]
    theirs = deployable & set(rows.loc[rows["strategy"].isin(third_party), "line"])
    best += [name for name in over.rows.index if name in theirs][:NAMED]
    return [name for name in lines if name in best]


def named_by_default(rows: pd.DataFrame, third_party: Collection[str]) -> str:
    """Return which strategies `main_strategies` names."""
    others = ", and what does not come with sparsebench" if rows["strategy"].isin(third_party).any() else ""
    return f"the most accurate at each budget{',' if others else ' and'} the best-ranked others{others}"


def dots(
    values: pd.DataFrame,
    title: str,
    unit: str,
    strategies: Sequence[str] = (),
    width: str = "two",
    samples: bool = False,
) -> Figure:
    """Return the picture of one quantity: a dot and its 95 % interval for each row, best on top, dense as a line.

    Of many rows only the best are drawn, because programs do not show pictures of any height.

    Args:
        values: rows with columns strategy, label, kind, macs_ratio, value, low, high. An infinite value was not
            reached. Rows without a value or with more MACs than dense are left out.
        title: title of the picture.
        unit: label of the axis.
        strategies: the strategies to draw beside dense; all if empty.
        width: "one" or "two" columns of a paper.
        samples: whether values are numbers of training samples: fewer are better, and the axis is logarithmic.

    Raises:
        UserError: a chosen strategy has no value.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    values = values[values["value"].notna() & ~(values["macs_ratio"] > 1 + 1e-6)]
    if strategies:
        _check(strategies, set(values["strategy"]))
        values = values[values["strategy"].isin([*strategies, DENSE])]
    order = values.sort_values("value", ascending=samples, kind="stable")
    order, note = _best(order)
    value, low, high = (order[name].to_numpy(float) for name in ("value", "low", "high"))
    place, reached, dense = np.arange(len(order)), np.isfinite(value), (order["strategy"] == DENSE).to_numpy()
    low, high = np.fmin(low, value), np.fmax(high, value)
    high = np.where(np.isinf(high), 1.2 * max(high[np.isfinite(high)], default=1.0), high)
    with _sheet(width):
        figure, axis = _new(width, max(0.16 * len(order) + 0.1, 0.5), title, note)
        if order.empty:
            axis.set_axis_off()
        if samples:
            axis.set_xscale("log")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_locator(NullLocator())
        of_kind = {name: (order["kind"] == name).to_numpy() & ~dense for name in KINDS}
        for words, color, marker, which in (
            *((*KINDS[name], which) for name, which in of_kind.items()),
            (DENSE, style.BLACK, "D", dense),
        ):
            if (drawn := which & reached).any():
                axis.hlines(place[drawn], low[drawn], high[drawn], color=color, linewidth=1)
                axis.plot(value[drawn], place[drawn], marker, color=color, label=words)
        for at in value[dense & reached]:
            axis.axvline(at, color=style.BLACK, linewidth=style.THIN, linestyle=(0, (4, 2)))
        for row in place[~reached]:
            axis.annotate(
                "not reached ",
                (1, row),
                xycoords=("axes fraction", "data"),
                color=style.DARK,
                ha="right",
                va="center",
                fontsize=7,
                bbox={"color": "white", "pad": 0},
            )
        short = short_names(order["label"], style.LETTERS[width])
        axis.set_yticks(place, [plain(short[name]) for name in order["label"]])
        for row in np.flatnonzero(dense):
            axis.get_yticklabels()[row].set_fontweight("bold")
        axis.set_ylim(len(order) - 0.4, -0.6)
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel(f"{unit}; bars: 95 % intervals")
        axis.grid(axis="both")
        if handles := axis.get_legend_handles_labels()[0]:
            columns = len(handles) if width == "two" else 2
            figure.legend(loc="outside lower left", ncols=columns, handletextpad=0.1, columnspacing=1.2)
    return figure


def _best(order: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the first rows and that of dense, and a note on the others; "" if none is left out."""
    if len(order) <= MOST_DOTS:
        return order, "" if len(order) else "No strategy has a result."
    is_first = np.arange(len(order)) < MOST_DOTS
    note = f"The best {MOST_DOTS} of {len(order):,} rows, and dense; the tables of the board have all."
    return order[is_first | (order["strategy"] == DENSE)], note


@contextmanager
def _sheet(width: str) -> Iterator[None]:
    size, names = style.SIZES[width], ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize")
    sizes = dict.fromkeys((*names, "legend.fontsize", "figure.titlesize"), size) | {"figure.labelsize": size - 1}
    with style.sheet(**{"text.parse_math": False} | sizes):
        yield


def _new(width: str, high: float, title: str, notes: str) -> tuple[Figure, Axes]:
    """Return a figure with axes of about `high` inches, a title above them at the left, and notes below."""
    figure = style.new(style.COLUMNS[width], high, layout="constrained")
    room = 0.75  # for ticks, labels and a legend
    for words, color, write in ((title, style.BLACK, figure.suptitle), (notes, style.DARK, figure.supxlabel)):
        if words:
            text = write(plain(words, None).strip(), x=0.01, ha="left", color=color)
            style.wrap(text, 0.98 * figure.bbox.width)
            room += 1.4 * float(text.get_fontsize()) / 72 * (1 + text.get_text().count("\n"))
    figure.set_figheight(high + room)
    return figure, figure.add_subplot()


def _lines(rows: pd.DataFrame, over: Curves) -> dict[str, _Line]:
    """Return the curves of the strategies that cost less than dense, in the board's order."""
    lines, curves = {}, points_of(rows.dropna(subset="accuracy_delta"))
    for name, rank in over.rows["rank"].items():
        if name in curves:
            points = curves[name][::-1]
            y, low, high = (
                100 * points[key].fillna(points["accuracy_delta"]).to_numpy(float)
                for key in BY_KEY["accuracy_delta"].keys
            )
            lines[name] = _Line(name, points["macs_ratio"].to_numpy(float), y, low, high, rank_ends(rank))
    return lines


def _check(strategies: Sequence[str], available: Collection[str]) -> None:
    for name in strategies:
        if name not in available:
            raise unknown("strategy in the picture", name, available)


def _choice(strategies: Sequence[str], over: Curves, lines: Mapping[str, _Line]) -> list[str]:
    """Return the chosen strategies without dense and duplicates; raise UserError if one cannot be drawn."""
    _check(strategies, over.rows.index)
    if costly := [name for name in strategies if name not in lines and name != DENSE]:
        raise UserError("a strategy that costs as much as dense, or more, is in no picture", got=costly[0])
    chosen = [name for name in dict.fromkeys(strategies) if name != DENSE]
    if len(chosen) > MOST_NAMED:
        raise UserError("strategies of a picture", got=str(len(chosen)), allowed=f"at most {MOST_NAMED}")
    return chosen


def _bottom(lines: Sequence[_Line]) -> float:
    """Return the lower end of the vertical axis, in points."""
    lowest = {line.name: float(min(line.low.min(), -0.5)) for line in lines}
    random = lowest.pop("random", 0.0)
    others = min(lowest.values(), default=random)
    return min(others, random if random > BELOW * others else 0.0)


def _fit(axis: Axes, bottom: float, top: float) -> None:
    """Set the limits of the vertical axis, in points, with ticks that do not overlap."""
    place: Callable[[float], float] = lambda y: math.asinh(y / LINEAR)  # noqa: E731
    room = 0.04 * (place(top) - place(bottom))
    low, high = place(bottom) - room, place(top) + room
    axis.set_ylim(LINEAR * math.sinh(low), LINEAR * math.sinh(high))
    ticks: list[float] = []
    for tick in TICKS:
        if low <= place(tick) <= high and all(abs(place(tick) - place(other)) > (high - low) / 16 for other in ticks):
            ticks.append(tick)
    axis.set_yticks(ticks, [f"{tick:+g}" if tick else "dense 0" for tick in ticks])
    axis.set_yticks([], minor=True)


def _label(
    figure: Figure, axis: Axes, lines: Sequence[_Line], looks: Sequence[style.Series], bottom: float, letters: int
) -> None:
    """Put a name at the end of each line, moved up or down so that names do not overlap, and connect both."""
    labels: list[Annotation] = []
    short = short_names([line.name for line in lines], letters)
    for line in lines:
        beyond = f" ({line.y[-1]:.0f})" if line.y[-1] < bottom else ""
        labels.append(
            axis.annotate(
                plain(short[line.name]) + beyond,
                (1, 0.5),
                (20, 0),
                "axes fraction",
                "offset points",
                va="center",
                annotation_clip=False,
            )
        )
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    box, dpi = axis.get_window_extent(), figure.dpi
    distance = max(label.get_window_extent().height for label in labels) * 1.02
    ends = axis.transData.transform([(line.x[-1], line.y[-1]) for line in lines])
    heights = np.clip(ends[:, 1], box.y0, box.y1)
    order = np.argsort(-heights, kind="stable")
    # Positions from top to bottom with at least this distance: the mean of moving names only down and only up.
    steps = distance * np.arange(len(heights))
    falling = heights[order] + steps
    placed = (np.minimum.accumulate(falling) + np.maximum.accumulate(falling[::-1])[::-1]) / 2 - steps
    placed += min(0.0, box.y1 + 0.1 * dpi - placed[0])
    placed += max(0.0, box.y0 - 0.1 * dpi - placed[-1])
    back = axis.transData.inverted().transform
    for rank, place in enumerate(order):
        look, height, x = looks[place], placed[rank], box.x1 + np.array([0.03, 0.15, 0.2]) * dpi
        labels[place].xy = (1, (height - box.y0) / box.height)
        if lines[place].y[-1] < bottom:
            continue
        joint = back([(ends[place, 0], heights[place]), (x[0], heights[place]), (x[1], height), (x[2], height)])
        far = box.x1 - ends[place, 0] > 0.05 * box.width  # a solid line would look like data
        axis.plot(
            *joint.T, color=look.color, linewidth=style.THIN, linestyle=(0, (1, 4)) if far else "-", clip_on=False
        )
        axis.plot(*joint[-1:].T, look.marker or "none", color=look.color, clip_on=False)
