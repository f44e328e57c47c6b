"""Figures 2, 4 and 7 of Li et al. (ICLR 2023): steps until the test loss is low, and where the attention goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.board.statistics import RESAMPLES, mean_interval
from sparsebench.measure import theory
from sparsebench.reproduce import published
from sparsebench.reproduce.result import COLOURS, PUBLISHED, Panel, Result, band, dashed
from sparsebench.reproduce.samples import tau
from sparsebench.reproduce.trials import Trial, compete, grouped
from sparsebench.reproduce.verdicts import Verdict, interval, judge

Shares = tuple[float, float, float]


def figure_2(trials: Sequence[Trial]) -> Result:
    """Steps until the test loss is below the threshold, against 1 / alpha_*, under each rule for alpha_#."""
    panels: list[Panel] = []
    rows, verdicts = [], []
    for printed, some in grouped(trials, lambda t: t.task.irrelevant is not None).items():
        name = "half of the tokens irrelevant" if printed else "a fixed alpha_#"
        groups = grouped(some, lambda t: t.task.realised())
        rows += [_steps_row(name, shares, ts) for shares, ts in groups.items()]
        reached = {shares: steps for shares, ts in groups.items() if (steps := _steps(ts)).size}
        panels.append(partial(_draw_steps, reached=reached, some=some, title=name))
        verdicts.append(_in_line(name, reached, len(groups)))
    return Result("Figure 2: steps needed against the share of relevant tokens", {"fig2": rows}, panels, verdicts)


def _steps(trials: Sequence[Trial]) -> np.ndarray:
    """Return the steps of the trials that got there."""
    found = (None if t.diverged else t.values["iterations"] for t in sorted(trials, key=lambda t: t.repetition))
    return np.array([steps for steps in found if steps is not None])


def _steps_row(name: str, shares: Shares, trials: Sequence[Trial]) -> dict[str, Any]:
    steps = _steps(trials)
    mean, low, high = mean_interval(list(steps)) if steps.size else (float("nan"), None, None)
    return {
        "setting": name, "alpha_*": shares[0], "alpha_#": shares[1], "trials": len(trials), "reached": len(steps),
        "steps": mean, "low": low, "high": high,
    }  # fmt: skip


def _in_line(name: str, reached: Mapping[Shares, np.ndarray], asked: int) -> Verdict:
    a, confusing = np.array([s[0] for s in reached]), np.array([s[1] for s in reached])
    means = np.array([steps.mean() for steps in reached.values()])
    rng = np.random.default_rng(0)
    resampled = np.array([rng.choice(steps, (RESAMPLES, len(steps))).mean(axis=1) for steps in reached.values()])
    fits = compete({"1/alpha_*": 1 / a, "1/gap": 1 / (a - confusing)}, means, resampled)
    rule = "reproduced: the line in 1/alpha_* rises with R2 >= 0.95; partly: it rises with a smaller R2; not: it falls"
    claim = f"steps are linear in 1/alpha_* ({name})"
    if not fits:
        few = f"{len(reached)} of {asked} alpha_* have trials whose test loss got below the threshold"
        return Verdict("2", claim, "linear", few, "", "undecided", rule)
    own = next(fit for fit in fits if fit.name == "1/alpha_*")
    best = f"; best: {fits[0].name}" if fits[0] is not own else ""
    return Verdict(
        "2", claim, "linear", f"R2 {own.r2:.3f}, {means.max():.0f} to {means.min():.0f} steps{best}",
        "; ".join(fit.text for fit in fits), judge([own.low > 0, own.r2 >= 0.95 and own.low > 0], [own.high < 0]), rule,
    )  # fmt: skip


def _draw_steps(axis: Any, reached: Mapping[Shares, np.ndarray], some: Sequence[Trial], title: str) -> None:
    a = np.array([shares[0] for shares in reached])
    means = np.array([steps.mean() for steps in reached.values()])
    spread = [steps.std(ddof=1) if len(steps) > 1 else 0.0 for steps in reached.values()]
    axis.errorbar(1 / a, means, yerr=spread, fmt="o", color=COLOURS[0], capsize=3, label="mean, one standard deviation")
    if len(a):
        first = some[0]
        shape = theory.steps_needed(a, first.task.recipe().lr, first.task.patterns, first.model.sigma, tau(first))
        known = np.isfinite(shape)
        if known.any():
            dashed(axis, 1 / a, shape * (means[known] / shape[known]).mean(), "Theorem 1, scaled")
    axis.set(title=title, xlabel="$1/\\alpha_*$", ylabel="steps until test loss < 0.001")
    axis.legend(frameon=False)


