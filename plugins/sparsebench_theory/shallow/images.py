"""Figure 6 of Li et al. (ICLR 2023): a deep ViT on pictures with backgrounds, by share of relevant tokens alpha_*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import floor
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Paper, Result, Trial, Verdict, Word, interval, judge
from sparsebench.plan.jobs import Job
from sparsebench.stats.intervals import Interval
from sparsebench_theory.panels import PUBLISHED, legend, points, verdicts_of
from sparsebench_theory.shallow import published
from sparsebench_theory.shallow.samples import draw_successes, trend
from sparsebench_theory.trials import (
    ENOUGH,
    Grid,
    columns,
    compete,
    differences,
    ends,
    group_by,
    mean,
    resamples_of,
    slopes,
    values_of,
)

GAIN = 0.10
"""The required gain in accuracy by full removal; the paper has 0.122 and 0.147."""
CLOSED = 0.05
"""The largest spurious gap that counts as closed."""

verdict = verdicts_of(__package__, CLOSED=CLOSED, ENOUGH=ENOUGH, GAIN=GAIN)
MEASURED = ("accuracy", "spurious_gap", "worst_group_accuracy", "average_train", "a_tsi_dense", "a_tsi", "m_tsi_dense",
            "m_tsi")  # fmt: skip
"""Metrics in the table of Figure 6c; token spuriosity without a strategy on the trained network, and as tested."""
FIGURE_6C_PANELS = {
    "accuracy": "accuracy, test groups of equal size",
    "spurious_gap": "spurious gap",
    "worst_group_accuracy": "worst-group accuracy",
}
RATE = 25e9
"""MACs per second of one core in training."""

ByAlpha = Mapping[float, Sequence[Trial]]


def seconds(job: Job) -> float:
    """Return the expected seconds of a cell on one core: forward and backward passes over the kept tokens."""
    task: dict[str, Any] = job.cell.task.params
    model: dict[str, Any] = job.cell.model.params
    dim, depth = model.get("dim", 192), model.get("depth", 12)
    tokens = 1 + (task["canvas"] / task["patch"]) ** 2 * (job.cell.budget.keep_rate or 1)
    macs = depth * (12 * tokens * dim**2 + 2 * tokens**2 * dim)
    return float((3 * task["epochs"] * job.cell.n_train + 2 * task["test"] + 1000) * macs / RATE + 0.5)


def alpha(trial: Trial) -> float:
    """Return alpha_*, the patches of the foreground over the kept patches, which is the same for all images."""
    task = trial.task
    kept = floor((1 - trial.removed) * (task.canvas / task.patch) ** 2 + 1e-6)
    return round((task.foreground / task.patch) ** 2 / kept, 4)


def _levels(trials: Sequence[Trial]) -> dict[float, list[Trial]]:
    """Return the trials of dense and of the oracle, which keeps the whole foreground, by alpha_*."""
    return group_by([t for t in trials if t.strategy in ("dense", "oracle")], alpha)


def _at_random(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that remove as many tokens as full removal, at random."""
    return [t for t in trials if t.strategy == "random"]


def _subtitle(trials: Sequence[Trial]) -> str:
    """Return the part of a title about data and training."""
    task = trials[0].task
    repetitions = len({t.repetition for t in trials})
    return f"{task.images}, {task.epochs} epochs, {repetitions} seeds"


def figure_6a(trials: Sequence[Trial]) -> Result:
    """Test accuracy against N and alpha_*."""
    by_alpha = {f"alpha_* {a:.2f}": group_by(group, lambda t: t.n) for a, group in _levels(trials).items()}
    by_n = {n: _levels(group) for n, group in group_by(trials, lambda t: t.n).items()}
    groups_by_name = dict(by_alpha)
    control = group_by(_at_random(trials), lambda t: t.n)
    if control:
        groups_by_name["as many at random"] = control

    rows = []
    for name, groups in groups_by_name.items():
        for n, group in groups.items():
            rows.append({"tokens": name, "N": n, "trials": len(group), **_columns(group, "accuracy")})
    over_n = {name: _means(groups, "accuracy") for name, groups in groups_by_name.items()}
    over_alpha = {f"N = {n:g}": _means(groups, "accuracy") for n, groups in by_n.items()}
    panels: list[Panel] = [
        partial(_curves, curves=over_n, x="training samples N", title="accuracy against N", log=True),
        partial(_curves, curves=over_alpha, x="alpha_*", title="accuracy against alpha_*"),
    ]
    more = {name: _last_minus_first(groups) for name, groups in by_alpha.items()}
    less = {f"N {n:g}": _last_minus_first(groups) for n, groups in by_n.items()}
    verdicts = [
        _each("6a", "accuracy rises with N at every alpha_*", "rises", more, "the largest N minus the smallest"),
        _each("6a", "accuracy rises with alpha_* at every N", "rises", less, "the largest alpha_* minus the smallest"),
    ]
    title = f"Figure 6a: accuracy by samples and share of relevant tokens ({_subtitle(trials)}; 95 % intervals)"
    return Result(title, {"fig6a": rows}, panels, verdicts)


