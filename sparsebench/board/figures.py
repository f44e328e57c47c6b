"""The leaderboard as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsebench.board.build import NOT_REACHED, Row

COLOURS = {"baseline": "#6b7280", "deployable": "#2563eb", "oracle": "#d97706"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: accuracy against MACs, sample complexity, and spurious-gap reduction, with 95 % intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 1.6 + 0.42 * max(6, len(rows))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    _accuracy(axes[0], rows)
    _bars(axes[1], rows, "sample_complexity", "N50: training samples for half of the trials (theory)")
    _bars(axes[2], rows, "spurious_gap_reduction", "reduction of the spurious gap (spurious)")
    handles = [axes[0].scatter([], [], color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _name(row: Row, rows: Sequence[Row]) -> str:
    budgets = {other["budget"] for other in rows if other["strategy"] == row["strategy"]}
    return row["strategy"] if len(budgets) == 1 else f"{row['strategy']}, {row['budget']}"


def _error(row: Row, column: str) -> Any:
    value, low, high = (row[column + end] for end in ("", "_low", "_high"))
    return None if low is None or isinstance(high, str) else [[max(0, value - low)], [max(0, high - value)]]


def _accuracy(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        if row["accuracy"] is None or row["macs_ratio"] is None:
            continue
        point = (row["macs_ratio"], row["accuracy"])
        colour = COLOURS[row["kind"]]
        axis.errorbar(*point, yerr=_error(row, "accuracy"), fmt="o", color=colour, capsize=3)
        axis.annotate(_name(row, rows), point, xytext=(6, 4), textcoords="offset points", fontsize=9, color=colour)
    axis.set(xlabel="MACs / dense", ylabel="accuracy (composite)", xlim=(0, 1.25), title="Accuracy against cost")
    axis.grid(alpha=0.3)


def _bars(axis: Any, rows: Sequence[Row], column: str, title: str) -> None:
    shown = [row for row in reversed(rows) if row[column] is not None]
    finite = [row[column] for row in shown if row[column] != NOT_REACHED]
    edge = max(finite, default=1.0) * 1.5
    for place, row in enumerate(shown):
        colour = COLOURS[row["kind"]]
        if row[column] == NOT_REACHED:
            axis.barh(place, edge, color=colour, alpha=0.15, hatch="//")
            axis.text(edge, place, " not reached", va="center", ha="left", fontsize=9, color=colour)
            continue
        axis.barh(place, row[column], color=colour, alpha=0.8, xerr=_error(row, column), capsize=3)
    axis.set_yticks(range(len(shown)), [_name(row, rows) for row in shown])
    axis.set_title(title, fontsize=10)
    if column == "sample_complexity" and finite:
        axis.set_xscale("log")
        axis.set_xlim(min(finite) / 2, edge * 4)
    axis.grid(alpha=0.3, axis="x")
    axis.axvline(0, color="black", linewidth=0.8)
