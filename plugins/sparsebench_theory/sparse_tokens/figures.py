"""Barnfield, Cui and Lu, High-dimensional analysis of single-layer attention [..], ICLR 2026 (arXiv 2509.25153).

The figures test the paper's orders of growth, not its exact test error. The closed form is this project's own: the
mean of L tokens is N(theta R / L xi, I / L) or N(0, I / L). For classes of equal size no linear classifier of it has a
smaller error than Phi(-theta R / (2 sqrt(L))).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from sparsebench.paper import COLOURS, Panel, Paper, Result, Trial, Verdict, interval, judge
from sparsebench.plan.jobs import Job
from sparsebench.stats.intervals import Interval, bootstrap_means
from sparsebench_theory.panels import draw_categories, draw_dashed, legend, points, verdicts_of
from sparsebench_theory.sparse_tokens.task import SparseTokens
from sparsebench_theory.trials import (
    ENOUGH,
    Fit,
    columns,
    compete,
    crossing,
    differences,
    ends,
    errors_of,
    group_by,
    mean,
    values_of,
)

KINDS = {"trained": "attention", "frozen": "mean token"}
"""Names of the classifiers with trained and with frozen query."""
CLOSE = 0.2
"""Tolerance of a strength or its exponent, relative to the value it is compared with."""
ALIGNED = 0.9
"""Directions count as aligned from this cosine on."""
SAME = 0.03
"""Differences of test errors up to this count as none."""
STRENGTHS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16)
"""Tick labels of the axis of strengths."""
RATE = 1e9
"""Numbers of tokens per second that one core reads and differentiates."""

verdict = verdicts_of(__package__, ALIGNED=ALIGNED, CLOSE=CLOSE, ENOUGH=ENOUGH, SAME=SAME)


ByTokens = Mapping[int, Sequence[float]]


def seconds(job: Job) -> float:
    """Return the expected seconds of a trial on one core: drawing data, testing, and all steps."""
    task = SparseTokens(**job.cell.task.params)
    sample = task.tokens * task.d
    return sample * (4 * task.steps * job.cell.n_train / RATE + (task.test + job.cell.n_train) * 2e-8) + 0.05


def least_error(theta: float, relevant: int, tokens: int) -> float:
    """Return Phi(-theta R / (2 sqrt(L))), the smallest error of a linear classifier of the mean token."""
    return float(ndtr(-theta * relevant / (2 * math.sqrt(tokens))))


def strength(trials: Sequence[Trial]) -> Result:
    """The strength at which the test error falls to the task's level, by number of tokens."""
    task = trials[0].task
    needed = {kind: _strengths([t for t in trials if t.model.attention == kind]) for kind in KINDS}
    rows = []
    for kind, by_tokens in needed.items():
        for L, values in by_tokens.items():
            closed = _closed_form(task, L) if kind == "frozen" else float("nan")
            theta = columns(_mean_inside(values), "theta")
            rows.append({"classifier": KINDS[kind], "L": L, "trials": len(values), **theta, "closed form": closed})
    growth = {kind: _growth(by_tokens) for kind, by_tokens in needed.items()}
    verdicts = [*_verdicts(growth, needed), _as_closed_form(needed["frozen"], task)]
    title = f"Strength needed for a test error of {task.error:.0%}"
    return Result(title, {"strength": rows}, [partial(_draw_needed, needed=needed, task=task)], verdicts)


def _strengths(trials: Sequence[Trial]) -> dict[int, list[float]]:
    """Return the needed strength of each repetition by number of tokens; NaN if it is outside the tested strengths."""
    needed: dict[int, list[float]] = {}
    for (L, _), group in group_by(trials, lambda t: (t.task.tokens, t.repetition)).items():
        thetas, errors = [], []
        for t in sorted(group, key=lambda t: t.task.theta):
            thetas.append(t.task.theta)
            errors.append((errors_of([t]) or [math.nan])[0])
        place = crossing(np.array(thetas), np.array(errors), group[0].task.error)
        inside = thetas[0] < place < np.inf
        needed.setdefault(L, []).append(place if inside else float("nan"))
    return needed


def _mean_inside(values: Sequence[float]) -> Interval:
    """Return the mean strength if each repetition has one, otherwise NaN, since only lucky ones would count."""
    return mean(values) if np.isfinite(values).all() else mean([])


def _closed_form(task: SparseTokens, tokens: int) -> float:
    """Return the strength at which `least_error` is the task's level."""
    return float(-2 * ndtri(task.error) * math.sqrt(tokens) / task.relevant)


def _growth(needed: ByTokens) -> list[Fit]:
    """Return the fits of the strength by log L and by sqrt(L); none if there are fewer than ENOUGH L."""
    L = np.array(list(needed), dtype=float)
    means = np.array([_mean_inside(values)[0] for values in needed.values()])
    if np.isfinite(means).sum() < ENOUGH:
        return []
    resamples = np.array([bootstrap_means(np.array(values), stream) for stream, values in enumerate(needed.values())])
    return compete({"log L": np.log(L), "sqrt(L)": np.sqrt(L)}, means, resamples, [*map(len, needed.values())])


