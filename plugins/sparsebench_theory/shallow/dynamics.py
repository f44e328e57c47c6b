"""The dynamics of training: Figures 2, 4 and 7 of Li et al. (ICLR 2023), and checks of weights (arXiv 2406.17167).

The quantities are the steps until the test loss is low, the attention on relevant tokens, the ranks of the updates, and
the losses without some neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Result, Trial, Verdict, interval, judge
from sparsebench.stats.intervals import bootstrap_means
from sparsebench_theory.models import PRUNED
from sparsebench_theory.panels import PUBLISHED, band, draw_dashed, legend, verdicts_of
from sparsebench_theory.shallow import published
from sparsebench_theory.shallow import theorems as theory
from sparsebench_theory.shallow.samples import tau
from sparsebench_theory.trials import ENOUGH, columns, compete, ends, group_by, mean, values_of

Shares = tuple[float, float, float]
LITTLE = 0.01
"""Changes of the attention below this count as none."""
MATRICES = {"W_Q": "$W_Q$", "W_K": "$W_K$", "W_V": "$W_V$"}
MOST, DROP = 0.9, 0.5
"""An update counts as rank 2 if its two largest directions have at least the share MOST of its squared norm, and the
third singular value is at most DROP times the second."""
NONE = 0.05
"""Changes of the hinge loss up to this, a twentieth of the margin, count as none."""

verdict = verdicts_of(__package__, DROP=DROP, ENOUGH=ENOUGH, LITTLE=LITTLE, MOST=MOST, NONE=NONE)
UNKNOWN = "as Figure 4; no values known"


def figure_2(trials: Sequence[Trial]) -> Result:
    """Steps until the test loss is below the threshold, against 1 / alpha_*, for each rule for alpha_#."""
    panels: list[Panel] = []
    rows, verdicts = [], []
    for printed, group in group_by(trials, lambda t: t.task.irrelevant is not None).items():
        name = "half of the tokens irrelevant" if printed else "a fixed alpha_#"
        groups = group_by(group, lambda t: t.task.realised_shares())
        steps = {shares: np.array(values_of(ts, "iterations")) for shares, ts in groups.items()}
        rows += [
            {"setting": name, "alpha_*": shares[0], "alpha_#": shares[1], "trials": len(ts),
             "reached": len(steps[shares]), **columns(mean(steps[shares]), "steps")}
            for shares, ts in groups.items()
        ]  # fmt: skip
        panels.append(partial(_draw_steps, steps=steps, trial=group[0], title=name))
        verdicts.append(_in_line(name, steps, len(group)))
    return Result("Figure 2: steps needed against the share of relevant tokens", {"fig2": rows}, panels, verdicts)


def _in_line(name: str, steps: Mapping[Shares, np.ndarray], trials: int) -> Verdict:
    """Return the verdict on the steps of the trials that reached the threshold, by alpha_*."""
    a, confusing = np.array([s[0] for s in steps]), np.array([s[1] for s in steps])
    means = np.array([mean(values)[0] for values in steps.values()])
    resamples = np.array([bootstrap_means(values, stream) for stream, values in enumerate(steps.values())])
    fits = compete({"1/alpha_*": 1 / a, "1/gap": 1 / (a - confusing)}, means, resamples, [*map(len, steps.values())])
    reached = sum(map(len, steps.values()))
    reached_text = (
        f"{reached} of {trials} trials got below the threshold, at {np.isfinite(means).sum()} of {len(a)} alpha_*"
    )
    if not fits:
        return verdict("steps", reached_text, "undecided", name=name)
    inverse = next(fit for fit in fits if fit.name == "1/alpha_*")
    word = judge([inverse.rises, inverse.rises and inverse.r2 >= 0.95], [inverse.flat and reached == trials])
    return verdict(
        "steps", f"R2 {inverse.r2:.3f}, {np.nanmax(means):.0f} to {np.nanmin(means):.0f} steps; best: "
        f"{fits[0].name}; {reached_text}", word if inverse.points >= ENOUGH else "undecided",
        "; ".join(fit.text for fit in fits), name=name,
    )  # fmt: skip


