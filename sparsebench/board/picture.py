"""The pictures of a board: accuracy over MACs, and values with their intervals as dots.

Both are drawn from plain tables of pandas and from facts, words that the title is made of. Names are drawn as they are:
no formula, no line break.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from sparsebench import style
from sparsebench.board.entries import DENSE
from sparsebench.errors import UserError, unknown
from sparsebench.text import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

REFERENCES = {
    "oracle": "oracle: knows the relevant tokens",
    "random_inside": "random_inside: random tokens in the network",
    "random": "random: random tokens at the input",
}
"""Strategies that others are held against, and what the title says of them."""
NAMED = 6
"""Strategies that are named unless they are chosen."""
MOST_NAMED = 24
"""Strategies that colours and dashes tell apart."""
MOST_ROWS = 200
"""Of a picture of dots, which has pages to fit on."""
MISSED = 1.02
"""A strategy that spends more than so many times a budget does not count as one of that budget."""
BELOW = 4
"""Random tokens at the input are beyond the axis where they lose more than so many times what all others do."""
LINEAR = 2.0
"""Points of loss below which the axis is linear; above it is logarithmic, so that small differences can be seen."""
TICKS = (20, 10, 5, 2, 1, 0.5, 0, -0.5, -1, -2, -5, -10, -20, -50, -100)
KINDS = {
    "deployable": ("strategy", style.COLOURS[0], "o"),
    "baseline": ("baseline", style.DARK, "s"),
    "oracle": ("oracle (knows the relevant tokens)", style.COLOURS[3], "^"),
}
"""Kinds of strategies in words, with colour and marker of their dots."""
EDGE = 0.06
"""Inches between what is drawn and the rim."""
LETTERS, SIZE = {"one": 20, "two": 34}, {"one": 7, "two": 9}
"""Of a name at most, and of all letters in points, by the width."""


class _Line(NamedTuple):
    """A strategy below the dense MACs: x shares of MACs, y points against dense, low and high its interval."""

    name: str
    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray
    rank: tuple[float, float]


def has_curves(board: pd.DataFrame) -> bool:
    """Say whether `curves` can draw a board: dense is in it, and a strategy at two budgets below its MACs."""
    return _dense(board) is not None and any(len(line.x) > 1 for line in _lines(board))


def curves(board: pd.DataFrame, facts: Mapping[str, str], strategies: Sequence[str] = (), width: str = "two") -> Figure:
    """Return the picture of accuracy against dense over the MACs that were spent, dense at the left.

    Named are the strategies that are chosen, or else the best at each budget and those of the best ranks; oracle and
    random tokens are references, and all others are thin and grey. Strategies that cost more than dense are left out.

    Args:
        board: a row a strategy and budget, best strategies first, with columns strategy, kind (baseline, deployable or
            oracle), budget (share of dense MACs that was asked for; 1 for dense), macs_ratio (share that was spent),
            accuracy, rank_first and rank_last (NaN where not ranked); and, where they are known, accuracy_delta,
            accuracy_delta_low and accuracy_delta_high, the difference to dense with its 95 % interval.
        facts: what the title says, in order: data, networks, track.
        strategies: which are named.
        width: "one" or "two" columns of a paper.

    Raises:
        UserError: a strategy that is chosen is not on the board, costs more than dense, or they are too many.
    """
    dense, lines = _dense(board), {line.name: line for line in _lines(board)}
    assert dense is not None
    named = _chosen(board, strategies, lines) if strategies else _best(board, lines)
    references = [name for name in REFERENCES if name in lines and name not in named]
    inches, others = style.COLUMNS[width], len(lines) - len(named) - len(references)
    notes = [f"Dense: {100 * dense:.1f} % accuracy.", "Bars: 95 % intervals of differences."]
    notes += ["The vertical axis is stretched near dense.", f"Grey: {others} others." if others else ""]
    notes += [f"{REFERENCES[name]}." for name in references] if width == "two" else []
    with _sheet(width):
        figure = style.new(inches, 1)
        heading = _heading(figure, facts.values(), notes, width)
        axis = figure.add_axes((0, 0, 1, 1))
        axis.set_yscale("asinh", linear_width=LINEAR)
        axis.axhline(0, color=style.BLACK, linewidth=0.7)
        for name, line in lines.items():
            if name not in named and name not in references:
                axis.plot([1, *line.x], [0, *line.y], color=style.PALE, linewidth=0.7, zorder=1)
        ends = [_reference(axis, lines[name]) for name in references]
        ends += [_series(axis, lines[name], place) for place, name in enumerate(named)]
        shown = [lines[name] for name in (*named, *references)]
        last = min(line.x[-1] for line in shown)
        axis.set_xlim(1, last - 0.01 * (1 - last))
        bottom, top = _losses(shown)
        _fit(axis, bottom, top)
        axis.set_xticks(ticks := _shares(last, width), [f"{tick:g}" for tick in ticks])
        axis.set_xlabel("MACs spent, share of dense")
        axis.set_ylabel("accuracy against dense, points")
        axis.grid(axis="y")
        labels = []
        for end in ends:
            beyond = f" (−{-end.y:.0f})" if end.y < bottom else ""
            labels.append(axis.text(1, 0, plain(end.name, LETTERS[width]) + beyond, va="center"))
        high = max(0.5 * inches, 2.4, 0.155 * len(labels) + 0.2)
        _place(figure, axis, heading, labels, high)
        _spread(figure, axis, labels, ends, bottom)
    return figure


def dots(
    values: pd.DataFrame,
    facts: Mapping[str, str],
    unit: str,
    strategies: Sequence[str] = (),
    width: str = "two",
    *,
    falling: bool = True,
    logarithmic: bool = False,
) -> Figure:
    """Return the picture of one quantity: a dot a strategy with its 95 % interval, the best on top, dense as a line.

    Args:
        values: a row a strategy, with columns strategy, label, kind, macs_ratio, value, low, high; infinite values were
            not reached; rows without a value, and of more MACs than dense, are left out.
        facts: what the title says, in order.
        unit: what the axis says.
        strategies: which are drawn beside dense; none means all.
        width: "one" or "two" columns of a paper.
        falling: whether large values are good.
        logarithmic: whether the axis is.

    Raises:
        UserError: a strategy that is chosen has no value.
    """
    values = values[values["value"].notna() & ~(values["macs_ratio"] > 1 + 1e-6)]
    if strategies:
        _check(strategies, values["strategy"])
        values = values[values["strategy"].isin([*strategies, DENSE])]
    order = values.sort_values("value", ascending=not falling, kind="stable")
    left_out, order = max(0, len(order) - MOST_ROWS), order[:MOST_ROWS]
    inches, place = style.COLUMNS[width], np.arange(len(order))
    value, low, high = (order[name].to_numpy(float) for name in ("value", "low", "high"))
    reached = np.isfinite(value)
    note = "No strategy has a result." if order.empty else "Bars: 95 % intervals."
    note += f" {left_out} more are not drawn." if left_out else ""
    with _sheet(width):
        figure = style.new(inches, 1)
        heading = _heading(figure, facts.values(), [note], width)
        axis = figure.add_axes((0, 0, 1, 1))
        if order.empty:
            axis.set_axis_off()
        if logarithmic:
            axis.set_xscale("log")
        for kind, (words, color, marker) in KINDS.items():
            of_kind = (order["kind"] == kind).to_numpy() & reached & (order["strategy"] != DENSE).to_numpy()
            _dots(axis, place[of_kind], value[of_kind], low[of_kind], high[of_kind], color, marker, words)
        is_dense = (order["strategy"] == DENSE).to_numpy() & reached
        _dots(axis, place[is_dense], value[is_dense], low[is_dense], high[is_dense], style.BLACK, "D", DENSE)
        for at in value[is_dense]:
            axis.axvline(at, color=style.BLACK, linewidth=0.7, linestyle=(0, (4, 2)))
        _span(axis, np.concatenate([value, low, high]), logarithmic)
        right = axis.get_xlim()[1]
        for row in place[~reached]:
            axis.text(right, row, "not reached ", color=style.DARK, ha="right", va="center", fontsize=7)
        names = [plain(name, LETTERS[width]) for name in order["label"]]
        axis.set_yticks(place, names)
        for row in np.flatnonzero(order["strategy"] == DENSE):
            axis.get_yticklabels()[row].set_fontweight("bold")
        axis.set_ylim(len(order) - 0.4, -0.6)
        axis.tick_params(axis="y", length=0)
        axis.spines["left"].set_visible(False)
        axis.set_xlabel(unit)
        axis.grid(axis="both")
        handles = axis.get_legend_handles_labels()
        legend = axis.legend(
            *handles, loc="upper left", bbox_to_anchor=(0, 0), borderaxespad=0, borderpad=0,
            ncols=len(handles[0]) if width == "two" else 2, handletextpad=0.1, columnspacing=1.2,
        )  # fmt: skip
        _place(figure, axis, heading, [], max(0.16 * len(order) + 0.1, 0.5), legend)
    return figure


def _dots(
    axis: Axes,
    rows: np.ndarray,
    value: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    color: str,
    marker: str,
    label: str,
) -> None:
    if len(rows):
        axis.hlines(rows, np.fmin(low, value), np.fmax(high, value), color=color, linewidth=1)
        axis.plot(value, rows, marker, color=color, label=label)


def _span(axis: Axes, values: np.ndarray, logarithmic: bool) -> None:
    """Let the axis span finite values, with ticks that are plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    finite = values[np.isfinite(values) & ((values > 0) | (not logarithmic))]
    first, last = (finite.min(), finite.max()) if len(finite) else (1.0, 2.0)
    if logarithmic:
        first, last = first / 1.3, last * (1.3 if np.isfinite(values).all() else 4)
        steps = [
            m * 10.0**e
            for e in range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
            for m in (1, 2, 5)
        ]
        axis.xaxis.set_major_locator(FixedLocator([step for step in steps if first <= step <= last]))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set_xlim(first, last)
        return
    room = 0.04 * (last - first) or 0.05
    axis.set_xlim(first - room, last + room * (1 if np.isfinite(values[~np.isnan(values)]).all() else 6))


