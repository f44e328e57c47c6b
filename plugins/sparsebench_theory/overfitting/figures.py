"""The synthetic figures of Jiang et al., Unveil benign overfitting for Transformer in vision, NeurIPS 2024."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Paper, Result, Trial, Verdict, Word, interval, judge
from sparsebench.plan.jobs import Job
from sparsebench.stats.intervals import Interval
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.panels import NOTHING, band, draw_categories, legend, verdicts_of
from sparsebench_theory.trials import columns, crossing, ends, group_by, line, mean, series_of

PUBLISHED = 1000
"""N SNR^2 on the curve in the paper's map."""

verdict = verdicts_of(__package__, PUBLISHED=PUBLISHED)
HARMFUL, BENIGN = 600, 1400
"""Up to HARMFUL, nearly all cells should overfit harmfully, from BENIGN on benignly; values of N SNR^2."""
RATE = 20e9
"""Floating-point operations per second of one core, including overheads."""


def seconds(job: Job) -> float:
    """Return the expected seconds of a trial on one core: drawing data, testing, and tens of steps."""
    task, model = Overfitting(**job.cell.task.params), TwoLayer(**job.cell.model.params)
    looks = task.steps / task.watch if task.watch else 1
    samples = task.test * looks + job.cell.n_train
    return 4 * task.tokens * task.d * model.d_h * samples / RATE + task.tokens * task.d * task.test * 2e-8 + 0.03


@dataclass(frozen=True)
class Boundary:
    """The boundary between harmful and benign overfitting for one strategy.

    Attributes:
        trials: the trials of all repetitions, N and signal strengths. Trials that diverged or did not fit have no loss.
    """

    trials: Sequence[Trial]

    @cached_property
    def snr(self) -> np.ndarray:
        """The signal-to-noise ratios, in ascending order."""
        return np.array(sorted({t.task.snr for t in self.trials}))

    @cached_property
    def crossings(self) -> dict[int, dict[int, float]]:
        """The SNR of the crossing by repetition and N, if there is a trial at each SNR and the crossing is known."""
        crossings: dict[int, dict[int, float]] = {}
        for (repetition, n), group in group_by(self.trials, lambda t: (t.repetition, t.n)).items():
            losses = {t.task.snr: loss_of(t) for t in group}
            if len(losses) < len(self.snr):
                continue
            place = crossing(self.snr, np.array([losses[snr] for snr in self.snr]), group[0].task.threshold)
            if not np.isnan(place):
                crossings.setdefault(repetition, {})[n] = place
        return crossings

    @cached_property
    def inside(self) -> set[int]:
        """The N at which the boundary is inside the map in every run, above the smallest SNR."""
        return {n for n in self.reached_sizes if all(row[n] > self.snr[0] for row in self.crossings.values())}

    @cached_property
    def reached_sizes(self) -> set[int]:
        """The N at which every run has a boundary in the map or below it. At other N only lucky runs would count."""
        sizes = {n for row in self.crossings.values() for n in row}
        return {n for n in sizes if all(np.isfinite(row.get(n, np.inf)) for row in self.crossings.values())}

    @property
    def constant(self) -> Interval:
        """c = N SNR^2 on the boundary, geometric mean over runs and the N inside, with its interval."""
        if not self.inside:
            return mean([])
        logs = [float(np.mean([np.log(n * row[n] ** 2) for n in self.inside])) for row in self.crossings.values()]
        return _exponential(mean(logs))

    @property
    def ends(self) -> tuple[int, int, int]:
        """The numbers of crossings at or below the smallest SNR, beyond the largest, and in total."""
        crossings = [snr for row in self.crossings.values() for snr in row.values()]
        return (
            sum(snr == self.snr[0] for snr in crossings),
            sum(not np.isfinite(snr) for snr in crossings),
            len(crossings),
        )

    def shift(self, other: Boundary) -> tuple[Interval, int]:
        """Return the ratio of c to the other's, paired by run, with its interval, and the number of runs.

        Only N that both reach count. Below 1, fewer samples or a weaker signal suffice for benign overfitting. A
        boundary below the map counts as one at its smallest SNR, so that the change is underestimated.
        """
        sizes, runs = self.reached_sizes & other.reached_sizes, sorted(set(self.crossings) & set(other.crossings))
        if not sizes:
            return mean([]), 0
        logs = [float(np.mean([2 * np.log(self.crossings[r][n] / other.crossings[r][n]) for n in sizes])) for r in runs]
        return _exponential(mean(logs)), len(logs)

    def slope(self) -> Interval:
        """Return the slope of log N over log SNR along the boundary at the N inside, with its interval over runs.

        The fit is log SNR over log N, since N has no error. The slope is infinite, without an interval, if the SNR of a
        run is the same at each N.
        """
        sizes = sorted(self.inside)
        if len(sizes) < 3:
            return mean([])
        rows = [np.log([row[n] for n in sizes]) for row in self.crossings.values()]
        rates = [line(np.log(sizes), row)[0] for row in rows]
        return (float("-inf"), None, None) if min(map(abs, rates)) < 1e-9 else mean([1 / rate for rate in rates])