def _draw_steps(axis: Any, steps: Mapping[Shares, np.ndarray], trial: Trial, title: str) -> None:
    reached = {shares[0]: values for shares, values in steps.items() if len(values)}
    if reached:
        a, means = np.array(list(reached)), np.array([values.mean() for values in reached.values()])
        spread = [values.std(ddof=1) if len(values) > 1 else 0.0 for values in reached.values()]
        label = "mean, one standard deviation"
        axis.errorbar(1 / a, means, yerr=spread, fmt="o", color=COLOURS[0], capsize=3, label=label)
        shape = theory.steps_needed(a, trial.task.recipe().lr, trial.task.patterns, trial.model.sigma, tau(trial))
        if np.isfinite(shape).all():
            draw_dashed(axis, 1 / a, shape * (means / shape).mean(), "Theorem 1, scaled")
    threshold = trial.task.threshold
    axis.set(title=title, xlabel="$1/\\alpha_*$", ylabel=f"steps until test loss < {threshold:g}")
    legend(axis)


def figure_4(trials: Sequence[Trial]) -> Result:
    """Attention on relevant tokens during training, with the published curve."""
    curves = _curves(trials)
    panels: list[Panel] = [partial(_draw_attention, curves=curves, trial=trials[0], published_too=True)]
    verdicts = _rises("4", curves, "")
    title = "Figure 4: attention on relevant tokens (bands: one standard deviation)"
    return Result(title, {"fig4": _curve_rows(curves)}, panels, verdicts)


def figure_7(trials: Sequence[Trial]) -> Result:
    """Figure 4 with more patterns."""
    panels: list[Panel] = []
    rows, verdicts = [], []
    for M, group in group_by(trials, lambda t: t.task.patterns).items():
        curves = _curves(group)
        panels.append(partial(_draw_attention, curves=curves, trial=group[0], published_too=False))
        rows += _curve_rows(curves, M=M)
        verdicts += _rises("7", curves, f" (M={M})")
    title = "Figure 7: attention on relevant tokens, with M patterns (bands: one standard deviation)"
    return Result(title, {"fig7": rows}, panels, verdicts)