def _last_minus_first(groups: Mapping[float, Sequence[Trial]]) -> list[float]:
    """Return the paired differences of accuracy between the trials with the largest key and with the smallest."""
    return differences(groups[max(groups)], groups[min(groups)], "accuracy")


def _each(figure: str, claim: str, says: str, changes: Mapping[str, list[float]], difference: str) -> Verdict:
    """Judge the claim that a paired change is positive in each setting."""
    means = {name: mean(values) for name, values in changes.items()}
    text = "; ".join(f"{name}: {interval(*value)}" for name, value in means.items())
    rises = [(low or 0) > 0 for _, low, _ in means.values()]
    falls = [high is not None and high <= 0 for _, _, high in means.values()]
    return verdict("each", text, judge(rises, falls), figure=figure, claim=claim, published=says, what=difference)


def _columns(trials: Sequence[Trial], metric: str) -> dict[str, float | None]:
    return columns(mean(values_of(trials, metric)), metric, f"{metric}_low", f"{metric}_high")


def _means(groups: Mapping[float, Sequence[Trial]], metric: str) -> dict[float, Interval]:
    return {x: mean(values_of(group, metric)) for x, group in groups.items()}


def _curves(
    axis: Any, curves: Mapping[str, Mapping[float, Interval]], x: str, title: str, log: bool = False,
    top: float | None = None, published_curves: Mapping[str, Mapping[float, float]] | None = None,
) -> None:  # fmt: skip
    """Draw means with their intervals over x, and published values."""
    for (name, values), colour in zip(curves.items(), COLOURS, strict=False):
        places = np.array(list(values), dtype=float)
        axis.plot(places, [value for value, _, _ in values.values()], color=colour, linewidth=1)
        points(axis, places, list(values.values()), name, colour)
    for (name, curve), style in zip((published_curves or {}).items(), ("--", ":"), strict=False):
        axis.plot(list(curve), list(curve.values()), style, color=PUBLISHED, linewidth=1, label=name)
    if log:
        axis.set_xscale("log")
        ticks = sorted({place for values in curves.values() for place in values})
        axis.set_xticks(ticks, [f"{place:g}" for place in ticks])
        axis.minorticks_off()
    axis.set(title=title, xlabel=x.replace("alpha_*", "$\\alpha_*$"), ylim=(0, top))
    legend(axis)


def figure_6b(trials: Sequence[Trial]) -> Result:
    """Samples needed for a test accuracy, against alpha_*^-2."""
    grids = {a: Grid.of(group) for a, group in _levels(trials).items()}
    a, n50 = np.array(list(grids)), [grid.n50 for grid in grids.values()]
    level = trials[0].task.success_accuracy
    success = [{"alpha_*": share, **row} for share, grid in grids.items() for row in grid.success_rows()]
    needed = [{"alpha_*": share, **grid.row} for share, grid in grids.items()]
    panels: list[Panel] = [
        partial(draw_successes, title=f"share of trials with accuracy >= {level:g}", grids=grids, power=2),
        partial(_draw_needed, x=a**-2, n50=n50),
    ]
    title = f"Figure 6b: samples needed for an accuracy of {level:g} ({_subtitle(trials)})"
    return Result(title, {"fig6b": success, "fig6b-n50": needed}, panels, _complexity(grids, a, n50, level))


def _draw_needed(axis: Any, x: np.ndarray, n50: list[Interval]) -> None:
    points(axis, x, n50, "N50, 95 % interval", COLOURS[0])
    axis.set(title="samples needed", xlabel="$\\alpha_*^{-2}$", ylabel="N50", ylim=(0, None))
    legend(axis)


