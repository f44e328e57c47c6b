"""The claims of Jelassi, Sander and Li, Vision Transformers provably learn spatial structure, NeurIPS 2022."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Paper, Result, Trial, Verdict, Word, interval, judge
from sparsebench.plan.jobs import Job
from sparsebench.stats.intervals import Interval
from sparsebench_theory.panels import band, draw_categories, legend, points, verdicts_of
from sparsebench_theory.spatial.task import Spatial, association
from sparsebench_theory.trials import columns, differences, ends, errors_of, group_by, mean, series_of, values_of

WATCHED = {
    "association": "patch association",
    "in_group_mass": "attention inside the set",
    "alignment": "cosine of v and w*",
    "test_error": "test error",
}
EASY = 0.05
"""The required test error after transfer."""
FEWER = 4
"""Training from scratch should need at least this many times as many samples."""
ACCEPTED = 0.05
"""Largest accepted loss of accuracy by positional attention on images; on ImageNet the paper has 0.03."""

verdict = verdicts_of(__package__, ACCEPTED=ACCEPTED, EASY=EASY, FEWER=FEWER)
RATE = 2e9
"""Multiplications per second of one core, limited by memory."""


def seconds(job: Job) -> float:
    """Return the expected seconds of a trial on one core: each step reads all samples a few times."""
    if job.cell.task.name != Spatial.name:
        return 4e-3 * job.cell.n_train * job.cell.task.params["epochs"]  # type: ignore[operator]
    task = Spatial(**job.cell.task.params)
    return task.steps * (4 * job.cell.n_train * task.tokens * task.d / RATE + 4e-4) + 0.1


def figure_association(trials: Sequence[Trial]) -> Result:
    """Patch association, attention, read-out and error during training, at two step sizes of the attention."""
    by_rate = group_by(trials, lambda t: t.task.lr_attention or t.task.lr)
    runs = {f"step size {rate:g}": group for rate, group in by_rate.items()}
    rows, verdicts = [], []
    for name, group in runs.items():
        for quantity in (*WATCHED, "in_group_lead"):
            steps, values = _curves(group, quantity)
            for step, column in zip(steps, values.T, strict=True):
                row: dict[str, Any] = {"attention at": name, "quantity": quantity, "step": int(step)}
                spread = {"mean": column.mean(), "min": column.min(), "max": column.max()}
                rows.append(row | spread | {"trials": len(column)})
        verdicts += _outcome(group, f" (attention at {name})")
    panels: list[Panel] = [partial(_draw_watched, runs=runs, quantity=quantity) for quantity in WATCHED]
    title = "Patch association: patches that belong together attend to each other (bands: one standard deviation)"
    return Result(title, {"association": rows}, panels, verdicts)


def _curves(trials: Sequence[Trial], quantity: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and (trials, steps) of one of WATCHED."""
    if quantity != "test_error":
        return series_of(trials, quantity)
    steps, accuracy = series_of(trials, "test_accuracy")
    return steps, 1 - accuracy


def _draw_watched(axis: Any, runs: Mapping[str, Sequence[Trial]], quantity: str) -> None:
    for (name, group), colour in zip(runs.items(), COLOURS, strict=False):
        band(axis, *_curves(group, quantity), name, colour)
    axis.set(title=WATCHED[quantity], xlabel="steps", ylim=(0, None))
    legend(axis, "attention at")


def _outcome(trials: Sequence[Trial], name: str) -> list[Verdict]:
    """Return the verdicts on the end of training: association, alignment, error, and where the attention grew."""
    return [
        _association(trials, name),
        _alignment(values_of(trials, "alignment"), name),
        _error(errors_of(trials), name),
        _lead(values_of(trials, "in_group_lead"), name),
    ]


def _association(trials: Sequence[Trial], name: str) -> Verdict:
    shares = values_of(trials, "association")
    complete = sum(share == 1 for share in shares)
    measured = f"{interval(*mean(shares))}; 1 in {complete} of {len(trials)} trials"
    return verdict("association", measured, _all_or_most(shares, len(trials)), name=name)


def _alignment(cosines: Sequence[float], name: str) -> Verdict:
    word = judge([min(cosines, default=0) >= 0.95], [max(cosines, default=1) < 0.95])
    return verdict("alignment", interval(*mean(cosines)), word, name=name)


def _error(errors: Sequence[float], name: str) -> Verdict:
    word = judge([max(errors, default=1) <= 0.01], [min(errors, default=0) > 0.01])
    return verdict("learned", f"test error {interval(*mean(errors))}", word, name=name)