def loss_of(trial: Trial) -> float:
    """Return the test loss at the first low training loss; NaN if there is none."""
    if trial.diverged or not is_fitted(trial):
        return float("nan")
    loss = trial.values["test_loss"]
    return float("nan") if loss is None else loss


def is_fitted(trial: Trial) -> bool:
    """Return whether the training loss fell below the task's level."""
    return not trial.diverged and trial.values.get("fitted") == 1


def _exponential(logs: Interval) -> Interval:
    """Return the exponentials of an interval."""
    value, *bounds = logs
    low, high = (None if bound is None else float(np.exp(bound)) for bound in bounds)
    return float(np.exp(value)), low, high


def figure_1(trials: Sequence[Trial]) -> Result:
    """The test loss at the first low training loss, over SNR and N."""
    boundary = Boundary(trials)
    losses = {key: [loss_of(t) for t in group] for key, group in group_by(trials, lambda t: (t.n, t.task.snr)).items()}
    rows = []
    for (n, snr), group in losses.items():
        fitted = [loss for loss in group if np.isfinite(loss)]
        rows.append(
            {
                "N": n,
                "SNR": snr,
                "N SNR^2": n * snr**2,
                "trials": len(group),
                "fitted": len(fitted),
                "test loss": mean(fitted)[0],
            }
        )
    threshold = trials[0].task.threshold
    panels: list[Panel] = [
        partial(_map, trials=trials, boundary=boundary, cut=None),
        partial(_map, trials=trials, boundary=boundary, cut=threshold),
        partial(_crossings, boundaries={"measured": boundary}),
    ]
    verdicts = _sides_and_curve(trials, boundary, threshold)
    title = "Figure 1: test loss where the training loss falls below 0.01"
    return Result(title, {"fig1": rows, "fig1-boundary": _crossing_rows(dense=boundary)}, panels, verdicts)


def _sides_and_curve(trials: Sequence[Trial], boundary: Boundary, threshold: float) -> list[Verdict]:
    """Return the verdicts on the losses on both sides of the paper's curve, and on the position of the curve."""
    fitted = [t for t in trials if not np.isnan(loss_of(t))]
    harmful = [loss_of(t) >= threshold for t in fitted if t.n * t.task.snr**2 <= HARMFUL]
    benign = [loss_of(t) < threshold for t in fitted if t.n * t.task.snr**2 >= BENIGN]
    return [
        _side(f"harmful: loss >= {threshold:g} where N SNR^2 <= {HARMFUL}", harmful),
        _side(f"benign: loss < {threshold:g} where N SNR^2 >= {BENIGN}", benign),
        _slope(boundary),
        _constant(boundary),
    ]


def _side(claim: str, as_claimed: Sequence[bool]) -> Verdict:
    """Return the verdict on a side of the curve; `as_claimed` says of each trial there whether its loss is so."""
    share = float(np.mean(as_claimed)) if as_claimed else float("nan")
    measured = "no trial there fits its training data"
    if as_claimed:
        measured = f"{share:.1%} of {len(as_claimed)} trials"
    return verdict("side", measured, judge([share >= 0.8, share >= 0.95], [share < 0.8]), claim=claim)