def _complexity(grids: Mapping[float, Grid], a: np.ndarray, n50: list[Interval], level: float) -> list[Verdict]:
    """Return the verdicts on whether N50 falls as alpha_* rises, and whether it is linear in alpha_*^-2."""
    values = np.array([value for value, _, _ in n50])
    fits = compete({"alpha_*^-2": a**-2}, values, *resamples_of(grids.values()))
    text = "; ".join(f"alpha_* {share:.2f}: {interval(*value)}" for share, value in zip(grids, n50, strict=True))
    by_inverse = {float(share**-2): grids[share] for share in sorted(grids, reverse=True)}
    claim = f"fewer samples are needed as alpha_* rises (accuracy {level:g}; the paper's level is 0.775)"
    word: Word = "undecided"
    if fits and fits[0].points >= ENOUGH:
        flat = fits[0].flat and all(grid.within(*grid.ends) for grid in grids.values())
        word = judge([fits[0].rises, fits[0].rises and fits[0].r2 >= 0.95], [flat])
    return [
        trend("6b", by_inverse, claim, "N_min falls with alpha_*"),
        verdict("n_is_linear", f"N50 at {text}", word, fits[0].text if fits else ""),
    ]  # fmt: skip


def _quality(trial: Trial) -> tuple[int, int]:
    """Return the sort key of initial models: none, other classes of the set, another set; then the number of images."""
    task = trial.task
    kind = 0 if task.pretrain_epochs == 0 else 1 if task.pretrain_images in ("", task.images) else 2
    return kind, task.pretrain_samples


def first_model(trial: Trial) -> str:
    """Return a description of the data of a trial's initial model."""
    kind, samples = _quality(trial)
    if kind == 0:
        return "not pre-trained"
    source = "the other classes" if kind == 1 else trial.task.pretrain_images.partition("-")[0].upper()
    return f"{samples:,} images of {source}"


def figure_6c(trials: Sequence[Trial]) -> Result:
    """Accuracy and gap with spurious backgrounds in training, against alpha_*, by initial model."""
    by_start = {first_model(group[0]): group for group in group_by(trials, _quality).values()}
    starts: dict[str, ByAlpha] = {start: _levels(group) for start, group in by_start.items()}
    controls = {start: _at_random(group) for start, group in by_start.items()}
    rows = [_row(start, a, group) for start, by_alpha in starts.items() for a, group in by_alpha.items()]
    rows += [_row(start, None, group) for start, group in controls.items() if group]
    panels: list[Panel] = [
        partial(_draw_metric, starts=starts, metric=metric, title=title) for metric, title in FIGURE_6C_PANELS.items()
    ]
    verdicts = []
    for start, by_alpha in starts.items():
        verdicts += _claims(start, by_alpha)
    verdicts += _against_random(starts, controls) + _better_start(list(starts.values()))
    title = f"Figure 6c: a background that goes with the label ({_subtitle(trials)}; 95 % intervals)"
    return Result(title, {"fig6c": rows}, panels, verdicts)


def _draw_metric(axis: Any, starts: Mapping[str, ByAlpha], metric: str, title: str) -> None:
    """Draw a metric over alpha_* for each initial model, with the published accuracies."""
    published_curves = {}
    if metric == "accuracy":
        for name, accuracies in published.FIGURE_6C["accuracy"].items():
            published_curves[f"published, {name}"] = dict(zip(published.FIGURE_6C["alpha_*"], accuracies, strict=True))
    curves = {start: _means(by_alpha, metric) for start, by_alpha in starts.items()}
    _curves(axis, curves, "alpha_*", title, top=1, published_curves=published_curves)


def _against_random(starts: Mapping[str, ByAlpha], controls: Mapping[str, Sequence[Trial]]) -> list[Verdict]:
    """Return the verdict on full removal against as many random tokens, if there are such trials."""
    changes = {}
    for start, control in controls.items():
        if control:
            oracle = starts[start][max(starts[start])]
            changes[start] = differences(oracle, control, "accuracy")
    if not changes:
        return []
    claim = "it is the background that must go: removing as many tokens at random does less"
    return [_each("6c", claim, "not in the paper", changes, "oracle minus random, as many tokens")]


def _better_start(by_start: Sequence[ByAlpha]) -> list[Verdict]:
    """Return the verdict on the best initial model against the weakest, if there are several, in ascending order."""
    if len(by_start) < 2:
        return []
    weak, strong = by_start[0], by_start[-1]
    better = {f"alpha_* {a:.2f}": differences(strong[a], weak[a], "accuracy") for a in weak if a in strong}
    claim = "the better initial model is more accurate at every alpha_*"
    return [_each("6c", claim, ".874 to .996 against .838 to .985", better, "better minus weaker")]