def _lead(leads: Sequence[float], name: str) -> Verdict:
    lead = mean(leads)
    word = judge([ends(lead)[0] > 0], [max(leads, default=1) <= 0])
    return verdict("inside", f"lead of the inside {interval(*lead)}", word, name=name)


def _all_or_most(share: Sequence[float], trials: int) -> Word:
    """Judge patch association by trial. A diverged trial counts as 0, but not as evidence against the claim."""
    least = min(share, default=0) if len(share) == trials else 0
    return judge([least >= 0.9, least == 1], [max(share, default=1) < 0.9])


def permutation(trials: Sequence[Trial]) -> Result:
    """The scores learned on patches in plain order and in another order, and the latter sorted back."""
    rows = []
    shares = []  # of trials with another order
    for t in trials:
        if t.diverged:
            continue
        sets = t.task.sets()
        together = sets[:, None] == sets
        scores = _scores(t)
        share = association(put_right(scores, t.task.order()), together)
        if t.task.permuted:
            shares.append(share)
        rows.append(
            {
                "permuted": t.task.permuted,
                "repetition": t.repetition,
                "association": share,
                "association without putting right": association(scores, together),
            }
        )
    permuted_trials = sum(t.task.permuted for t in trials)
    measured = f"association {interval(*mean(shares))} after putting right"
    verdicts = [verdict("recovered", measured, _all_or_most(shares, permuted_trials))]
    panels = _score_panels(trials) or [_nothing]
    return Result("Learned scores, positions sorted by their set", {"permutation": rows}, panels, verdicts)


def _score_panels(trials: Sequence[Trial]) -> list[Panel]:
    """Return the panels with the scores of the first trial of each order."""
    panels: list[Panel] = []
    for permuted, title in ((False, "learned in plain order"), (True, "learned in another order")):
        example = next((t for t in trials if t.task.permuted == permuted and not t.diverged), None)
        if example is None:
            continue
        scores = _scores(example)
        panels.append(partial(_heat, scores=scores, task=example.task, title=title))
        if permuted:
            right = put_right(scores, example.task.order())
            panels.append(partial(_heat, scores=right, task=example.task, title="the same, put right"))
    return panels


def _scores(trial: Trial) -> np.ndarray:
    D = trial.task.tokens
    return np.array(trial.curves["trained_scores"]).reshape(D, D)


def _heat(axis: Any, scores: np.ndarray, task: Spatial, title: str) -> None:
    order = np.argsort(task.sets(), kind="stable")
    ordered = scores[np.ix_(order, order)].copy()
    np.fill_diagonal(ordered, np.nan)
    drawn = axis.imshow(ordered, cmap="viridis")
    axis.figure.colorbar(drawn, ax=axis)
    axis.set(title=title, xlabel="position", ylabel="position")


def _nothing(axis: Any) -> None:
    axis.set(title="no trial trained", xlabel="position", ylabel="position")


MODES = ("learned attention", "shuffled attention", "initial attention", "all from scratch")


def _mode(trial: Trial) -> str:
    if trial.task.start == "pretrained":
        return MODES[1] if trial.task.permuted else MODES[0]
    return MODES[2] if trial.model.attention == "frozen" else MODES[3]


def transfer(trials: Sequence[Trial]) -> Result:
    """Test error on a new feature by number of samples, with and without attention learned on another feature."""
    errors: dict[str, dict[float, list[float]]] = {}
    for mode in MODES:
        by_n = group_by([t for t in trials if _mode(t) == mode], lambda t: t.n)
        errors[mode] = {n: errors_of(group) for n, group in by_n.items()}
    rows = [
        {"attention": mode, "N": n, "trials": len(values), **columns(mean(values), "test error")}
        for mode, by_n in errors.items()
        for n, values in by_n.items()
    ]
    panels: list[Panel] = [partial(_errors, errors=errors)]
    title = "Transfer to a new feature in the same sets (95 % intervals)"
    return Result(title, {"transfer": rows}, panels, _transfers(errors))


def samples_for(errors: Mapping[float, list[float]]) -> float:
    """Return the smallest N from which on the mean error is at most EASY; infinite if there is none."""
    means = {n: mean(values)[0] for n, values in sorted(errors.items())}
    enough = float("inf")
    for n in reversed(means):
        if not means[n] <= EASY:
            break
        enough = float(n)
    return enough