@contextmanager
def _sheet(width: str) -> Iterator[None]:
    sizes = ("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    with style.sheet(**{"text.parse_math": False} | dict.fromkeys(sizes, SIZE[width])):
        yield


def _dense(board: pd.DataFrame) -> float | None:
    """Return dense's accuracy."""
    found = board.loc[(board["strategy"] == DENSE) & board["accuracy"].notna(), "accuracy"]
    return None if found.empty else float(found.iloc[0])


def _lines(board: pd.DataFrame) -> list[_Line]:
    """Return the strategies that spend less than dense, in the order of the board."""
    dense = _dense(board)
    able = board[board["accuracy"].notna() & (board["macs_ratio"] < 1) & (board["strategy"] != DENSE)]
    lines = []
    for name, rows in able.groupby("strategy", sort=False):
        rows = rows.sort_values("macs_ratio", ascending=False, kind="stable")
        plain_delta = rows["accuracy"] - (dense or 0.0)
        parts = [plain_delta, plain_delta, plain_delta]
        if "accuracy_delta" in rows:
            delta = rows["accuracy_delta"].fillna(plain_delta)
            parts = [delta, rows["accuracy_delta_low"].fillna(delta), rows["accuracy_delta_high"].fillna(delta)]
        y, low, high = (100 * part.to_numpy(float) for part in parts)
        rank = (float(rows["rank_first"].iloc[0]), float(rows["rank_last"].iloc[0]))
        lines.append(_Line(str(name), rows["macs_ratio"].to_numpy(float), y, low, high, rank))
    return lines


def _check(strategies: Sequence[str], known: Sequence[str] | pd.Series) -> None:
    for name in strategies:
        if name not in set(known):
            raise unknown("strategy in the picture", name, set(known))


def _chosen(board: pd.DataFrame, strategies: Sequence[str], lines: Mapping[str, _Line]) -> list[str]:
    """Return the chosen strategies, once each."""
    _check(strategies, board["strategy"])
    if dear := [name for name in strategies if name not in lines and name != DENSE]:
        raise UserError("a strategy that costs as much as dense, or more, is in no picture", got=dear[0])
    found = [name for name in dict.fromkeys(strategies) if name != DENSE]
    if len(found) > MOST_NAMED:
        raise UserError("strategies of a picture", got=str(len(found)), allowed=f"at most {MOST_NAMED}")
    return found


def _best(board: pd.DataFrame, lines: Mapping[str, _Line]) -> list[str]:
    """Return the strategies to name, in the board's order.

    Of those that may be the best, as their rank begins where the best rank does, the best at each of the smallest
    budgets; then those of the best ranks. What is worse than random tokens in the network is not named.
    """
    fair = {name: line for name, line in lines.items() if _competes(board, name)}
    ranked = {name: line for name, line in fair.items() if not math.isnan(line.rank[0])} or fair
    by_rank = sorted(ranked, key=lambda name: _first(ranked[name].rank))
    leading = [name for name in by_rank if ranked[name].rank[0] == ranked[by_rank[0]].rank[0]] or by_rank
    able = board[board["strategy"].isin(leading) & (board["macs_ratio"] <= MISSED * board["budget"])]
    at_budgets = able.sort_values("accuracy", ascending=False, kind="stable").groupby("budget", sort=True)["strategy"]
    found = list(dict.fromkeys([*at_budgets.first()[: NAMED // 2], *by_rank]))[:NAMED]
    beaten = lines.get("random_inside")
    worse = {name for name in found if beaten is not None and ranked[name].rank[0] > beaten.rank[1]}
    return [name for name in lines if name in found and name not in worse]


def _first(rank: tuple[float, float]) -> tuple[float, float]:
    first, last = (math.inf if math.isnan(end) else end for end in rank)
    return first, last


def _competes(board: pd.DataFrame, name: str) -> bool:
    return bool((board.loc[board["strategy"] == name, "kind"] == "deployable").all())


class _End(NamedTuple):
    """Where a line ends, and how it is drawn."""

    name: str
    color: str
    marker: str
    x: float
    y: float


def _series(axis: Axes, line: _Line, place: int) -> _End:
    how = style.series(place)
    axis.plot([1, *line.x], [0, *line.y], color=how.color, linestyle=how.linestyle, zorder=3, label=line.name)
    axis.plot(line.x, line.y, how.marker, color=how.color, markeredgecolor="white", markeredgewidth=0.4, zorder=4)
    axis.vlines(line.x, line.low, line.high, color=how.color, linewidth=0.8, alpha=0.7, zorder=2)
    return _End(line.name, how.color, how.marker, line.x[-1], line.y[-1])


def _reference(axis: Axes, line: _Line) -> _End:
    dotted = {"random_inside": (0, (1, 1)), "random": (0, (1, 2.2))}
    color, dashes = (style.DARK, dotted[line.name]) if line.name in dotted else (style.BLACK, (0, (5, 1.5, 1, 1.5)))
    axis.plot([1, *line.x], [0, *line.y], color=color, linestyle=dashes, zorder=2, label=line.name)
    return _End(line.name, color, "", line.x[-1], line.y[-1])


def _losses(shown: Sequence[_Line]) -> tuple[float, float]:
    """Return the lowest and highest points to show, with intervals."""
    lowest = {line.name: float(min(line.low.min(), -0.5)) for line in shown}
    others = min((low for name, low in lowest.items() if name != "random"), default=lowest.get("random", -0.5))
    bottom = min(others, lowest.get("random", 0.0)) if lowest.get("random", 0.0) > BELOW * others else others
    return bottom, max(0.2, *(float(line.high.max()) for line in shown))


def _fit(axis: Axes, bottom: float, top: float) -> None:
    """Let the axis of losses span so many points, with ticks that keep a distance."""
    place: Callable[[float], float] = lambda y: math.asinh(y / LINEAR)  # noqa: E731
    room = 0.04 * (place(top) - place(bottom))
    low, high = place(bottom) - room, place(top) + room
    axis.set_ylim(LINEAR * math.sinh(low), LINEAR * math.sinh(high))
    ticks: list[float] = [0]
    for tick in sorted(TICKS, key=abs):
        if low <= place(tick) <= high and all(abs(place(tick) - place(one)) > (high - low) / 16 for one in ticks):
            ticks.append(tick)
    axis.set_yticks(ticks, [f"{tick:+g}".replace("-", "−") if tick else "dense 0" for tick in ticks])
    axis.set_yticks([], minor=True)


def _shares(last: float, width: str) -> list[float]:
    """Return shares of MACs from 1 down to the last."""
    step = 0.1 if width == "two" else 0.2
    return [tick for tick in (round(1 - step * k, 1) for k in range(10)) if tick >= last - 0.01]


def _heading(figure: Figure, facts: Iterable[str], notes: Iterable[str], width: str) -> list[Text]:
    """Write what is shown at the top left, and under it small notes, in as many lines as the width makes them need."""
    most = figure.bbox.width - 2 * EDGE * figure.dpi
    found: list[Text] = []
    small: dict[str, Any] = {"color": style.DARK, "fontsize": SIZE[width] - 1}
    for parts, how in ((facts, {}), (notes, small)):
        said = " ".join(plain(part, 300) for part in parts if part)
        if said:
            found.append(figure.text(0, 1, said, va="top", linespacing=1.25, **how))
            style.wrap(found[-1], most)
    return found


def _place(
    figure: Figure, axis: Axes, heading: Sequence[Text], labels: Sequence[Text], high: float, legend: Any = None
) -> None:
    """Give the axes `high` inches of height, and the figure the room that the texts around them need."""
    dpi, width = figure.dpi, figure.get_figwidth()
    figure.set_figheight(high + 2)
    axis.set_position((0.3, 0.2, 0.4, 0.6))
    figure.draw_without_rendering()
    inside, beside, below = axis.get_window_extent(), axis.yaxis.get_tightbbox(), axis.xaxis.get_tightbbox()
    left = (inside.x0 - beside.x0 if beside else 0.0) / dpi + EDGE
    right = max((label.get_window_extent().width / dpi + 0.32 for label in labels), default=0.12)
    under = 0.0 if legend is None else legend.get_window_extent().height / dpi + EDGE
    bottom = (inside.y0 - below.y0 if below else 0.0) / dpi + EDGE + under
    heights = [text.get_window_extent().height / dpi + EDGE for text in heading]
    total = sum(heights) + 2.5 * EDGE + high + bottom
    figure.set_figheight(total)
    axis.set_position((left / width, bottom / total, (width - left - right - EDGE) / width, high / total))
    for text, above in zip(heading, np.cumsum([EDGE, *heights]), strict=False):
        text.set_position((EDGE / width, 1 - above / total))
    if legend is not None:
        legend.set_bbox_to_anchor((EDGE / width, under / total), transform=figure.transFigure)


def _spread(figure: Figure, axis: Axes, labels: Sequence[Text], ends: Sequence[_End], bottom: float) -> None:
    """Put each label at the end of its line, moved up or down so that none lies on another, and join both."""
    figure.draw_without_rendering()
    box, dpi = axis.get_window_extent(), figure.dpi
    apart = max(label.get_window_extent().height for label in labels) * 1.02
    at = axis.transData.transform([(end.x, end.y) for end in ends])
    wanted = np.clip(at[:, 1], box.y0, box.y1)
    order = np.argsort(-wanted, kind="stable")
    placed = _apart(wanted[order], apart)
    placed += min(0.0, box.y1 + 0.1 * dpi - placed[0])
    placed += max(0.0, box.y0 - 0.1 * dpi - placed[-1])
    back = axis.transData.inverted().transform
    for height, place in zip(placed, order, strict=True):
        label, end = labels[place], ends[place]
        x = box.x1 + np.array([0.03, 0.15, 0.2, 0.27]) * dpi
        label.set_position(back((x[3], height)))
        if end.y < bottom:
            continue
        joint = back([(at[place, 0], wanted[place]), (x[0], wanted[place]), (x[1], height), (x[2], height)])
        axis.plot(*joint.T, color=end.color, linewidth=0.7, clip_on=False, zorder=2)
        axis.plot(*joint[-1:].T, end.marker or "none", color=end.color, clip_on=False)


def _apart(wanted: np.ndarray, apart: float) -> np.ndarray:
    """Return falling places that are at least so far apart and, in all, as near to those wanted as can be."""
    from scipy.optimize import isotonic_regression

    steps = apart * np.arange(len(wanted))
    return np.asarray(isotonic_regression(wanted + steps, increasing=False).x - steps)
