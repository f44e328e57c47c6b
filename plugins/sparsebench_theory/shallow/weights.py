"""What training did to the weights of the shallow Vision Transformer: checks of Li et al., arXiv 2406.17167."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Result, Trial, Verdict, interval, judge
from sparsebench_theory.claims import verdicts_of
from sparsebench_theory.models import PRUNED
from sparsebench_theory.panels import band, legend
from sparsebench_theory.trials import columns, ends, group_by, mean

MATRICES = {"W_Q": "$W_Q$", "W_K": "$W_K$", "W_V": "$W_V$"}
MOST, DROP = 0.9, 0.5
"""The share of the update, squared, that the two largest directions hold when it counts as rank 2, and how much smaller
the third then is than the second."""
NONE = 0.05
"""A change of the hinge loss by at most this is none: a twentieth of the margin."""

verdict = verdicts_of(__package__, DROP=DROP, MOST=MOST, NONE=NONE)


def rank(trials: Sequence[Trial]) -> Result:
    """Singular values of what training added to W_Q, W_K and W_V."""
    good = [t for t in trials if not t.diverged]
    rows, verdicts, panels = [], [], list[Panel]()
    for name, label in MATRICES.items():
        values = np.array([t.curves[f"trained_singular_{name}"] for t in good])
        values = values / values[:, :1] if len(values) else values
        rows += [
            {
                "matrix": name,
                "number": i + 1,
                "over the largest": column.mean(),
                "std": column.std(ddof=len(column) > 1),
            }
            for i, column in enumerate(values.T)
        ]
        panels.append(partial(_draw_rank, values=values, title=f"update of {label}"))
        share = (values[:, :2] ** 2).sum(axis=1) / (values**2).sum(axis=1) if len(values) else np.array([])
        drop = mean(values[:, 2] / values[:, 1] if len(values) else [])
        value, low, high = mean(share)
        verdicts.append(
            verdict(
                "rank",
                f"two hold {interval(value, low, high)} of its square; the third over the second {interval(*drop)}",
                judge([(low or 0) >= MOST, (low or 0) >= MOST and (drop[2] or 1) <= DROP], [(high or 1) < MOST]),
                name=name,
            )
        )  # fmt: skip
    title = "Singular values of the updates, over the largest (bands: one standard deviation)"
    return Result(title, {"rank": rows}, panels, verdicts)


def _draw_rank(axis: Any, values: np.ndarray, title: str) -> None:
    if len(values):
        band(axis, np.arange(1, values.shape[1] + 1), values, "measured", COLOURS[0])
    axis.axvline(2.5, color=COLOURS[5], linestyle="--", linewidth=1, label="rank 2")
    axis.set(title=title, xlabel="number", ylim=(0, 1.05))
    legend(axis)


def neurons(trials: Sequence[Trial]) -> Result:
    """Test loss as the neurons with the shortest rows of W_O are removed, or the longest."""
    rows, verdicts, panels = [], [], list[Panel]()
    for M, group in group_by(trials, lambda t: t.task.patterns).items():
        good = [t for t in group if not t.diverged]
        losses = {
            what: np.array([t.curves[f"trained_loss_without_{what}"] for t in good]).reshape(-1, len(PRUNED))
            for what in ("short", "long")
        }
        for what, values in losses.items():
            rows += [
                {"M": M, "removed": f"{what}est", "share": share, **columns(mean(column), "test loss"),
                 "trials": len(column)}
                for share, column in zip(PRUNED, values.T, strict=True)
            ]  # fmt: skip
        panels.append(partial(_draw_neurons, losses=losses, M=M))
        verdicts += _matter(losses, M)
    title = "Test loss without some of the neurons (bands: one standard deviation)"
    return Result(title, {"neurons": rows}, panels, verdicts)


def _matter(losses: dict[str, np.ndarray], M: int) -> list[Verdict]:
    short, long = losses["short"], losses["long"]
    at = int(np.searchsorted(PRUNED, 1 - 2 / M + 1e-9, side="right")) - 1
    change = mean(short[:, at] - short[:, 0])
    rises = mean((long[:, 5] - long[:, 0]).tolist())
    steady = len(long) > 0 and bool((np.diff(long.mean(axis=0)) >= -1e-3).all())
    low, high = ends(change)
    return [
        verdict(
            "short_rows", f"change of the test loss {interval(*change)}",
            judge([low >= -NONE and high <= NONE], [low > NONE]), share=PRUNED[at], M=M,
        ),
        verdict(
            "long_rows", f"change of the test loss without half: {interval(*rises)}",
            judge([ends(rises)[0] > 0, ends(rises)[0] > 0 and steady], [ends(rises)[1] <= 0]),
            M=M,
        ),
    ]  # fmt: skip


def _draw_neurons(axis: Any, losses: dict[str, np.ndarray], M: int) -> None:
    for (what, values), colour in zip(losses.items(), COLOURS, strict=False):
        band(axis, np.array(PRUNED), values, f"the {what}est rows", colour)
    axis.axvline(1 - 2 / M, color=COLOURS[5], linestyle="--", linewidth=1, label="1 - 2/M")
    axis.set(title=f"M = {M}", xlabel="share of the neurons removed", ylabel="test hinge loss", ylim=(0, None))
    legend(axis)