def _curves(trials: Sequence[Trial]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (P,) up to 100 or the longest trial, and attention (repetitions, P).

    After the end of a trial its last value is repeated, since weights do not change once all training losses are 0.
    """
    good = [t for t in trials if not t.diverged]
    every = trials[0].task.watch
    last = max(100, *(int(t.curves["watched_steps"][-1]) for t in good)) if good else 100
    steps = np.arange(0, last + 1, every)
    held = [np.interp(steps, t.curves["watched_steps"], t.curves["watched_attention_on_relevant"]) for t in good]
    return steps, np.array(held).reshape(len(good), len(steps))


def _curve_rows(curves: tuple[np.ndarray, np.ndarray], **labels: Any) -> list[dict[str, Any]]:
    steps, values = curves
    return [
        labels | {"step": int(step), **columns(mean(column), "attention on relevant")}
        for step, column in zip(steps, values.T, strict=True)
    ]


def _rises(figure: str, curves: tuple[np.ndarray, np.ndarray], name: str) -> list[Verdict]:
    _, values = curves
    is_figure_4 = figure == "4"
    start, end, change = mean(values[:, 0]), mean(values[:, -1]), mean(values[:, -1] - values[:, 0])
    rises, still = (change[1] or 0) > 0, change[2] is not None and change[2] < LITTLE
    steady = bool(len(values)) and bool((np.diff(values.mean(axis=0)) >= -1e-3).all())
    parts = [steady, 0.54 <= start[0] <= 0.58, end[0] >= 0.8] if is_figure_4 else [steady]
    also = ", begins at 0.54 to 0.58 and ends at 0.80 or more" if is_figure_4 else ""
    low, high = (end[1] or 0.0, 1.0 if end[2] is None else end[2])
    text = f"{interval(*start)} to {interval(*end)}; change {interval(*change)}" if len(values) else "no trial trained"
    return [
        verdict(
            "concentrates", text, judge([rises, *(rises and part for part in parts)], [still]), figure=figure,
            name=name, published="0.540 to 0.907" if is_figure_4 else UNKNOWN, also=also,
        ),
        verdict(
            "tends_to_1", interval(*end), judge([low >= 0.9, low >= 0.95], [high < 0.9]), figure=figure, name=name,
            published="0.907 after 100 steps" if is_figure_4 else UNKNOWN,
        ),
    ]  # fmt: skip


def _draw_attention(axis: Any, curves: tuple[np.ndarray, np.ndarray], trial: Trial, published_too: bool) -> None:
    steps, values = curves
    band(axis, steps, values, "relevant tokens", COLOURS[0])
    band(axis, steps, 1 - values, "others", COLOURS[1])
    if published_too:
        curve = published.FIGURE_4
        axis.plot(curve["steps"], curve["relevant"], "s:", color=PUBLISHED, markersize=3, label="published")
    # The diagonal of (I + delta E)^T (I + delta E), with unit columns in E, is 1 + delta^2 on average.
    mass = theory.attention_mass(trial.task.counts(), 1 + trial.model.delta**2)
    axis.axhline(mass, color=COLOURS[5], linestyle="--", linewidth=1, label="before training, closed form")
    axis.set(xlabel="steps", ylabel="share of the attention", ylim=(0, 1), title=f"M = {trial.task.patterns}")
    legend(axis)


def rank(trials: Sequence[Trial]) -> Result:
    """Singular values of the updates of W_Q, W_K and W_V by training."""
    good = [t for t in trials if not t.diverged]
    rows, verdicts, panels = [], [], list[Panel]()
    for name, label in MATRICES.items():
        values = np.array([t.curves[f"trained_singular_{name}"] for t in good])
        values = values / values[:, :1] if len(values) else values
        rows += [
            {"matrix": name, "number": i + 1, "over the largest": v.mean(), "std": v.std(ddof=len(v) > 1)}
            for i, v in enumerate(values.T)
        ]
        panels.append(partial(_draw_rank, values=values, title=f"update of {label}"))
        share = (values[:, :2] ** 2).sum(axis=1) / (values**2).sum(axis=1) if len(values) else np.array([])
        drop = mean(values[:, 2] / values[:, 1] if len(values) else [])
        two = mean(share)
        holds = ends(two)[0] >= MOST
        text = f"two hold {interval(*two)} of its square; the third over the second {interval(*drop)}"
        word = judge([holds, holds and ends(drop)[1] <= DROP], [ends(two)[1] < MOST])
        verdicts.append(verdict("rank", text, word, name=name))
    title = "Singular values of the updates, over the largest (bands: one standard deviation)"
    return Result(title, {"rank": rows}, panels, verdicts)


def _draw_rank(axis: Any, values: np.ndarray, title: str) -> None:
    if len(values):
        band(axis, np.arange(1, values.shape[1] + 1), values, "measured", COLOURS[0])
    axis.axvline(2.5, color=COLOURS[5], linestyle="--", linewidth=1, label="rank 2")
    axis.set(title=title, xlabel="number", ylim=(0, 1.05))
    legend(axis)


def neurons(trials: Sequence[Trial]) -> Result:
    """Test loss without the neurons with the shortest rows of W_O, or with the longest."""
    rows, verdicts, panels = [], [], list[Panel]()
    for M, group in group_by(trials, lambda t: t.task.patterns).items():
        good = [t for t in group if not t.diverged]
        losses = {
            kind: np.array([t.curves[f"trained_loss_without_{kind}"] for t in good]).reshape(-1, len(PRUNED))
            for kind in ("short", "long")
        }
        for kind, values in losses.items():
            rows += [
                {"M": M, "removed": f"{kind}est", "share": share, **columns(mean(column), "test loss"),
                 "trials": len(column)}
                for share, column in zip(PRUNED, values.T, strict=True)
            ]  # fmt: skip
        panels.append(partial(_draw_neurons, losses=losses, M=M))
        short, long = losses["short"], losses["long"]
        shares = int(np.searchsorted(PRUNED, 1 - 2 / M + 1e-9, side="right")) - 1
        change, rise = mean(short[:, shares] - short[:, 0]), mean(long[:, 5] - long[:, 0])
        low, high = ends(change)
        text = f"change of the test loss {interval(*change)}"
        word = judge([low >= -NONE and high <= NONE], [low > NONE])
        verdicts.append(verdict("short_rows", text, word, share=PRUNED[shares], M=M))
        low, high = ends(rise)
        steady = len(long) > 0 and bool((np.diff(long.mean(axis=0)) >= -1e-3).all())
        text = f"change of the test loss without half: {interval(*rise)}"
        word = judge([low > 0, low > 0 and steady], [high <= 0])
        verdicts.append(verdict("long_rows", text, word, M=M))
    title = "Test loss without some of the neurons (bands: one standard deviation)"
    return Result(title, {"neurons": rows}, panels, verdicts)


def _draw_neurons(axis: Any, losses: dict[str, np.ndarray], M: int) -> None:
    for (kind, values), colour in zip(losses.items(), COLOURS, strict=False):
        band(axis, np.array(PRUNED), values, f"the {kind}est rows", colour)
    axis.axvline(1 - 2 / M, color=COLOURS[5], linestyle="--", linewidth=1, label="1 - 2/M")
    axis.set(title=f"M = {M}", xlabel="share of the neurons removed", ylabel="test hinge loss", ylim=(0, None))
    legend(axis)
