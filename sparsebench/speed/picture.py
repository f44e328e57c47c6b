"""A picture of measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparsebench import style
from sparsebench.speed.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(rows: Sequence[Row]) -> bytes:
    """Return a PNG of latency against tokens, and of speed-up over the eager dense network against batch size."""
    with style.sheet():
        return style.content(_figure(rows))


def _figure(rows: Sequence[Row]) -> Figure:
    figure = style.new(9, 4, layout="constrained")
    left, right = figure.subplots(1, 2)
    timed = [row for row in rows if row.p50 is not None]
    for mode, batch, precision in sorted({(row.mode, row.batch, row.precision) for row in timed}):
        points = sorted(
            (row.tokens, 1000 * (row.p50 or 0))
            for row in timed
            if (row.mode, row.batch, row.precision) == (mode, batch, precision)
        )
        _line(left, points, f"batch {batch}, {mode}, {precision}")
    for words, mode, precision in sorted({(row.strategy, row.mode, row.precision) for row in timed}):
        line = sorted(
            (row.batch, row.speedup)
            for row in timed
            if (row.strategy, row.mode, row.precision) == (words, mode, precision) and row.speedup is not None
        )
        if line:
            _line(right, line, f"{words}, {mode}, {precision}")
    left.set(xlabel="patch tokens after the last block", ylabel="ms a batch")
    right.set(xlabel="batch size", ylabel="speed-up over eager dense", xscale="log")
    for axes in (left, right):
        if axes.lines:
            axes.legend(fontsize=6)
    return figure


def _line(axes: Axes, points: Sequence[tuple[Any, Any]], label: str) -> None:
    """Draw the next line of the axes."""
    how = style.series(len(axes.lines))
    axes.plot(*zip(*points, strict=True), label=label, **how._asdict())