def _verdicts(growth: Mapping[str, Sequence[Fit]], needed: Mapping[str, ByTokens]) -> list[Verdict]:
    """Return the verdicts on the growth of the strengths that attention and the mean token need."""
    words = {key: judge([], []) for key in ("slower", "as_log", "as_root")}
    if fits := {fit.name: fit for fit in growth["trained"]}:
        root, log = fits["sqrt(L)"], fits["log L"]
        words["slower"] = judge([root.exponent < 1, root.high < 1], [root.low > 1])
        words["as_log"] = judge([log.rises, log.rises and log.r2 >= max(0.95, root.r2)], [log.flat])
    if fits := {fit.name: fit for fit in growth["frozen"]}:
        root = fits["sqrt(L)"]
        inside = abs(root.exponent - 1) <= CLOSE
        outside = root.low > 1 + CLOSE or root.high < 1 - CLOSE
        words["as_root"] = judge([inside, root.low >= 1 - CLOSE and root.high <= 1 + CLOSE], [outside])
    verdicts = []
    for key, kind in (("slower", "trained"), ("as_log", "trained"), ("as_root", "frozen")):
        text = "; ".join(f"L {L}: {interval(*_mean_inside(values))}" for L, values in needed[kind].items())
        verdicts.append(verdict(key, f"theta {text}", words[key], "; ".join(fit.text for fit in growth[kind])))
    return verdicts


def _as_closed_form(needed: ByTokens, task: SparseTokens) -> Verdict:
    """Return the verdict on whether the strength that the mean token needs agrees with the closed form."""
    inside = {L: np.array(values) for L, values in needed.items() if np.isfinite(values).all()}
    ratios = {L: mean(values / _closed_form(task, L)) for L, values in inside.items()}
    around = [ends(ratio) for ratio in ratios.values()]
    near = [low >= 1 - CLOSE and high <= 1 + CLOSE for low, high in around]
    text = "over the closed form: " + "; ".join(f"L {L}: {interval(*ratio)}" for L, ratio in ratios.items())
    word = judge(near, [low > 1 + CLOSE or high < 1 - CLOSE for low, high in around])
    return verdict("as_closed_form", text, word)


def _draw_needed(axis: Any, needed: Mapping[str, ByTokens], task: SparseTokens) -> None:
    for (kind, by_tokens), colour in zip(needed.items(), COLOURS, strict=False):
        points(axis, np.array(list(by_tokens)), [_mean_inside(v) for v in by_tokens.values()], KINDS[kind], colour)
    L = np.array(sorted(needed["frozen"] or needed["trained"]))
    draw_dashed(axis, L, np.array([_closed_form(task, tokens) for tokens in L]), "closed form of the mean token")
    axis.set(xscale="log", yscale="log", xlabel="tokens L", ylabel="strength theta", title="95 % intervals")
    for place, ticks in ((axis.xaxis, L), (axis.yaxis, STRENGTHS)):
        place.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        place.set_ticks([], minor=True)
    legend(axis)


def alignment(trials: Sequence[Trial]) -> Result:
    """|cos(q, xi)| after the task's steps, by number of training samples, compared with random directions.

    The steps are gradient descent on all weights from 0, which may differ from the paper's two updates.
    """
    task = trials[0].task
    by_n = {n: mean(values_of(group, "alignment")) for n, group in group_by(trials, lambda t: t.n).items()}
    chance = random_cosine(task.d)
    rows = [{"N": n, **columns(value, "alignment"), "chance": chance} for n, value in by_n.items()]
    text = "; ".join(f"N {n}: {interval(*triple)}" for n, triple in by_n.items())
    lows = [ends(value)[0] for value in by_n.values()]
    highs = [ends(value)[1] for value in by_n.values()]
    nearer = judge([low > chance for low in lows], [high < chance for high in highs])
    last = by_n[max(by_n)]
    aligned = judge([last[0] >= ALIGNED, ends(last)[0] >= ALIGNED], [ends(last)[1] < ALIGNED])
    verdicts = [
        verdict("nearer", f"|cos| {text}; chance {chance:.3g}", nearer, steps=task.steps),
        verdict("aligned", f"|cos| {interval(*last)} at N {max(by_n)}", aligned, steps=task.steps),
    ]
    title = f"Alignment of the query after {task.steps} steps (L {task.tokens}, d {task.d}, theta {task.theta:g})"
    return Result(title, {"alignment": rows}, [partial(_draw_alignment, by_n=by_n, chance=chance)], verdicts)


def random_cosine(d: int) -> float:
    """Return the mean of |cos| between two random directions in d dimensions."""
    return math.exp(math.lgamma(d / 2) - math.lgamma((d + 1) / 2)) / math.sqrt(math.pi)