def _row(start: str, a: float | None, group: Sequence[Trial]) -> dict[str, Any]:
    """Return a row of the table: all metrics of an initial model at one alpha_*, and the published accuracies.

    alpha_* is None for random removal.
    """
    row: dict[str, Any] = {"initial model": start, "alpha_*": "as many at random" if a is None else a}
    row["trials"] = len(group)
    for metric in MEASURED:
        row |= _columns([t for t in group if metric in t.values], metric)
    near = int(np.abs(published.FIGURE_6C["alpha_*"] - (a or 0)).argmin())
    here = a is not None and abs(published.FIGURE_6C["alpha_*"][near] - a) < 0.02
    for name, values in published.FIGURE_6C["accuracy"].items():
        row[f"published, {name}"] = float(values[near]) if here else None
    return row


def _claims(start: str, by_alpha: ByAlpha) -> list[Verdict]:
    """Return the verdicts for one initial model."""
    return [
        _background(start, by_alpha),
        _rises(start, by_alpha),
        _partial(start, by_alpha),
        _gap_closed(start, by_alpha),
    ]


def _background(start: str, by_alpha: ByAlpha) -> Verdict:
    """Judge whether accuracy rises by GAIN if the whole background is removed."""
    least, most = by_alpha[min(by_alpha)], by_alpha[max(by_alpha)]
    gain = mean(differences(most, least, "accuracy"))
    low, high = ends(gain)
    before, after = mean(values_of(least, "accuracy")), mean(values_of(most, "accuracy"))
    measured = f"{interval(*before)} to {interval(*after)}; change {interval(*gain)}"
    known = "; ".join(
        f"{name}: {values[0]:.3f} to {values[-1]:.3f}" for name, values in published.FIGURE_6C["accuracy"].items()
    )
    word = judge([low > 0, low > 0 and gain[0] >= GAIN], [high <= 0])
    return verdict("background", measured, word, start=start, known=known)


def _gap_closed(start: str, by_alpha: ByAlpha) -> Verdict:
    """Judge whether the gap is there with the whole background, and closes without it."""
    before = mean(values_of(by_alpha[min(by_alpha)], "spurious_gap"))
    after = mean(values_of(by_alpha[max(by_alpha)], "spurious_gap"))
    low, high = ends(after)
    was_open = ends(before)[0] > CLOSED
    word = judge([was_open and after[0] <= CLOSED, was_open and high <= CLOSED], [low > CLOSED])
    return verdict("gap_closed", f"gap {interval(*after)}, with all of it {interval(*before)}", word, start=start)


def _rises(start: str, by_alpha: ByAlpha) -> Verdict:
    """Judge whether accuracy rises with alpha_*, by the slopes of the repetitions, and between adjacent alpha_*."""
    levels = sorted(by_alpha)
    by_level = [{t.repetition: t.values["accuracy"] for t in by_alpha[a] if not t.diverged} for a in levels]
    shared = sorted(set.intersection(*map(set, by_level)))
    y = np.array([[level[r] for r in shared] for level in by_level], dtype=float)
    slope = mean(slopes(np.array(levels), y)) if shared else mean([])
    steps = {f"{b:.2f} - {a:.2f}": mean(differences(by_alpha[b], by_alpha[a], "accuracy")) for a, b in pairwise(levels)}
    low, high = ends(slope)
    text = "; ".join(f"{step}: {interval(*change)}" for step, change in steps.items())
    word = judge([low > 0, low > 0 and all(change[0] > 0 for change in steps.values())], [high <= 0])
    return verdict("rises_with_alpha", f"slope {interval(*slope)}; {text}", word, start=start)


def _partial(start: str, by_alpha: ByAlpha) -> Verdict:
    """Judge whether the gap shrinks if only part of the background is removed."""
    first, *partly, last = sorted(by_alpha)
    full = mean(differences(by_alpha[first], by_alpha[last], "spurious_gap"))
    cuts = {a: mean(differences(by_alpha[first], by_alpha[a], "spurious_gap")) for a in partly}
    share = {a: (a - first) / (last - first) * full[0] for a in partly}  # if it were linear in alpha_*
    text = "; ".join(f"{a:.2f}: {interval(*cut)}" for a, cut in cuts.items())
    less = [ends(full)[0] > 0 and ends(cut)[1] < share[a] / 2 for a, cut in cuts.items()]
    word = judge([ends(cut)[0] > 0 for cut in cuts.values()], less)
    return verdict("gap_shrinks", f"gap reduction at {text}; at 1: {interval(*full)}", word, start=start)


PAPER = Paper(
    "images",
    "the image experiments of the shallow-ViT paper (Li et al., ICLR 2023, Figure 6)",
    {"quick": "images-quick", "small": "images-small", "full": "images"},
    {"6a": figure_6a, "6b": figure_6b, "6c": figure_6c},
    seconds,
)