def _slope(boundary: Boundary) -> Verdict:
    slope, low, high = boundary.slope()
    near = abs(slope + 2) <= 0.4
    touches = low is not None and high is not None and low <= -1.6 and high >= -2.4
    against = not near and not touches and not np.isnan(slope)
    return verdict("slope", f"slope {interval(slope, low, high)}", judge([near or touches, near], [against]))


def _constant(boundary: Boundary) -> Verdict:
    value, low, high = boundary.constant
    below, beyond, number = boundary.ends
    distance = abs(np.log(value / PUBLISHED))
    within_two = distance <= np.log(2)
    close = 0.6 <= value / PUBLISHED <= 1.4
    measured = (
        f"{interval(value, low, high)}; of {number} crossings {below} at the smallest SNR or below, {beyond} beyond "
        "the largest"
    )
    word = judge([within_two, close], [distance > np.log(2)])
    return verdict("constant", measured, word, published=str(PUBLISHED))


def _crossing_rows(**boundaries: Boundary) -> list[dict[str, Any]]:
    return [
        {"strategy": name, "repetition": repetition, "N": n, "SNR": snr, "N SNR^2": n * snr**2}
        for name, boundary in boundaries.items()
        for repetition, row in boundary.crossings.items()
        for n, snr in row.items()
    ]


def _map(axis: Any, trials: Sequence[Trial], boundary: Boundary, cut: float | None) -> None:
    """Draw the map with a row for each run, as in the paper: losses, or with `cut` whether they are above it."""
    snr = boundary.snr
    sizes = sorted({t.n for t in trials})
    runs = sorted({t.repetition for t in trials})
    values = np.full((len(sizes) * len(runs), len(snr)), np.nan)
    for t in trials:
        row = sizes.index(t.n) * len(runs) + runs.index(t.repetition)
        values[row, np.searchsorted(snr, t.task.snr)] = loss_of(t)
    name = "test loss"
    if cut is not None:
        name = f"test loss >= {cut:g}"
        values = np.where(np.isfinite(values), values >= cut, np.nan)

    axis.set_facecolor(NOTHING)  # trials that never fitted
    edges = _edges(snr)
    rows = np.arange(len(values) + 1) / len(runs)
    drawn = axis.pcolormesh(edges, rows, values, cmap="viridis", vmin=0, rasterized=True)
    axis.figure.colorbar(drawn, ax=axis)
    middles = np.arange(len(sizes)) + 0.5
    axis.set_yticks(middles, [str(n) for n in sizes])

    # The paper's curve. The vertical axis is linear in N between the middles of two rows.
    n = np.linspace(sizes[0], sizes[-1], 200)
    curve = np.clip((PUBLISHED / n) ** 0.5, edges[0], edges[-1])
    axis.plot(curve, np.interp(n, sizes, middles), color=COLOURS[3], label="N SNR$^2$ = 1000")
    axis.set(title=name, xlabel="SNR", ylabel="training samples N, a row a run", xlim=(edges[0], edges[-1]))
    axis.legend(loc="upper right")


def _edges(snr: np.ndarray) -> np.ndarray:
    """Return the edges of the map's columns: half-way between two SNR, and as far beyond the first and the last."""
    if len(snr) == 1:
        return np.array([0.9 * snr[0], 1.1 * snr[0]])
    middles = (snr[1:] + snr[:-1]) / 2
    return np.concatenate([[2 * snr[0] - middles[0]], middles, [2 * snr[-1] - middles[-1]]])


def _crossings(axis: Any, boundaries: Mapping[str, Boundary]) -> None:
    """Draw the boundary of each strategy, N over SNR on logarithmic axes."""
    inside = {name: boundary for name, boundary in boundaries.items() if _grouped_crossings(boundary)}
    for (name, boundary), colour in zip(inside.items(), cycle(COLOURS)):
        by_n = _grouped_crossings(boundary)
        for n, snrs in by_n.items():
            low, middle, high = np.quantile(snrs, (0.25, 0.5, 0.75))
            axis.plot([low, high], [n, n], color=colour, linewidth=1)
            axis.plot(middle, n, "o", color=colour, markersize=4)
        axis.plot([], [], "o", color=colour, label=name)
    snr = next(iter(boundaries.values())).snr
    axis.plot(snr, PUBLISHED / snr**2, "--", color=COLOURS[5], label="N SNR$^2$ = 1000")
    sizes = sorted({n for b in boundaries.values() for row in b.crossings.values() for n in row})
    axis.set(title="boundary: median and quartiles of runs", xlabel="SNR", ylabel="N", xscale="log", yscale="log")
    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"], minor=False)
    axis.set_xticks([], minor=True)
    axis.set_yticks(sizes, [str(n) for n in sizes])
    axis.set_yticks([], minor=True)
    if sizes:
        axis.set_ylim(0.7 * sizes[0], 1.4 * sizes[-1])
    legend(axis)