def _draw_alignment(axis: Any, by_n: Mapping[float, Interval], chance: float) -> None:
    points(axis, np.array(list(by_n)), list(by_n.values()), "measured", COLOURS[0])
    axis.axhline(chance, color=COLOURS[5], linestyle="--", linewidth=1, label="random directions")
    axis.set(xscale="log", ylim=(0, 1.05), xlabel="training samples N", ylabel="|cos(q, xi)|", title="95 % intervals")
    legend(axis)


def removal(trials: Sequence[Trial]) -> Result:
    """Test error with L tokens reduced to M, compared with data of M tokens, for both classifiers.

    If class +1 keeps its relevant tokens, the remaining tokens are distributed as data of M tokens. This prediction is
    the project's own.
    """
    rows, verdicts = [], []
    for kind, name in KINDS.items():
        of_kind = [t for t in trials if t.model.attention == kind]
        dense = group_by([t for t in of_kind if t.strategy == "dense"], lambda t: t.task.tokens)
        for M, group in dense.items():
            rows.append(_removal_row(name, "dense", M, group, group))
        reduced = [t for t in of_kind if t.strategy != "dense"]
        for (strategy, L), group in group_by(reduced, lambda t: (t.strategy, t.task.tokens)).items():
            dense_at_M = dense.get(left_of(group[0]), [])
            rows.append(_removal_row(name, strategy, L, group, dense_at_M))
            if strategy in ("oracle", "random"):
                verdicts.append(_shifts(name, strategy, group, dense_at_M))
    panels: list[Panel] = [partial(_draw_removal, rows=rows, classifier=name) for name in KINDS.values()]
    title = f"Test error with tokens removed, beside data of as many tokens (theta {trials[0].task.theta:g})"
    return Result(title, {"removal": rows}, panels, verdicts)


def left_of(trial: Trial) -> int:
    """Return M, the number of tokens that the strategy keeps."""
    return round(trial.task.tokens * (1 - trial.removed))


def _change(group: Sequence[Trial], dense_at_M: Sequence[Trial]) -> Interval:
    """Return the test error minus that of dense with M tokens, with its interval over repetitions."""
    return mean([-gain for gain in differences(group, dense_at_M, "accuracy")])


def _removal_row(
    name: str, strategy: str, L: int, group: Sequence[Trial], dense_at_M: Sequence[Trial]
) -> dict[str, Any]:  # fmt: skip
    task, M = group[0].task, left_of(group[0])
    change = (0.0, None, None) if strategy == "dense" else _change(group, dense_at_M)
    closed = least_error(task.theta, task.relevant, M) if name == KINDS["frozen"] else float("nan")
    return {
        "classifier": name,
        "strategy": strategy,
        "L": L,
        "M": M,
        "trials": len(group),
        **columns(mean(errors_of(group)), "error"),
        **columns(change, "over dense at M", "over low", "over high"),
        "closed form at M": closed,
    }


def _shifts(name: str, strategy: str, group: Sequence[Trial], dense_at_M: Sequence[Trial]) -> Verdict:
    """Return the verdict on whether removal to M tokens is as good as data of M tokens, or worse if it is random."""
    L, M = group[0].task.tokens, left_of(group[0])
    change = _change(group, dense_at_M)
    low, high = ends(change)
    errors, dense = (mean(errors_of(part)) for part in (group, dense_at_M))
    text = f"error {interval(*errors)}, of {M} tokens {interval(*dense)}; difference {interval(*change)}"
    about = {"L": L, "M": M, "name": name}
    if strategy == "random":
        return verdict("errs_more", text, judge([low > 0], [high <= SAME]), **about)
    word = judge([abs(change[0]) <= SAME, -SAME <= low <= 0 <= high <= SAME], [low > SAME or high < -SAME])
    return verdict("as_good", text, word, **about)


def _draw_removal(axis: Any, rows: Sequence[Mapping[str, Any]], classifier: str) -> None:
    rows_by_name = {
        f"{row['strategy']} {row['L']}" + (f" to {row['M']}" if row["M"] < row["L"] else ""): row
        for row in rows
        if row["classifier"] == classifier
    }
    closed = np.array([row["closed form at M"] for row in rows_by_name.values()])
    if np.isfinite(closed).any():
        axis.plot(
            np.arange(len(rows_by_name)), closed, "_", color=COLOURS[5], markersize=12, label="closed form of M tokens"
        )
    errors = {name: (row["error"], row["low"], row["high"]) for name, row in rows_by_name.items()}
    draw_categories(axis, {"measured": errors})
    axis.set(title=f"{classifier}, 95 % intervals", ylabel="test error", ylim=(0, 0.6))


PAPER = Paper(
    "sparse-tokens",
    "the claims of the sparse-token paper (Barnfield et al., ICLR 2026)",
    {"quick": "sparse-tokens-quick", "default": "sparse-tokens-default"},
    {"strength": strength, "alignment": alignment, "removal": removal},
    seconds,
)
