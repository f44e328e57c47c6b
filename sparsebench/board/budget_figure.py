"""Curves of a board over budgets, as a picture."""

from __future__ import annotations

from typing import Any

from sparsebench.board.board import BudgetBoard, BudgetCurve
from sparsebench.board.entries import DENSE
from sparsebench.text import escape_dollars

WIDTH, HEIGHT = 11.0, 6.0
"""Inches."""
MARGIN, RIGHT = 0.03, 1.02
"""Room below the lowest budget on the axis, and its end: what costs more than dense is beyond it."""
COLOURS = 10
"""Of matplotlib's cycle; markers tell apart what shares one."""
MARKERS = "osD^vP"


def draw(axis: Any, board: BudgetBoard) -> None:
    """Draw a line a strategy: accuracy, with 95 % intervals, by the share of dense MACs that was really spent.

    Oracles are dashed and random choices dotted; all lines end at dense, as the areas do.
    """
    low = board.budgets[-1] - MARGIN
    dense = next(curve for curve in board.curves if curve.strategy == DENSE)
    others = [curve for curve in board.curves if curve is not dense]
    for place, curve in enumerate(others):
        x, y = path(curve, dense)
        how = {"color": f"C{place % COLOURS}", "linestyle": _dashes(curve), "label": escape_dollars(curve.strategy)}
        axis.plot(x, y, linewidth=1.5, alpha=0.9, **how)
        axis.errorbar(
            curve.spent, curve.accuracy, yerr=_bars(curve), fmt=MARKERS[place // COLOURS % len(MARKERS)],
            color=how["color"], markersize=4, capsize=2, elinewidth=0.8, alpha=0.8,
        )  # fmt: skip
    axis.axhline(dense.accuracy[0], color="black", linewidth=0.8, linestyle=(0, (1, 3)))
    axis.plot(1, dense.accuracy[0], "k*", markersize=10, label=DENSE)
    seen = [y for c in board.curves for x, y in zip(c.spent, c.accuracy, strict=True) if low <= x <= RIGHT]
    room = 0.08 * (max(seen) - min(seen)) + 0.01
    axis.set_xlim(low, RIGHT)
    axis.set_ylim(min(seen) - room, max(seen) + room)
    axis.set_xlabel("realised MACs, share of dense")
    axis.set_ylabel(f"accuracy ({escape_dollars(board.task)})")
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8, ncols=1 + len(others) // 25)


def path(curve: BudgetCurve, dense: BudgetCurve) -> tuple[list[float], list[float]]:
    """Return the points that a line goes through, from the smallest share to dense's; beyond it there is none."""
    points = [point for point in zip(curve.spent, curve.accuracy, strict=True) if point[0] < 1]
    points += [(1.0, dense.accuracy[0])] if points else []
    return [x for x, _ in points], [y for _, y in points]


def _dashes(curve: BudgetCurve) -> str:
    if curve.kind == "oracle":
        return "--"
    return ":" if curve.kind == "baseline" else "-"


def _bars(curve: BudgetCurve) -> Any:
    """Return the lengths of the intervals below and above each point; none where they are not known."""
    ends = list(zip(curve.accuracy, curve.low, curve.high, strict=True))
    below = [0.0 if low is None else max(0.0, y - low) for y, low, _ in ends]
    return [below, [0.0 if high is None else max(0.0, high - y) for y, _, high in ends]]