def _grouped_crossings(boundary: Boundary) -> dict[int, list[float]]:
    """Return the finite crossings by N."""
    sizes = sorted({n for row in boundary.crossings.values() for n in row})
    by_n = {n: [row[n] for row in boundary.crossings.values() if np.isfinite(row.get(n, np.inf))] for n in sizes}
    return {n: snrs for n, snrs in by_n.items() if snrs}


PANELS = (
    ("loss", {"train_loss_then": "training", "test_loss": "test"}),
    ("attention", {"attention_on_relevant": "signal", "attention_on_noise": "strong noise"}),
    ("value, $y\\, x^T W_V w_O$", {"value_of_signal": "signal", "value_of_noise": "strong noise"}),
    ("score of the signal as a query", {"score_of_signal": "signal", "score_of_noise": "strong noise"}),
)


def _dynamics(figure: str, trials: Sequence[Trial]) -> Result:
    """Figure 2, harmful overfitting with a weak signal, or 3, benign overfitting with a strong one, otherwise the same.

    The paper's setting is unknown.
    """
    task = trials[0].task
    kind = {"2": "harmful", "3": "benign"}[figure]
    rows = []
    for _, lines in PANELS:
        for name in lines:
            steps, values = series_of(trials, name)
            for step, column in zip(steps, values.T, strict=True):
                spread = column.std(ddof=1 if len(column) > 1 else 0)
                rows.append({"quantity": name, "step": int(step), "mean": column.mean(), "std": spread})
    panels: list[Panel] = [partial(_draw, trials=trials, lines=lines, title=title) for title, lines in PANELS]
    c = trials[0].n * task.snr**2
    title = f"Figure {figure}: {kind} overfitting, N SNR$^2$ = {c:.3g} (bands: one standard deviation)"
    return Result(title, {f"fig{figure}": rows}, panels, _directions(figure, trials))


def _draw(axis: Any, trials: Sequence[Trial], lines: Mapping[str, str], title: str) -> None:
    for (name, label), colour in zip(lines.items(), COLOURS, strict=False):
        steps, values = series_of(trials, name)
        band(axis, steps, values, label, colour)
    axis.set(title=title, xlabel="steps")
    legend(axis)


def _change_and_end(trials: Sequence[Trial], name: str) -> tuple[Interval, Interval]:
    """Return the mean change of a quantity, and its mean at the end, with their intervals."""
    _, values = series_of(trials, name)
    if not values.size:
        return mean([]), mean([])
    return mean(values[:, -1] - values[:, 0]), mean(values[:, -1])


def _directions(figure: str, trials: Sequence[Trial]) -> list[Verdict]:
    """Return the verdicts on the directions of change that the paper states."""
    if figure == "3":
        more, less = "the signal", "the strong noise"
    else:
        more, less = "the strong noise", "the signal"
    attention = _attention(trials, more, less)
    return [
        verdict("attention", *attention, figure=figure, more=more, less=less),
        verdict("value", *_value(trials, more), figure=figure, more=more),
        _losses(figure, trials),
    ]


def _attention(trials: Sequence[Trial], more: str, less: str) -> tuple[str, Word]:
    """Return the changes of the attention on two kinds of tokens, and whether it moves from one to the other."""
    names = {"the signal": "attention_on_relevant", "the strong noise": "attention_on_noise"}
    up, _ = _change_and_end(trials, names[more])
    down, _ = _change_and_end(trials, names[less])
    word = judge([ends(up)[0] > 0, ends(down)[1] < 0], [ends(up)[1] < 0 or ends(down)[0] > 0])
    return f"{interval(*up)} and {interval(*down)}", word