def _transfers(errors: Mapping[str, Mapping[float, list[float]]]) -> list[Verdict]:
    """Return the verdicts on the samples that each mode needs. Modes without measurements do not count."""
    needed = {mode: samples_for(by_n) for mode, by_n in errors.items()}
    measured = {mode: any(by_n.values()) for mode, by_n in errors.items()}
    learned, scratch = needed["learned attention"], needed["all from scratch"]
    others = MODES[1:3]

    has_learned, has_scratch = measured["learned attention"], measured["all from scratch"]
    learned_needs_few = learned <= 16
    scratch_needs_more = has_scratch and scratch > learned
    scratch_needs_many_times_more = learned_needs_few and scratch_needs_more and scratch >= FEWER * learned
    scratch_needs_no_more = has_learned and np.isfinite(scratch) and scratch <= learned
    others_never_learn = all(measured[mode] and np.isinf(needed[mode]) for mode in others)
    another_is_as_good = min(needed[mode] for mode in others) <= learned < np.inf

    sizes = sorted({n for by_n in errors.values() for n in by_n})
    text = "; ".join(f"{mode} {interval(n, None, None)}" for mode, n in needed.items())
    tried = f"samples for an error of {EASY:g}: {text}; N {sizes[0]} to {sizes[-1]}"
    return [
        verdict("few", tried, judge([learned_needs_few], [has_learned and not learned_needs_few])),
        verdict("more", tried, judge([scratch_needs_more, scratch_needs_many_times_more], [scratch_needs_no_more])),
        verdict("structure", tried, judge([others_never_learn], [another_is_as_good])),
    ]


def _errors(axis: Any, errors: Mapping[str, Mapping[float, list[float]]]) -> None:
    for (mode, by_n), colour in zip(errors.items(), COLOURS, strict=False):
        if not by_n:
            continue
        sizes, triples = np.array(list(by_n)), [mean(values) for values in by_n.values()]
        points(axis, sizes, triples, mode, colour)
        axis.plot(sizes, [value for value, _, _ in triples], color=colour, linewidth=1)
    axis.axhline(EASY, color=COLOURS[5], linestyle="--", linewidth=1)
    tried = [n for by_n in errors.values() for n in by_n]
    axis.set(xscale="log", xlabel="training samples with the new feature", ylabel="test error", ylim=(0, None))
    axis.set_xlim(0.8 * min(tried), 1.25 * max(tried))
    legend(axis)


METRICS = {"association": "patch association", "accuracy": "accuracy", "in_group_mass": "attention inside the set"}


def strategies(trials: Sequence[Trial]) -> Result:
    """Association and accuracy with tokens removed."""
    dense = [t for t in trials if t.strategy == "dense"]
    rows, verdicts = [], []
    groups = group_by([t for t in trials if t.strategy != "dense"], lambda t: (t.where, t.strategy, t.removed))
    for (where, name, removed), group in {("both", "dense", 0.0): dense, **groups}.items():
        row: dict[str, Any] = {"where": where, "strategy": name, "removed": removed, "trials": len(group)}
        for metric in METRICS:
            row |= columns(mean(values_of(group, metric)), metric, f"{metric} low", f"{metric} high")
        rows.append(row)
        if name != "dense" and where == "both":
            shares = values_of(group, "association")
            change = mean(differences(group, dense, "association"))
            text = f"association {interval(*mean(shares))}, change {interval(*change)}"
            word = _all_or_most(shares, len(group))
            verdicts.append(verdict("keeps", text, word, removed=removed, name=name))
    panels: list[Panel] = [partial(_removals, rows=rows, metric=metric) for metric in METRICS]
    title = "Association and accuracy as tokens are removed (95 % intervals)"
    return Result(title, {"strategies": rows}, panels, verdicts)


def _of(row: Mapping[str, Any], metric: str) -> Interval:
    return row[metric], row[f"{metric} low"], row[f"{metric} high"]


