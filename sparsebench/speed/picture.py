"""A picture of measured speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparsebench.speed.rows import Row


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw latency against tokens, and speed-up over the eager dense network against batch size, to a file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    timed = [row for row in rows if row.p50 is not None]
    for mode, batch, precision in sorted({(row.mode, row.batch, row.precision) for row in timed}):
        points = sorted(
            (row.tokens, 1000 * (row.p50 or 0))
            for row in timed
            if (row.mode, row.batch, row.precision) == (mode, batch, precision)
        )
        left.plot(*zip(*points, strict=True), "o-", label=f"batch {batch}, {mode}, {precision}")
    for words, mode, precision in sorted({(row.strategy, row.mode, row.precision) for row in timed}):
        line = sorted(
            (row.batch, row.speedup)
            for row in timed
            if (row.strategy, row.mode, row.precision) == (words, mode, precision) and row.speedup is not None
        )
        if line:
            right.plot(*zip(*line, strict=True), "o-", label=f"{words}, {mode}, {precision}")
    left.set(xlabel="patch tokens after the last block", ylabel="ms a batch")
    right.set(xlabel="batch size", ylabel="speed-up over eager dense", xscale="log")
    for axes in (left, right):
        if axes.lines:
            axes.legend(fontsize="x-small")
    figure.savefig(path)
