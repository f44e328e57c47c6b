"""The dynamics of training: Figures 2, 4 and 7 of Li et al. (ICLR 2023), and checks of weights (arXiv 2406.17167).

The quantities are the steps until the test loss is low, the attention on relevant tokens, the ranks of the updates, and
the losses without some neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Result, Trial, Verdict, Word, interval, judge
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
        for shares, ts in groups.items():
            rows.append(
                {
                    "setting": name,
                    "alpha_*": shares[0],
                    "alpha_#": shares[1],
                    "trials": len(ts),
                    "reached": len(steps[shares]),
                    **columns(mean(steps[shares]), "steps"),
                }
            )
        panels.append(partial(_draw_steps, steps=steps, trial=group[0], title=name))
        verdicts.append(_in_line(name, steps, len(group)))
    return Result("Figure 2: steps needed against the share of relevant tokens", {"fig2": rows}, panels, verdicts)


def _in_line(name: str, steps: Mapping[Shares, np.ndarray], trials: int) -> Verdict:
    """Return the verdict on the steps of the trials that reached the threshold, by alpha_*."""
    a = np.array([shares[0] for shares in steps])
    confusing = np.array([shares[1] for shares in steps])
    numbers = [len(values) for values in steps.values()]
    means = np.array([mean(values)[0] for values in steps.values()])
    resamples = np.array([bootstrap_means(values, stream) for stream, values in enumerate(steps.values())])
    fits = compete({"1/alpha_*": 1 / a, "1/gap": 1 / (a - confusing)}, means, resamples, numbers)
    reached = sum(numbers)
    reached_text = (
        f"{reached} of {trials} trials got below the threshold, at {np.isfinite(means).sum()} of {len(a)} alpha_*"
    )
    if not fits:
        return verdict("steps", reached_text, "undecided", name=name)

    inverse = next(fit for fit in fits if fit.name == "1/alpha_*")
    word: Word = "undecided"
    if inverse.points >= ENOUGH:
        against = inverse.flat and reached == trials
        word = judge([inverse.rises, inverse.rises and inverse.r2 >= 0.95], [against])
    measured = (
        f"R2 {inverse.r2:.3f}, {np.nanmax(means):.0f} to {np.nanmin(means):.0f} steps; best: {fits[0].name}; "
        f"{reached_text}"
    )
    return verdict("steps", measured, word, "; ".join(fit.text for fit in fits), name=name)


def _draw_steps(axis: Any, steps: Mapping[Shares, np.ndarray], trial: Trial, title: str) -> None:
    reached = {shares[0]: values for shares, values in steps.items() if len(values)}
    if reached:
        a = np.array(list(reached))
        means = np.array([values.mean() for values in reached.values()])
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
    """Return the verdicts on whether the attention on relevant tokens rises, and whether it tends to 1."""
    _, values = curves
    start, end = mean(values[:, 0]), mean(values[:, -1])
    change = mean(values[:, -1] - values[:, 0])
    rises = (change[1] or 0) > 0
    stays = change[2] is not None and change[2] < LITTLE
    steady = len(values) > 0 and bool((np.diff(values.mean(axis=0)) >= -1e-3).all())
    low = end[1] or 0.0
    high = 1.0 if end[2] is None else end[2]

    if figure == "4":
        as_published = [0.54 <= start[0] <= 0.58, end[0] >= 0.8]
        also, rise, limit = (
            ", begins at 0.54 to 0.58 and ends at 0.80 or more",
            "0.540 to 0.907",
            "0.907 after 100 steps",
        )
    else:
        as_published = []
        also, rise, limit = "", UNKNOWN, UNKNOWN
    concentrates = judge([rises, *(rises and part for part in (steady, *as_published))], [stays])
    tends_to_1 = judge([low >= 0.9, low >= 0.95], [high < 0.9])
    measured = "no trial trained"
    if len(values):
        measured = f"{interval(*start)} to {interval(*end)}; change {interval(*change)}"
    about = {"figure": figure, "name": name}
    return [
        verdict("concentrates", measured, concentrates, published=rise, also=also, **about),
        verdict("tends_to_1", interval(*end), tends_to_1, published=limit, **about),
    ]


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
    panels: list[Panel] = []
    rows, verdicts = [], []
    for name, label in MATRICES.items():
        values = np.array([t.curves[f"trained_singular_{name}"] for t in good])
        if len(values):
            values = values / values[:, :1]
        for number, column in enumerate(values.T, 1):
            spread = column.std(ddof=1 if len(column) > 1 else 0)
            rows.append({"matrix": name, "number": number, "over the largest": column.mean(), "std": spread})
        panels.append(partial(_draw_rank, values=values, title=f"update of {label}"))
        verdicts.append(_is_rank_2(name, values))
    title = "Singular values of the updates, over the largest (bands: one standard deviation)"
    return Result(title, {"rank": rows}, panels, verdicts)


def _is_rank_2(name: str, values: np.ndarray) -> Verdict:
    """Return the verdict on an update with the singular values (trials, numbers), over the largest."""
    share, drop = mean([]), mean([])
    if len(values):
        share = mean((values[:, :2] ** 2).sum(axis=1) / (values**2).sum(axis=1))
        drop = mean(values[:, 2] / values[:, 1])
    two_hold = ends(share)[0] >= MOST
    measured = f"two hold {interval(*share)} of its square; the third over the second {interval(*drop)}"
    word = judge([two_hold, two_hold and ends(drop)[1] <= DROP], [ends(share)[1] < MOST])
    return verdict("rank", measured, word, name=name)


def _draw_rank(axis: Any, values: np.ndarray, title: str) -> None:
    if len(values):
        band(axis, np.arange(1, values.shape[1] + 1), values, "measured", COLOURS[0])
    axis.axvline(2.5, color=COLOURS[5], linestyle="--", linewidth=1, label="rank 2")
    axis.set(title=title, xlabel="number", ylim=(0, 1.05))
    legend(axis)


def neurons(trials: Sequence[Trial]) -> Result:
    """Test loss without the neurons with the shortest rows of W_O, or with the longest."""
    panels: list[Panel] = []
    rows, verdicts = [], []
    for M, group in group_by(trials, lambda t: t.task.patterns).items():
        losses = {kind: _losses_without(group, kind) for kind in ("short", "long")}
        for kind, values in losses.items():
            for share, column in zip(PRUNED, values.T, strict=True):
                row = {"M": M, "removed": f"{kind}est", "share": share, **columns(mean(column), "test loss")}
                rows.append(row | {"trials": len(column)})
        panels.append(partial(_draw_neurons, losses=losses, M=M))
        verdicts += [_without_short_rows(losses["short"], M), _without_long_rows(losses["long"], M)]
    title = "Test loss without some of the neurons (bands: one standard deviation)"
    return Result(title, {"neurons": rows}, panels, verdicts)


def _losses_without(trials: Sequence[Trial], kind: str) -> np.ndarray:
    """Return the test losses (trials, shares) without the shares PRUNED of the neurons with short or long rows."""
    losses = [t.curves[f"trained_loss_without_{kind}"] for t in trials if not t.diverged]
    return np.array(losses).reshape(-1, len(PRUNED))


def _without_short_rows(losses: np.ndarray, M: int) -> Verdict:
    """Return the verdict on whether the share 1 - 2 / M of the neurons can go; the next smaller one is measured."""
    measured_share = int(np.searchsorted(PRUNED, 1 - 2 / M + 1e-9, side="right")) - 1
    change = mean(losses[:, measured_share] - losses[:, 0])
    low, high = ends(change)
    word = judge([low >= -NONE and high <= NONE], [low > NONE])
    return verdict(
        "short_rows", f"change of the test loss {interval(*change)}", word, share=PRUNED[measured_share], M=M
    )


def _without_long_rows(losses: np.ndarray, M: int) -> Verdict:
    """Return the verdict on whether the loss rises without the half of the neurons that have the longest rows."""
    half = PRUNED.index(0.5)
    rise = mean(losses[:, half] - losses[:, 0])
    low, high = ends(rise)
    steady = len(losses) > 0 and bool((np.diff(losses.mean(axis=0)) >= -1e-3).all())
    word = judge([low > 0, low > 0 and steady], [high <= 0])
    return verdict("long_rows", f"change of the test loss without half: {interval(*rise)}", word, M=M)


def _draw_neurons(axis: Any, losses: dict[str, np.ndarray], M: int) -> None:
    for (kind, values), colour in zip(losses.items(), COLOURS, strict=False):
        band(axis, np.array(PRUNED), values, f"the {kind}est rows", colour)
    axis.axvline(1 - 2 / M, color=COLOURS[5], linestyle="--", linewidth=1, label="1 - 2/M")
    axis.set(title=f"M = {M}", xlabel="share of the neurons removed", ylabel="test hinge loss", ylim=(0, None))
    legend(axis)
