"""The synthetic figures of Jiang et al., Unveil benign overfitting for Transformer in vision, NeurIPS 2024."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import cycle
from typing import Any

import numpy as np

from sparsebench.paper import COLOURS, Panel, Paper, Result, Trial, Verdict, interval, judge
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
    rows = [
        {"N": n, "SNR": snr, "N SNR^2": n * snr**2, "trials": len(group), "fitted": int(np.isfinite(group).sum()),
         "test loss": mean([v for v in group if np.isfinite(v)])[0]}
        for (n, snr), group in losses.items()
    ]  # fmt: skip
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
    verdicts = []
    for name, here, benign in (
        (f"harmful: loss >= {threshold:g} where N SNR^2 <= {HARMFUL}", lambda c: c <= HARMFUL, False),
        (f"benign: loss < {threshold:g} where N SNR^2 >= {BENIGN}", lambda c: c >= BENIGN, True),
    ):
        losses = [loss_of(t) for t in trials if here(t.n * t.task.snr**2) and is_fitted(t)]
        right = float(np.mean([(loss < threshold) == benign for loss in losses])) if losses else float("nan")
        text = f"{right:.1%} of {len(losses)} trials" if losses else "no trial there fits its training data"
        verdicts.append(verdict("side", text, judge([right >= 0.8, right >= 0.95], [right < 0.8]), claim=name))
    slope, low, high = boundary.slope()
    near = abs(slope + 2) <= 0.4
    touches = low is not None and high is not None and low <= -1.6 and high >= -2.4
    word = judge([near or touches, near], [not near and not touches and not np.isnan(slope)])
    verdicts.append(verdict("slope", f"slope {interval(slope, low, high)}", word))
    value, low, high = boundary.constant
    below, beyond, number = boundary.ends
    far = abs(np.log(value / PUBLISHED))
    verdicts.append(verdict(
        "constant",
        f"{interval(value, low, high)}; of {number} crossings {below} at the smallest SNR or below, {beyond} beyond "
        "the largest", judge([far <= np.log(2), 0.6 <= value / PUBLISHED <= 1.4], [far > np.log(2)]),
        published=str(PUBLISHED),
    ))  # fmt: skip
    return verdicts


def _crossing_rows(**boundaries: Boundary) -> list[dict[str, Any]]:
    return [
        {"strategy": name, "repetition": repetition, "N": n, "SNR": snr, "N SNR^2": n * snr**2}
        for name, boundary in boundaries.items()
        for repetition, row in boundary.crossings.items()
        for n, snr in row.items()
    ]


def _map(axis: Any, trials: Sequence[Trial], boundary: Boundary, cut: float | None) -> None:
    """Draw the map with a row for each run, as in the paper: losses, or with `cut` whether they are above it."""
    snr, sizes = boundary.snr, sorted({t.n for t in trials})
    runs = sorted({t.repetition for t in trials})
    values = np.full((len(sizes) * len(runs), len(snr)), np.nan)
    for t in trials:
        values[sizes.index(t.n) * len(runs) + runs.index(t.repetition), np.searchsorted(snr, t.task.snr)] = loss_of(t)
    if cut is not None:
        values = np.where(np.isfinite(values), values >= cut, np.nan)
    axis.set_facecolor(NOTHING)  # trials that never fitted
    middles = (snr[1:] + snr[:-1]) / 2
    first, last = (middles[0], middles[-1]) if len(middles) else (1.1 * snr[0], 0.9 * snr[0])
    edges = np.concatenate([[2 * snr[0] - first], middles, [2 * snr[-1] - last]])
    rows = np.arange(len(values) + 1) / len(runs)
    drawn = axis.pcolormesh(edges, rows, values, cmap="viridis", vmin=0, rasterized=True)
    axis.figure.colorbar(drawn, ax=axis)
    axis.set_yticks(np.arange(len(sizes)) + 0.5, [str(n) for n in sizes])
    fine = np.linspace(sizes[0], sizes[-1], 200)
    place = np.interp(fine, sizes, np.arange(len(sizes)) + 0.5)
    axis.plot(
        np.clip((PUBLISHED / fine) ** 0.5, edges[0], edges[-1]), place, color=COLOURS[3], label="N SNR$^2$ = 1000"
    )
    name = "test loss" if cut is None else f"test loss >= {cut:g}"
    axis.set(title=name, xlabel="SNR", ylabel="training samples N, a row a run", xlim=(edges[0], edges[-1]))
    axis.legend(loc="upper right")


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
            rows += [
                {"quantity": name, "step": int(step), "mean": column.mean(), "std": column.std(ddof=len(column) > 1)}
                for step, column in zip(steps, values.T, strict=True)
            ]
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
    _, values = series_of(trials, name)
    return (mean(values[:, -1] - values[:, 0]), mean(values[:, -1])) if values.size else (mean([]), mean([]))


def _directions(figure: str, trials: Sequence[Trial]) -> list[Verdict]:
    """Return the verdicts on the directions of change that the paper states."""
    benign = figure == "3"
    more, less = ("attention_on_relevant", "attention_on_noise")[:: 1 if benign else -1]
    names = {"attention_on_relevant": "the signal", "attention_on_noise": "the strong noise"}
    (up, _), (down, _) = (_change_and_end(trials, name) for name in (more, less))
    _, signal = series_of(trials, "value_of_signal")
    _, noise = series_of(trials, "value_of_noise")
    lead = mean((signal - noise)[:, -1] * (1 if benign else -1)) if signal.size else mean([])
    (_, test), (_, train) = (_change_and_end(trials, name) for name in ("test_loss", "train_loss_then"))
    start = float(np.log(2))
    stays = "falls below 0.2" if benign else "stays at log 2 or above"
    tests = [test[0] < 0.2] if benign else [test[0] >= 0.95 * start]
    return [
        verdict(
            "attention", f"{interval(*up)} and {interval(*down)}",
            judge([ends(up)[0] > 0, ends(down)[1] < 0], [ends(up)[1] < 0 or ends(down)[0] > 0]), figure=figure,
            more=names[more], less=names[less],
        ),
        verdict(
            "value", f"{interval(*lead)} larger at the end", judge([ends(lead)[0] > 0], [ends(lead)[1] < 0]),
            figure=figure, more=names[more],
        ),
        verdict(
            "losses", f"training {interval(*train)}, test {interval(*test)}",
            judge([train[0] < 0.05, *tests], [train[0] >= 0.05 and not all(tests)]), figure=figure, stays=stays,
        ),
    ]  # fmt: skip


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
        rows.append({
            "strategy": name, **columns(boundary.constant, "N SNR^2"),
            **columns(shift, "over dense", "over dense low", "over dense high"), "runs": runs, "crossings": number,
            "below the map": below, "beyond the map": beyond,
            "reached": bool(boundary.reached_sizes) or not dense.reached_sizes,
            "trials": len(boundary.trials), "fitted": sum(map(is_fitted, boundary.trials)),
        })  # fmt: skip
        if name != "dense":
            verdicts.append(_moves(rows[-1]))
    panels: list[Panel] = [partial(_crossings, boundaries=boundaries), partial(_shifts, rows=rows)]
    tables = {"strategies": rows, "strategies-boundary": _crossing_rows(**boundaries)}
    return Result("Where benign overfitting begins as tokens are removed", tables, panels, verdicts)


def _moves(row: Mapping[str, Any]) -> Verdict:
    name, low, high = row["strategy"], row["over dense low"], row["over dense high"]
    claim = "removing noise tokens" if name.startswith("oracle") else "removing tokens"
    nowhere = row["crossings"] > 0 and not row["reached"]
    return verdict(
        "moves",
        f"N SNR^2 over dense's: {interval(row['over dense'], low, high)} in {row['runs']} runs; of {row['crossings']} "
        f"crossings {row['below the map']} below the map, {row['beyond the map']} beyond it; {row['fitted']} of "
        f"{row['trials']} trials fitted their training data",
        judge([(high or np.inf) < 1], [(low or 0) > 1 or nowhere]), claim=claim, name=name,
    )  # fmt: skip


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
