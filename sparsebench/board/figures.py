"""The leaderboard as a picture."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsebench.board import budget_figure
from sparsebench.board.board import BudgetBoard, Row
from sparsebench.board.columns import EVERY, NOT_REACHED, Column
from sparsebench.text import escape_dollars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"baseline": "#6b7280", "deployable": "#2563eb", "oracle": "#d97706"}


PANELS = {
    "accuracy": "accuracy",
    "sample_complexity": "N50: training samples for half of the trials",
    "aligned_gap_reduction": "reduction of the spurious gap",
}


MOST_ROWS = 1000
"""Of a picture: there are none of more than 2^16 pixels."""


def draw(rows: Sequence[Row], over: BudgetBoard | None = None, columns: Sequence[Column] = EVERY) -> bytes:
    """Return a PNG of `figure_of`."""
    png = io.BytesIO()
    figure_of(rows, over, columns).savefig(png, format="png", dpi=110, metadata={"Software": None})
    return png.getvalue()


def figure_of(rows: Sequence[Row], over: BudgetBoard | None = None, columns: Sequence[Column] = EVERY) -> Figure:
    """Return a figure: accuracy, sample complexity and spurious-gap reduction, a line a row, with 95 % intervals.

    Columns that are empty in every row are left out. Where strategies have several budgets the picture opens with their
    curves, in place of the accuracies, and the others are those at the budget nearest one half. A column's title
    says the task that it was taken from.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [column for column in PANELS if any(row[column] is not None for row in rows)]
    if over is not None:
        shown = [column for column in shown if column != "accuracy"]
        rows = [row for row in _at_middle(rows, over) if any(row[column] is not None for column in shown)]
    rows = rows[:MOST_ROWS]
    wide, high = (2.5 + 4.2 * len(shown), 1.4 + 0.4 * len(rows)) if shown or over is None else (0.0, 0.0)
    top = 0.0 if over is None else budget_figure.HEIGHT
    figure = Figure(figsize=(max(wide, budget_figure.WIDTH if top else 0), high + top), layout="constrained")
    FigureCanvasAgg(figure)
    parts: list[Any] = [figure]
    if over is not None:
        parts = [*figure.subfigures(2, 1, squeeze=False, height_ratios=[top, high])[:, 0]] if high else [figure]
        budget_figure.draw(parts[0].subplots(), over)
    if high:
        tasks = {column.key: column.task for column in columns}
        titles = {key: f"{PANELS[key]} ({task})" if (task := tasks.get(key)) else PANELS[key] for key in shown}
        _panels(parts[-1], titles, list(reversed(rows)))
    return figure


def _at_middle(rows: Sequence[Row], over: BudgetBoard) -> list[Row]:
    """Return the rows that have none of the budgets of a board of curves but the middle one."""
    others = {f"macs {budget:g}" for budget in over.budgets if budget != over.middle}
    return [row for row in rows if " ".join(row["budget"].replace(",", " ").split()[:2]) not in others]


def _panels(figure: Any, titles: Mapping[str, str], shown: Sequence[Row]) -> None:
    """Draw columns beside each other under their titles, and what their colours mean."""
    from matplotlib.patches import Patch

    axes = figure.subplots(1, max(1, len(titles)), sharey=True, squeeze=False)[0]
    for (column, title), axis in zip(titles.items(), axes, strict=False):
        _panel(axis, shown, column)
        axis.set_title(escape_dollars(title), fontsize=10)
        axis.set_yticks(range(len(shown)), [_name(row) for row in shown])
    kinds = [kind for kind in COLOURS if any(row["kind"] == kind for row in shown)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


def _name(row: Row) -> str:
    return escape_dollars(f"{row['strategy']}\n{row['budget']}")


def _error(row: Row, column: str) -> Any:
    value, low, high = (row[column + end] for end in ("", "_low", "_high"))
    return None if low is None or high == math.inf else [[max(0, value - low)], [max(0, high - value)]]


def _panel(axis: Any, rows: Sequence[Row], column: str) -> None:
    """Draw one column: dots for accuracies, bars for what has a zero; a hatched bar for "not reached"."""
    finite = [row[column] for row in rows if row[column] is not None and math.isfinite(row[column])]
    edge = max(finite, default=1.0) * 1.5
    for place, row in enumerate(rows):
        colour, value = COLOURS[row["kind"]], row[column]
        if value == math.inf:
            axis.barh(place, edge, height=0.6, color=colour, alpha=0.15, hatch="//")
            axis.text(edge, place, f" {NOT_REACHED}", va="center", ha="left", fontsize=9, color=colour)
        elif column == "accuracy" and value is not None:
            axis.errorbar(value, place, xerr=_error(row, column), fmt="o", color=colour, capsize=3)
        elif value is not None:
            axis.barh(place, value, height=0.6, color=colour, alpha=0.8, xerr=_error(row, column), capsize=3)
    axis.tick_params(axis="y", labelsize=8)
    axis.grid(alpha=0.3, axis="x")
    if column == "sample_complexity":
        axis.set_xscale("log")
        axis.set_xlim(min(finite, default=1.0) / 2, edge * 4)
    elif column == "aligned_gap_reduction":
        axis.axvline(0, color="black", linewidth=0.8)