def figure_4(trials: Sequence[Trial]) -> Result:
    """Attention on relevant tokens while training, beside the published curve."""
    curves = _curves(trials)
    panels: list[Panel] = [partial(_draw_attention, curves=curves, some=trials[0], published_too=True)]
    verdicts = _rises("4", curves, "")
    return Result("Figure 4: attention on relevant tokens", {"fig4": _curve_rows(curves)}, panels, verdicts)


def figure_7(trials: Sequence[Trial]) -> Result:
    """Figure 4 with more patterns."""
    panels: list[Panel] = []
    rows, verdicts = [], []
    for M, some in grouped(trials, lambda t: t.task.patterns).items():
        curves = _curves(some)
        panels.append(partial(_draw_attention, curves=curves, some=some[0], published_too=False))
        rows += _curve_rows(curves, M=M)
        verdicts += _rises("7", curves, f" (M={M})")
    return Result("Figure 7: attention on relevant tokens, with M patterns", {"fig7": rows}, panels, verdicts)


def _curves(trials: Sequence[Trial]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (P,) up to 100, or as long as a trial trained, and attention (repetitions, P).

    Once all training losses are zero nothing moves, and the last value holds.
    """
    good = [t for t in trials if not t.diverged]
    every = trials[0].task.watch
    last = max(100, *(int(t.curves["watched_steps"][-1]) for t in good)) if good else 100
    at = np.arange(0, last + 1, every)
    held = [np.interp(at, t.curves["watched_steps"], t.curves["watched_attention"]) for t in good]
    return at, np.array(held).reshape(len(good), len(at))


def _curve_rows(curves: tuple[np.ndarray, np.ndarray], **labels: Any) -> list[dict[str, Any]]:
    at, values = curves
    rows = []
    for step, column in zip(at, values.T, strict=True):
        mean, low, high = mean_interval(list(column))
        rows.append(labels | {"step": int(step), "attention on relevant": mean, "low": low, "high": high})
    return rows


def _rises(figure: str, curves: tuple[np.ndarray, np.ndarray], name: str) -> list[Verdict]:
    _, values = curves
    mean = values.mean(axis=0)
    start, end = mean_interval(list(values[:, 0])), mean_interval(list(values[:, -1]))
    rises = end[0] > start[0]
    parts, says = [rises, bool((np.diff(mean) >= -1e-3).all())], "the same shape; no values known"
    rule = "reproduced: the mean rises and never falls; partly: it ends higher than it began; not: it does not"
    if figure == "4":
        parts += [0.54 <= start[0] <= 0.58, end[0] >= 0.8]
        says = "0.540 to 0.907"
        rule = "reproduced: it begins at 0.54 to 0.58, never falls and ends at 0.80 or more; partly: some of these"
    shown = f"{interval(*start)} to {interval(*end)}"
    claim = f"attention concentrates on relevant tokens{name}"
    to_1 = "reproduced: it ends at 0.95 or more; partly: at the published 0.90 or more"
    near = [end[0] >= 0.9, end[0] >= 0.95]
    return [
        Verdict(figure, claim, says, shown, "", judge(parts, [not rises]), rule),
        Verdict(figure, f"it tends to 1{name}", "0.907 after 100 steps", interval(*end), "", judge(near, [True]), to_1),
    ]


def _draw_attention(axis: Any, curves: tuple[np.ndarray, np.ndarray], some: Trial, published_too: bool) -> None:
    at, values = curves
    band(axis, at, values, "relevant tokens", COLOURS[0])
    band(axis, at, 1 - values, "others", COLOURS[1])
    if published_too:
        shown = published.FIGURE_4
        axis.plot(shown["steps"], shown["relevant"], "s:", color=PUBLISHED, markersize=3, label="published")
    # The diagonal of (I + delta E)^T (I + delta E), with unit columns in E, is 1 + delta^2 on average.
    mass = theory.attention_mass(some.task.counts(), 1 + some.model.delta**2)
    axis.axhline(mass, color="#6b7280", linestyle="--", linewidth=1, label="before training, closed form")
    axis.set(xlabel="steps", ylabel="share of the attention", ylim=(0, 1), title=f"M = {some.task.patterns}")
    axis.legend(frameon=False)
