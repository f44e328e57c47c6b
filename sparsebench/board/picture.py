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
from sparsebench.board.columns import BY_KEY, RANK_ENDS, Column, over_budget, percent
from sparsebench.board.comparison import about
from sparsebench.board.gaps import Gaps, gaps_over_budgets
from sparsebench.board.over_budgets import Curves, points_of
from sparsebench.board.reading import DENSE
from sparsebench.errors import UserError, plain, short_names, unknown
from sparsebench.stats import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

ACCURACY, IOU, GAP, SAMPLES = WHAT = ("accuracy", "iou", "gap", "samples")
"""The quantities that pictures show."""
COLUMN = {ACCURACY: "accuracy", IOU: "iou", GAP: "aligned_gap_reduction", SAMPLES: "sample_complexity"}
GAP_IS = "The gap is the accuracy where the background fits the class minus that where it does not."
SPEED = "speed"
"""The quantity of `over_speed`."""
COSTS = {"macs_ratio": "MACs spent, share of dense", "speed_up": "images/s, multiple of dense"}
"""The columns that curves have on the horizontal axis, and its labels."""
DOTS = {
    ACCURACY: ("Test accuracy.", "accuracy, %"),
    IOU: ("Intersection over union of predicted and true patches, mean over object classes.", "IoU, %"),
    GAP: (
        f"Reduction of the spurious gap. {GAP_IS}",
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
NAMED_BY_DEFAULT = 6
"""Number of strategies that are named unless the user chooses them."""
MOST_NAMED = 24
"""Number of strategies that colours and dashes can distinguish."""
MOST_DOTS = 120
"""Number of rows of a picture of dots. It is then about 50 cm high."""
BELOW = 4
"""The axis leaves out `random` if it loses more than this many times the largest loss of the other named strategies."""
LINEAR = 2.0
"""Points of loss below which the axis is linear; above it is logarithmic, so that small differences can be seen."""
LEGEND_COLUMNS = {"one": 2, "two": 4}
"""Columns of a legend below charts, by width."""
TICKS = (0, *(sign * tick for tick in (0.5, 1, 2, 5, 10, 20, 50, 100) for sign in (1, -1)))
LOOK_OF_KIND = {
    "deployable": ("strategy", style.COLOURS[0], "o"),
    "baseline": ("baseline", style.DARK, "s"),
    "oracle": ("oracle (knows the relevant tokens)", style.COLOURS[3], "^"),
}
"""For each kind of strategy its text in the legend, and colour and marker of its dots."""


class _Line(NamedTuple):
    """A strategy's curve below the dense MACs: x is one of COSTS, y, low and high are points against dense."""

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


def draw(
    board: Board,
    quantity: str = ACCURACY,
    strategies: Sequence[str] = (),
    width: str = "two",
    title: str | None = None,
) -> Figure:
    """Return one of the pictures of a board.

    Args:
        board: the board.
        quantity: one of WHAT.
        strategies: strategies that curves name, or that are drawn as dots beside dense. If empty, the best are named,
            or all dots are drawn.
        width: one of `style.COLUMNS`.
        title: text above the picture; None for a description of data and networks in two columns, and none in one
            column, where the caption of a paper has it.

    Raises:
        UserError: the quantity was not measured, or a strategy is not in the picture.
    """
    if quantity not in quantities(board):
        raise UserError("the board has no results of this quantity", got=quantity, allowed=quantities(board))
    column = BY_KEY[COLUMN[quantity]]
    comparison = board.judged.parts.get(column.part)
    words = "" if comparison is None else about(comparison)
    rows = board.judged.rows
    ranking = board.judged.over_budgets
    if ranking is not None and ranking.curves is not None:
        header = words if title is None and width == "two" else title or ""
        over_budgets = None
        if quantity == ACCURACY:
            over_budgets = _accuracy_curves(ranking.every, ranking.curves, header, strategies, width, board.third_party)
        elif quantity == GAP:
            gaps = gaps_over_budgets(ranking.every)
            over_budgets = None if gaps is None else gap_curves(gaps, header, strategies, width, board.third_party)
        if over_budgets is not None:
            return over_budgets
        # One row for each strategy, at the budget nearest to one half; without curves all rows are drawn.
        other_budgets = set(ranking.curves.budgets) - {ranking.curves.middle}
        rows = rows[~rows["asked"].isin(other_budgets)]

    values = _values(rows, column)
    if quantity != SAMPLES:
        values[["value", "low", "high"]] *= 100
    header = title or ""
    if title is None and width == "two":
        header = _title_of_dots(quantity, values, words)
    return dots(values, header, DOTS[quantity][1], strategies, width, samples=quantity == SAMPLES)


def _title_of_dots(quantity: str, values: pd.DataFrame, words: str) -> str:
    """Return the title of a picture of dots: the quantity, the budget if all have the same, and data and networks."""
    sentences = [DOTS[quantity][0]]
    budgets = values.loc[values["strategy"] != DENSE, "budget"].unique()
    if len(budgets) == 1:
        sentences.append(f"Budget: {budgets[0]}.")
    if words:
        sentences.append(words)
    return " ".join(sentences)


def over_speed(board: Board, strategies: Sequence[str] = (), width: str = "two", title: str | None = None) -> Figure:
    """Return the picture of the difference of accuracy to dense over images/s, as far as strategies were timed.

    Args:
        board, strategies, width, title: see `draw`.

    Raises:
        UserError: no strategy was timed at several budgets, or a chosen one was not.
    """
    ranking = board.judged.over_budgets
    lines: dict[str, _Line] = {}
    if ranking is not None and ranking.curves is not None:
        lines = _lines(ranking.every, ranking.curves, "speed_up")
    if ranking is None or ranking.curves is None or not any(len(line.x) > 1 for line in lines.values()):
        raise UserError(
            "the board has no strategy with images/s at several budgets",
            next_step="sparsebench run measures them unless other cells run at the same time",
        )
    chosen = [name for name in strategies if name != DENSE]
    _check(chosen, lines)
    words = about(ranking.comparison) if title is None and width == "two" else title or ""
    return curves(ranking.every, ranking.curves, words, chosen, width, board.third_party, lines, "speed_up")


def _accuracy_curves(
    rows: pd.DataFrame, over: Curves, title: str, strategies: Sequence[str], width: str, third_party: Collection[str]
) -> Figure | None:
    """Return the picture of `curves`; None if no strategy has several points."""
    lines = _lines(rows, over)
    if not any(len(line.x) > 1 for line in lines.values()):
        return None
    return curves(rows, over, title, strategies, width, third_party, lines)


def _values(rows: pd.DataFrame, column: Column) -> pd.DataFrame:
    """Return the values of a column as `dots` takes them, with the budgets. Labels name the budget if needed."""
    values = rows.reindex(columns=["strategy", "budget", "kind", "macs_ratio", *column.keys])
    values.columns = ["strategy", "budget", "kind", "macs_ratio", "value", "low", "high"]
    values = values[values["value"].notna()]
    names = values["strategy"]
    unique = ~names.duplicated(keep=False) | (names == DENSE)
    values["label"] = names.where(unique, names + ", " + values["budget"].astype(str))
    return values.astype(dict.fromkeys(["macs_ratio", "value", "low", "high"], float))


def curves(
    rows: pd.DataFrame,
    over: Curves,
    title: str,
    strategies: Sequence[str] = (),
    width: str = "two",
    third_party: Collection[str] = (),
    lines: Mapping[str, _Line] | None = None,
    cost: str = "macs_ratio",
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
        lines: the lines of these curves, if they are known.
        cost: what the lines have as x, one of COSTS.

    Raises:
        UserError: a chosen strategy is not on the board or costs as much as dense, or there are too many.
    """
    if lines is None:
        lines = _lines(rows, over)
    chosen = _choice(strategies, over, lines) if strategies else main_strategies(rows, over, third_party, lines)
    looks = looks_of(lines, chosen)
    named = [lines[name] for name in looks]
    others = [line for name, line in lines.items() if name not in looks]
    bottom = _bottom(named)

    notes = [
        f"Dense: {percent(over.rows.loc[DENSE, 'accuracy'])} % accuracy.",
        "Bars: 95 % intervals of differences. The vertical axis is stretched near dense.",
    ]
    notes += _notes_on_others(others, bottom)
    if not strategies:
        notes.append(f"In colour: {named_by_default(rows, third_party)}.")
    notes += notes_on_references(looks, width)

    # Names at the ends of the lines need room.
    high = max(style.HEIGHTS[width], 0.155 * len(looks) + 0.2)
    with sheet(width):
        figure, axis = _new(width, high, title, " ".join(notes))
        _set_axes(axis, named, bottom, cost)
        for line in others:
            axis.plot([1, *line.x], [0, *line.y], color=style.PALE, linewidth=style.THIN, zorder=1)
        for line, look in zip(named, looks.values(), strict=True):
            _plot(axis, line, look)
        _label(figure, axis, named, list(looks.values()), bottom, style.LETTERS[width])
    return figure


def gap_curves(
    gaps: Gaps, title: str, strategies: Sequence[str] = (), width: str = "two", third_party: Collection[str] = ()
) -> Figure:
    """Return the picture of the accuracy of the worst group and of the spurious gap, over realised MACs.

    It names the strategies and the references. All other lines are thin and grey.

    Args:
        gaps: the gaps over budgets.
        title: description of data, networks and track.
        strategies: the strategies to name; by default those with the most accurate worst group, mean over budgets, and
            those that do not come with sparsebench.
        width: "one" or "two" columns of a paper.
        third_party: strategies that do not come with sparsebench.

    Raises:
        UserError: a strategy has no gap, or there are too many.
    """
    lines = {str(name): points for name, points in gaps.points.groupby("name") if name != DENSE}
    dense = gaps.points[gaps.points["name"] == DENSE]
    chosen = [name for name in dict.fromkeys(strategies) if name != DENSE]
    _check(chosen, lines)
    check_number(chosen)
    if not strategies:
        chosen = _best_of_worst_group(gaps, third_party)
    looks = looks_of(lines, chosen)
    curves_of = {name: pd.concat([dense, points]) for name, points in lines.items()}

    notes = _notes_on_gaps(gaps, has_others=len(looks) < len(lines))
    if not strategies and chosen:
        theirs = _third_party_too(gaps.points, third_party)
        notes.append(f"In colour: those with the most accurate worst group, mean over budgets{theirs}.")
    notes += notes_on_references(looks, width)

    with sheet(width):
        figure, (worst, gap), legend = new_charts(2, len(looks), width, title, " ".join(notes))
        _draw_gaps(worst, "worst_group_accuracy", curves_of, looks)
        _draw_gaps(gap, "aligned_gap", curves_of, looks)
        worst.set_ylabel("accuracy of the worst group, %")
        gap.set_ylabel("spurious gap, points")
        for axis in (worst, gap):
            axis.set_xlabel("MACs spent, share of dense" if width == "two" else "MACs, share of dense")
        add_legend(legend, worst, width)
    return figure


def _notes_on_gaps(gaps: Gaps, *, has_others: bool) -> list[str]:
    """Return sentences on what a picture of gaps shows, with or without grey lines."""
    notes = [f"{GAP_IS} A small gap is good only if the worst group is accurate."]
    if "aligned_gap_low" in gaps.points:
        notes.append("Bars of the gap: 95 % intervals.")
    if has_others:
        notes.append("Grey: all others.")
    return notes


def _draw_gaps(axis: Axes, key: str, curves_of: Mapping[str, pd.DataFrame], looks: Mapping[str, style.Series]) -> None:
    """Draw one quantity of all strategies over MACs, those with a look above the others."""
    others = [name for name in curves_of if name not in looks]
    for name in [*others, *looks]:
        _plot_gap(axis, name, curves_of[name], key, looks.get(name))
    least = min(points["macs_ratio_with_gap"].min() for points in curves_of.values())
    axis.set_xlim(1, least - 0.02)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(axis="y")


def _best_of_worst_group(gaps: Gaps, third_party: Collection[str]) -> list[str]:
    """Return the strategies with the most accurate worst group, mean over budgets, and the best third-party ones.

    Baselines, oracles and strategies without a point at some budget are left out.
    """
    points = gaps.points[gaps.points["kind"] == "deployable"]
    of_strategies = points.groupby("name")["worst_group_accuracy"].agg(["mean", "size"])
    complete = of_strategies[of_strategies["size"] == len(gaps.budgets)]
    order = complete["mean"].sort_values(ascending=False, kind="stable").index.tolist()
    theirs = set(points.loc[points["strategy"].isin(third_party), "name"])
    best_theirs = [name for name in order if name in theirs][:NAMED_BY_DEFAULT]
    return list(dict.fromkeys([*order[:NAMED_BY_DEFAULT], *best_theirs]))


def _plot_gap(axis: Axes, name: str, points: pd.DataFrame, key: str, look: style.Series | None) -> None:
    """Draw one quantity of a strategy over MACs in percent, from dense on; a chosen one with its intervals, if any."""
    points = points.sort_values("macs_ratio_with_gap", ascending=False)
    x = points["macs_ratio_with_gap"].to_numpy(float)
    y = 100 * points[key].to_numpy(float)
    if look is None:
        axis.plot(x, y, color=style.PALE, linewidth=style.THIN, zorder=1)
        return
    axis.plot(x, y, color=look.color, linestyle=look.linestyle, marker=look.marker, label=plain(name), zorder=3)
    if look.marker and f"{key}_low" in points:
        low, high = (100 * points[f"{key}_{end}"].to_numpy(float) for end in ("low", "high"))
        axis.vlines(x, low, high, color=look.color, linewidth=0.8, alpha=0.7)


def looks_of(available: Collection[str], chosen: Sequence[str]) -> dict[str, style.Series]:
    """Return the looks of named lines: first references that are not chosen themselves, then the chosen ones."""
    looks = {name: LOOKS[name] for name in REFERENCES if name in available and name not in chosen}
    for place, name in enumerate(chosen):
        looks[name] = style.series(place)
    return looks


def _notes_on_others(others: Sequence[_Line], bottom: float) -> list[str]:
    """Return a sentence on the grey lines, if any, of a chart that ends at `bottom`."""
    if any(line.y.min() < bottom for line in others):
        return ["Grey: all others; lines that leave the chart lose more."]
    return ["Grey: all others."] if others else []


def notes_on_references(looks: Collection[str], width: str) -> list[str]:
    """Return a sentence on each reference that is named, if the picture has room."""
    return [f"{REFERENCES[name]}." for name in REFERENCES if name in looks] if width == "two" else []


def _set_axes(axis: Axes, named: Sequence[_Line], bottom: float, cost: str) -> None:
    """Set scales, limits and labels of the axes. Costs fall from the left, dense is a horizontal line."""
    axis.set_yscale("asinh", linear_width=LINEAR)
    axis.axhline(0, color=style.BLACK, linewidth=style.THIN)
    # The axis ends a little beyond the smallest share of MACs, or the fastest network. Some may be slower than dense.
    if cost == "macs_ratio":
        first, last = 1.0, min(line.x[-1] for line in named)
    else:
        first = min(1.0, *(line.x.min() for line in named))
        last = max(line.x.max() for line in named)
    axis.set_xlim(first, last - 0.01 * (first - last))
    axis.xaxis.set_major_formatter("{x:g}")
    fit(axis, bottom, max(0.2, *(line.high.max() for line in named)))
    axis.set_xlabel(COSTS[cost])
    axis.set_ylabel("accuracy against dense, points")
    axis.grid(axis="y")


def _plot(axis: Axes, line: _Line, look: style.Series) -> None:
    """Draw a named line from dense on; one with markers has its intervals too, and is above the references."""
    order = 3 if look.marker else 2
    axis.plot([1, *line.x], [0, *line.y], color=look.color, linestyle=look.linestyle, zorder=order, label=line.name)
    if look.marker:
        axis.plot(line.x, line.y, look.marker, color=look.color, mec="white", mew=0.4, zorder=4)
        axis.vlines(line.x, line.low, line.high, color=look.color, linewidth=0.8, alpha=0.7)


def main_strategies(
    rows: pd.DataFrame,
    over: Curves,
    third_party: Collection[str] = (),
    lines: Mapping[str, _Line] | None = None,
) -> list[str]:
    """Return the strategies that `curves` names by default, in the board's order.

    They are the most accurate at each budget, then those of best rank; strategies that are significantly worse than
    `random_inside` are left out. The third-party strategies of best rank are named too, however accurate they are.

    Args:
        rows, over, third_party, lines: see `curves`.
    """
    if lines is None:
        lines = _lines(rows, over)
    order = list(lines)
    deployable = set(over.rows.index[over.rows["kind"] == "deployable"]) & set(lines)
    ranked = {name for name in deployable if not math.isnan(lines[name].rank[0])} or deployable

    def by_rank(name: str) -> tuple[float, ...]:
        return (*np.nan_to_num(lines[name].rank, nan=math.inf), order.index(name))

    most_accurate = _most_accurate(rows, over, [name for name in order if name in ranked])
    best = list(dict.fromkeys([*most_accurate, *sorted(ranked, key=by_rank)]))[:NAMED_BY_DEFAULT]
    if "random_inside" in lines:
        limit = lines["random_inside"].rank[1]
        best = [name for name in best if not lines[name].rank[0] > limit]
    theirs = deployable & set(rows.loc[rows["strategy"].isin(third_party), "curve"])
    best += [name for name in over.rows.index if name in theirs][:NAMED_BY_DEFAULT]
    return [name for name in order if name in best]


def _most_accurate(rows: pd.DataFrame, over: Curves, names: Sequence[str]) -> list[str]:
    """Return the most accurate of these curves at each budget."""
    points = rows[~over_budget(rows)].dropna(subset="curve")  # other rows have budgets that are no shares
    accuracies = points.pivot(index="curve", columns="asked", values="accuracy").reindex(names)
    of_budgets = accuracies.reindex(columns=sorted(over.budgets)).dropna(axis="columns", how="all")
    return of_budgets.idxmax().tolist()


def _third_party_too(rows: pd.DataFrame, third_party: Collection[str]) -> str:
    """Return the end of a sentence on named strategies, if third-party ones are named too; "" if there are none."""
    return ", and what does not come with sparsebench" if rows["strategy"].isin(third_party).any() else ""


def named_by_default(rows: pd.DataFrame, third_party: Collection[str]) -> str:
    """Return which strategies `main_strategies` names."""
    others = _third_party_too(rows, third_party)
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
    values = values[values["value"].notna() & ~(values["macs_ratio"] > 1 + 1e-6)]
    if strategies:
        _check(strategies, set(values["strategy"]))
        values = values[values["strategy"].isin([*strategies, DENSE])]
    values = values.sort_values("value", ascending=samples, kind="stable")
    values, note = _best(values)
    with sheet(width):
        figure, axis = _new(width, max(0.16 * len(values) + 0.1, 0.5), title, note)
        if values.empty:
            axis.set_axis_off()
        if samples:
            use_logarithm(axis)
        _add_dots(axis, values)

        dense = (values["strategy"] == DENSE).to_numpy()
        short = short_names(values["label"], style.LETTERS[width])
        axis.set_yticks(range(len(values)), [plain(short[name]) for name in values["label"]])
        for place in np.flatnonzero(dense):
            axis.get_yticklabels()[place].set_fontweight("bold")
        axis.set_ylim(len(values) - 0.4, -0.6)
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel(f"{unit}; bars: 95 % intervals")
        axis.grid(axis="both")
        handles, _ = axis.get_legend_handles_labels()
        if handles:
            columns = len(handles) if width == "two" else 2
            figure.legend(loc="outside lower left", ncols=columns, handletextpad=0.1, columnspacing=1.2)
    return figure


def use_logarithm(axis: Axes, direction: str = "x") -> None:
    """Make the horizontal ("x") or vertical axis logarithmic, with ticks at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set(**{f"{direction}scale": "log"})
    scaled = axis.xaxis if direction == "x" else axis.yaxis
    scaled.set_major_locator(LogLocator(subs=(1, 2, 5)))
    scaled.set_major_formatter("{x:g}")
    scaled.set_minor_locator(NullLocator())


def _add_dots(axis: Axes, values: pd.DataFrame) -> None:
    """Draw the dots and intervals of the rows from top to bottom, and a vertical line at dense."""
    value = values["value"].to_numpy(float)
    reached = np.isfinite(value)
    # A row without an interval has a bar of no length. A bar without an end goes beyond all others.
    low = np.fmin(values["low"].to_numpy(float), value)
    high = np.fmax(values["high"].to_numpy(float), value)
    beyond = 1.2 * max(high[np.isfinite(high)], default=1.0)
    high = np.where(np.isinf(high), beyond, high)

    places = np.arange(len(values))
    kind = values["kind"].mask(values["strategy"] == DENSE, DENSE).to_numpy()
    for name, (words, color, marker) in {**LOOK_OF_KIND, DENSE: (DENSE, style.BLACK, "D")}.items():
        drawn = (kind == name) & reached
        if drawn.any():
            axis.hlines(places[drawn], low[drawn], high[drawn], color=color, linewidth=1)
            axis.plot(value[drawn], places[drawn], marker, color=color, label=words)
    for x in value[(kind == DENSE) & reached]:
        axis.axvline(x, color=style.BLACK, linewidth=style.THIN, linestyle=(0, (4, 2)))
    for place in places[~reached]:
        axis.annotate(
            "not reached ",
            (1, place),
            xycoords=("axes fraction", "data"),
            color=style.DARK,
            ha="right",
            va="center",
            fontsize=7,
            bbox={"color": "white", "pad": 0},
        )


def _best(order: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the first rows and that of dense, and a note on the others; "" if none is left out."""
    if len(order) <= MOST_DOTS:
        return order, "" if len(order) else "No strategy has a result."
    is_first = np.arange(len(order)) < MOST_DOTS
    note = f"The best {MOST_DOTS} of {len(order):,} rows, and dense; the tables of the board have all."
    return order[is_first | (order["strategy"] == DENSE)], note


@contextmanager
def sheet(width: str) -> Iterator[None]:
    """Draw with the style sheet of boards, with fonts for one of `style.COLUMNS`."""
    size = style.SIZES[width]
    names = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize")
    sizes = dict.fromkeys((*names, "legend.fontsize", "figure.titlesize"), size) | {"figure.labelsize": size - 1}
    with style.sheet(**{"text.parse_math": False} | sizes):
        yield


def _new(width: str, high: float, title: str, notes: str) -> tuple[Figure, Axes]:
    """Return a figure as `new_figure`, and its axes."""
    figure = new_figure(width, high, title, notes)
    return figure, figure.add_subplot()


def new_figure(width: str, high: float, title: str, notes: str) -> Figure:
    """Return a figure with room for axes of about `high` inches, a title above them at the left, and notes below."""
    figure = style.new(style.COLUMNS[width], high, layout="constrained")
    room = 0.75  # for ticks, labels and a legend
    for words, color, write in ((title, style.BLACK, figure.suptitle), (notes, style.DARK, figure.supxlabel)):
        if words:
            text = write(plain(words, None).strip(), x=0.01, ha="left", color=color)
            style.wrap(text, 0.98 * figure.bbox.width)
            room += 1.4 * float(text.get_fontsize()) / 72 * (1 + text.get_text().count("\n"))
    figure.set_figheight(high + room)
    return figure


def new_charts(n: int, n_names: int, width: str, title: str, notes: str) -> tuple[Figure, list[Axes], Axes]:
    """Return a figure as `new_figure`, with n charts beside each other, and a place below them for a legend of n_names.

    Within a chart a legend would hide lines, which go everywhere.
    """
    heights = [style.HEIGHTS[width], 0.2 * max(1, math.ceil(n_names / LEGEND_COLUMNS[width]))]
    figure = new_figure(width, sum(heights), title, notes)
    grid = figure.add_gridspec(2, n, height_ratios=heights)
    return figure, [figure.add_subplot(grid[0, k]) for k in range(n)], figure.add_subplot(grid[1, :])


def add_legend(place: Axes, chart: Axes, width: str) -> None:
    """Write the legend of a chart into the place of `new_charts`."""
    place.axis("off")
    handles, names = chart.get_legend_handles_labels()
    short = short_names(names, style.LETTERS["one"])
    legend = place.legend(
        handles,
        [short[name] for name in names],
        loc="center left",
        ncols=LEGEND_COLUMNS[width],
        handlelength=3,
        columnspacing=1.2,
        borderpad=0,
    )
    legend.set_in_layout(False)  # it is wider than the charts, which would become narrower


def _lines(rows: pd.DataFrame, over: Curves, cost: str = "macs_ratio") -> dict[str, _Line]:
    """Return the curves of the strategies that cost less than dense, in the board's order; x is one of COSTS."""
    lines = {}
    points_of_curves = points_of(rows.dropna(subset=["accuracy_delta", cost]))
    for name, *rank in over.rows[list(RANK_ENDS)].itertuples(name=None):
        if name not in points_of_curves:
            continue
        points = points_of_curves[name][::-1]
        x = points[cost].to_numpy(float)
        y, low, high = (
            100 * points[key].fillna(points["accuracy_delta"]).to_numpy(float) for key in BY_KEY["accuracy_delta"].keys
        )
        lines[name] = _Line(name, x, y, low, high, tuple(rank))
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
    check_number(chosen)
    return chosen


def check_number(chosen: Sequence[str]) -> None:
    """Raise UserError if more strategies are chosen than colours and dashes can distinguish."""
    if len(chosen) > MOST_NAMED:
        raise UserError("strategies of a picture", got=str(len(chosen)), allowed=f"at most {MOST_NAMED}")


def _bottom(lines: Sequence[_Line]) -> float:
    """Return the lower end of the vertical axis, in points."""
    lowest = {line.name: float(min(line.low.min(), -0.5)) for line in lines}
    random = lowest.pop("random", 0.0)
    others = min(lowest.values(), default=random)
    return min(others, random if random > BELOW * others else 0.0)


def fit(axis: Axes, bottom: float, top: float) -> None:
    """Set the limits of the vertical axis, in points, with ticks that do not overlap."""
    place: Callable[[float], float] = lambda y: math.asinh(y / LINEAR)  # noqa: E731
    room = 0.04 * (place(top) - place(bottom))
    low = place(bottom) - room
    high = place(top) + room
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
    names = _write_names(axis, lines, bottom, letters)
    # The layout makes room for the names at any height, and is then kept: all positions below are in pixels.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    box = axis.get_window_extent()
    ends = axis.transData.transform([(line.x[-1], line.y[-1]) for line in lines])
    ends[:, 1] = np.clip(ends[:, 1], box.y0, box.y1)
    distance = 1.02 * max(name.get_window_extent().height for name in names)
    margin = 0.1 * figure.dpi
    heights = _apart(ends[:, 1], distance, box.y0 - margin, box.y1 + margin)
    for name, height in zip(names, heights, strict=True):
        name.xy = (1, (height - box.y0) / box.height)
    # From top to bottom: connections of lower names are drawn above those of higher ones.
    for place in np.argsort(-ends[:, 1], kind="stable"):
        if lines[place].y[-1] >= bottom:
            _connect(figure, axis, ends[place], heights[place], looks[place])


def _write_names(axis: Axes, lines: Sequence[_Line], bottom: float, letters: int) -> list[Annotation]:
    """Write the names of lines right of the chart, with the loss of a line that leaves the chart."""
    short = short_names([line.name for line in lines], letters)
    names = []
    for line in lines:
        text = plain(short[line.name])
        if line.y[-1] < bottom:
            text += f" ({line.y[-1]:.0f})"
        name = axis.annotate(
            text,
            xy=(1, 0.5),
            xytext=(20, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            va="center",
            annotation_clip=False,
        )
        names.append(name)
    return names


def _connect(figure: Figure, axis: Axes, end: np.ndarray, height: float, look: style.Series) -> None:
    """Connect the end of a line with its name.

    Right of the chart the connection leaves the height of the line, reaches that of the name, and ends with the marker.

    Args:
        figure, axis: the picture and its chart.
        end: (2,) the end of the line in pixels.
        height: the height of the name in pixels.
        look: colour and marker of the line.
    """
    box = axis.get_window_extent()
    leaves, reaches, marker = box.x1 + np.array([0.03, 0.15, 0.2]) * figure.dpi
    x, y = end
    joints = axis.transData.inverted().transform([(x, y), (leaves, y), (reaches, height), (marker, height)])
    # A solid line across the chart would look like data.
    is_far = box.x1 - x > 0.05 * box.width
    dashes = (0, (1, 4)) if is_far else "-"
    axis.plot(*joints.T, color=look.color, linewidth=style.THIN, linestyle=dashes, clip_on=False)
    axis.plot(*joints[-1:].T, look.marker or "none", color=look.color, clip_on=False)


def _apart(heights: np.ndarray, distance: float, bottom: float, top: float) -> np.ndarray:
    """Return heights near the given ones that differ by at least `distance`, in the same order.

    They are the mean of two solutions: moving heights only down, and only up. All are then shifted below `top`, or else
    above `bottom`.
    """
    order = np.argsort(-heights, kind="stable")
    steps = distance * np.arange(len(heights))
    # With the steps added, heights that are far enough apart do not rise.
    levels = heights[order] + steps
    down = np.minimum.accumulate(levels)
    up = np.maximum.accumulate(levels[::-1])[::-1]
    placed = (down + up) / 2 - steps
    placed += min(0.0, top - placed[0])
    placed += max(0.0, bottom - placed[-1])
    result = np.empty_like(placed)
    result[order] = placed
    return result