def _value(trials: Sequence[Trial], more: str) -> tuple[str, Word]:
    """Return how much larger the value of a kind of tokens is at the end, and whether it is larger."""
    _, signal = series_of(trials, "value_of_signal")
    _, noise = series_of(trials, "value_of_noise")
    lead = mean([])
    if signal.size:
        sign = 1 if more == "the signal" else -1
        lead = mean(sign * (signal - noise)[:, -1])
    return f"{interval(*lead)} larger at the end", judge([ends(lead)[0] > 0], [ends(lead)[1] < 0])


def _losses(figure: str, trials: Sequence[Trial]) -> Verdict:
    """Return the verdict on the losses at the end."""
    _, test = _change_and_end(trials, "test_loss")
    _, train = _change_and_end(trials, "train_loss_then")
    if figure == "3":
        stays = "falls below 0.2"
        as_claimed = test[0] < 0.2
    else:
        stays = "stays at log 2 or above"
        as_claimed = test[0] >= 0.95 * float(np.log(2))
    word = judge([train[0] < 0.05, as_claimed], [train[0] >= 0.05 and not as_claimed])
    return verdict("losses", f"training {interval(*train)}, test {interval(*test)}", word, figure=figure, stays=stays)


def strategies(trials: Sequence[Trial]) -> Result:
    """The boundary with each strategy."""
    groups = group_by(trials, lambda t: t.strategy + (f" {t.removed:.0%}" if t.strategy != "dense" else ""))
    boundaries = {name: Boundary(group) for name, group in groups.items()}
    dense = boundaries.pop("dense", Boundary(()))
    boundaries = {"dense": dense, **boundaries} if dense.trials else boundaries
    rows, verdicts = [], []
    for name, boundary in boundaries.items():
        shift, runs = boundary.shift(dense)
        below, beyond, number = boundary.ends
        row = {
            "strategy": name,
            **columns(boundary.constant, "N SNR^2"),
            **columns(shift, "over dense", "over dense low", "over dense high"),
            "runs": runs,
            "crossings": number,
            "below the map": below,
            "beyond the map": beyond,
            "reached": bool(boundary.reached_sizes) or not dense.reached_sizes,
            "trials": len(boundary.trials),
            "fitted": sum(map(is_fitted, boundary.trials)),
        }
        rows.append(row)
        if name != "dense":
            verdicts.append(_moves(row))
    panels: list[Panel] = [partial(_crossings, boundaries=boundaries), partial(_shifts, rows=rows)]
    tables = {"strategies": rows, "strategies-boundary": _crossing_rows(**boundaries)}
    return Result("Where benign overfitting begins as tokens are removed", tables, panels, verdicts)


def _moves(row: Mapping[str, Any]) -> Verdict:
    name, low, high = row["strategy"], row["over dense low"], row["over dense high"]
    claim = "removing noise tokens" if name.startswith("oracle") else "removing tokens"
    nowhere = row["crossings"] > 0 and not row["reached"]
    measured = (
        f"N SNR^2 over dense's: {interval(row['over dense'], low, high)} in {row['runs']} runs; of {row['crossings']} "
        f"crossings {row['below the map']} below the map, {row['beyond the map']} beyond it; {row['fitted']} of "
        f"{row['trials']} trials fitted their training data"
    )
    word = judge([(high or np.inf) < 1], [(low or 0) > 1 or nowhere])
    return verdict("moves", measured, word, claim=claim, name=name)


def _shifts(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    triples = {row["strategy"]: (row["over dense"], row["over dense low"], row["over dense high"]) for row in rows}
    draw_categories(axis, {"N SNR$^2$ of the boundary over dense's": triples})
    axis.axhline(1, color=COLOURS[5], linestyle="--", linewidth=1)
    axis.set(yscale="log", title="shift of the boundary, 95 % intervals")


PAPER = Paper(
    "overfitting",
    "the synthetic figures of the benign-overfitting paper (Jiang et al., NeurIPS 2024)",
    {"quick": "overfitting-quick", "full": "overfitting-full"},
    {"1": figure_1, "2": partial(_dynamics, "2"), "3": partial(_dynamics, "3"), "strategies": strategies},
    seconds,
)