def _removals(axis: Any, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    series: dict[str, dict[str, Interval]] = {"in training and test": {}, "in the test only": {}}
    for row in rows:
        name = row["strategy"] + (f" {row['removed']:.0%}" if row["removed"] else "")
        label = "in training and test" if row["where"] == "both" else "in the test only"
        series[label][name] = _of(row, metric)
    draw_categories(axis, series)
    axis.set(title=METRICS[metric], ylim=(0, 1.05))


KINDS = {"content": "ordinary", "positional": "positional"}
ORDERS = {False: "patches in plain order", True: "patches in another order"}

Groups = Mapping[tuple[str, bool], Sequence[Trial]]


def images(trials: Sequence[Trial]) -> Result:
    """Accuracy of a small ViT with ordinary and with positional attention, and neighbour agreement.

    Neighbour agreement is the share of a patch's neighbours in the image that are among the positions most similar to
    its own in the first block, after undoing a permutation of the patches. It is compared with shuffled orders.
    """
    groups: dict[tuple[str, bool], list[Trial]] = {(kind, permuted): [] for kind in KINDS for permuted in ORDERS}
    for t in trials:
        groups[t.model.attention, t.task.permuted].append(t)
    rows = []
    for (kind, permuted), group in groups.items():
        row: dict[str, Any] = {"attention": KINDS[kind], "order": ORDERS[permuted], "trials": len(group)}
        for metric in ("accuracy", "neighbour_agreement", "neighbour_agreement_shuffled"):
            measured = mean(values_of([t for t in group if metric in t.values], metric))
            row |= columns(measured, metric, f"{metric} low", f"{metric} high")
        rows.append(row)
    panels: list[Panel] = [partial(_accuracies, rows=rows), partial(_agreements, rows=rows)]
    for permuted, name in ORDERS.items():
        example = next((t for t in groups["positional", permuted] if not t.diverged), None)
        if example is not None:
            panels.append(partial(_near_the_middle, trial=example, title=name))
    group = trials[0].task
    title = f"Positional attention on images ({group.images}; {trials[0].n} training images, {group.epochs} epochs)"
    verdicts = _claims(groups, permuted=False) + _claims(groups, permuted=True)
    return Result(title, {"images": rows}, panels, verdicts)


def _claims(groups: Groups, permuted: bool) -> list[Verdict]:
    """Return the verdicts on whether positional attention keeps the accuracy, and finds the grid."""
    positional, ordinary = groups["positional", permuted], groups["content", permuted]
    gap = mean(differences(positional, ordinary, "accuracy"))
    low, high = ends(gap)
    as_accurate = judge([gap[0] >= -ACCEPTED, low >= -ACCEPTED], [high < -ACCEPTED])

    share = mean(values_of(positional, "neighbour_agreement"))
    leads = []
    for t in positional:
        if not t.diverged:
            agreement, by_chance = t.values["neighbour_agreement"], t.values["neighbour_agreement_shuffled"]
            leads.append(agreement - by_chance)  # type: ignore[operator]
    lead = mean(leads)
    above_chance = ends(lead)[0] > 0
    neighbours = judge([above_chance, above_chance and ends(share)[0] >= 0.5], [ends(share)[1] < 0.5])
    measured = f"agreement {interval(*share)}, {interval(*lead)} above shuffled orders"
    return [
        verdict("as_accurate", f"difference {interval(*gap)}", as_accurate, order=ORDERS[permuted]),
        verdict("neighbours", measured, neighbours, order=ORDERS[permuted]),
    ]


def _accuracies(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    series: dict[str, dict[str, Interval]] = {order: {} for order in ORDERS.values()}
    for row in rows:
        series[row["order"]][row["attention"]] = _of(row, "accuracy")
    draw_categories(axis, series)
    axis.set(title="accuracy, 95 % intervals", ylim=(0, 1), xlim=(-0.5, 1.5))


def _agreements(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    rows_positional = [row for row in rows if row["attention"] == "positional"]
    names = {"measured": "neighbour_agreement", "shuffled orders": "neighbour_agreement_shuffled"}
    draw_categories(
        axis, {name: {row["order"]: _of(row, metric) for row in rows_positional} for name, metric in names.items()}
    )
    axis.set(title="neighbours found, positional attention", ylim=(0, None), xlim=(-0.5, 1.5))


def put_right(scores: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return (D, D) scores in plain order of the positions, from scores whose position i shows patch order[i]."""
    back = np.argsort(order)
    return scores[np.ix_(back, back)]


def _near_the_middle(axis: Any, trial: Trial, title: str) -> None:
    """Draw the similarity of each position of the image to the middle, without the permutation."""
    similarity = np.array(trial.curves["trained_similarity"])
    N = round(len(similarity) ** 0.5)
    side = round(N**0.5)
    order = trial.task.order()
    middle = (side // 2) * side + side // 2
    picture = put_right(similarity.reshape(N, N), np.arange(N) if order is None else order)[middle]
    picture[middle] = np.nan
    drawn = axis.imshow(picture.reshape(side, side), cmap="viridis")
    axis.figure.colorbar(drawn, ax=axis)
    axis.set(title=f"similarity to the middle, {title}", xlabel="column", ylabel="row")


PAPER = Paper(
    "spatial",
    "the figures of the spatial-structure paper (Jelassi et al., NeurIPS 2022)",
    {"quick": "spatial-quick", "full": "spatial-full"},
    {
        "association": figure_association,
        "permutation": permutation,
        "transfer": transfer,
        "strategies": strategies,
        "images": images,
    },
    seconds,
)
