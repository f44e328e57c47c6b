"""The critical-difference diagram: mean ranks over tasks, and which of them differ (Demsar 2006)."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sparsebench.board.build import Ranking
from sparsebench.stats.intervals import LEVEL
from sparsebench.text import escape_dollars

FEWEST = 3
"""Tasks and strategies below which mean ranks say nothing."""
MOST = 10
"""Strategies above which so few tasks can tell hardly any of them apart: of 35 on 5 tasks, 24 ranks."""


@dataclass(frozen=True)
class Critical:
    """Mean ranks of k strategies over N tasks, best first.

    Attributes:
        names: (k,) strategies with their budgets.
        ranks: (k,) mean ranks; equal accuracies share theirs.
        distance: by how much mean ranks differ that Nemenyi's test tells apart.
        p: of Friedman's test, that all are alike.
        tasks: their names.
    """

    names: list[str]
    ranks: np.ndarray
    distance: float
    p: float
    tasks: list[str]

    def groups(self) -> list[tuple[int, int]]:
        """Return the first and last of each longest row of strategies that do not differ significantly."""
        last = [int(np.flatnonzero(self.ranks <= rank + self.distance)[-1]) for rank in self.ranks]
        groups = [(i, end) for i, end in enumerate(last) if end > i and (i == 0 or last[i - 1] < end)]
        return groups


def critical(rankings: Iterable[Ranking]) -> Critical | None:
    """Return the mean ranks of the strategies that every task ranks; None of too few tasks or too many."""
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    rankings = list(rankings)
    known = [{(row["strategy"], row["budget"]): row["accuracy"] for row in one.rows} for one in rankings]
    shared = sorted(set.intersection(*map(set, known))) if known else []
    k, n = len(shared), len(rankings)
    if n < FEWEST or not FEWEST <= k <= MOST:
        return None
    accuracies = np.array([[one[key] for key in shared] for one in known])
    ranks = rankdata(-accuracies, axis=1).mean(axis=0)
    with np.errstate(invalid="ignore"):
        p = float(friedmanchisquare(*accuracies.T).pvalue)
    q = float(studentized_range.ppf(LEVEL, k, np.inf)) / 2**0.5
    order = np.argsort(ranks, kind="stable")
    names = [escape_dollars(" ".join(shared[i])) for i in order]
    distance = q * (k * (k + 1) / (6 * n)) ** 0.5
    return Critical(names, ranks[order], distance, 1.0 if np.isnan(p) else p, [one.task for one in rankings])


def draw(diagram: Critical) -> bytes:
    """Return a PNG: strategies on the axis of mean ranks, bars over those that do not differ significantly."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    k, groups = len(diagram.names), diagram.groups()
    figure = Figure(figsize=(9, 1.6 + 0.16 * len(groups) + 0.11 * k), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set_xlim(0.5, k + 0.5)
    bars = 0.25 * (1 + len(groups))
    for level, (first, last) in enumerate(groups):
        axis.plot(diagram.ranks[[first, last]] + [-0.05, 0.05], [0.25 * (level + 1)] * 2, color="#111827", linewidth=3)
    for place, (name, rank) in enumerate(zip(diagram.names, diagram.ranks, strict=True)):
        left = place < (k + 1) // 2
        depth = bars + 0.45 * (1 + (place if left else k - 1 - place))
        end = 0.5 if left else k + 0.5
        axis.plot([rank, rank, end], [0, depth, depth], color="#9ca3af", linewidth=0.8)
        axis.text(end, depth, f" {name}  {rank:.1f} ", va="center", ha="right" if left else "left", fontsize=7)
    axis.set_ylim(bars + 0.45 * ((k + 1) // 2 + 1), 0)
    axis.xaxis.tick_top()
    axis.set_yticks([])
    for side in ("left", "right", "bottom"):
        axis.spines[side].set_visible(False)
    axis.set_title(
        f"mean rank over {escape_dollars(', '.join(diagram.tasks))}; critical difference {diagram.distance:.1f}, "
        f"Friedman p {diagram.p:.2g}",
        fontsize=9,
    )
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=120, metadata={"Software": None}, bbox_inches="tight")
    return png.getvalue()
