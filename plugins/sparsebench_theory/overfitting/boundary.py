"""Where benign overfitting begins: the curve N SNR^2 = c along which the test loss crosses a threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebench.paper import Trial
from sparsebench.stats.intervals import Interval
from sparsebench_theory.trials import crossing, group_by, line, mean


@dataclass(frozen=True)
class Boundary:
    """The boundary of one strategy.

    Attributes:
        trials: of all repetitions, N and signal strengths. One that diverged or never fitted has no loss.
    """

    trials: Sequence[Trial]

    @cached_property
    def snr(self) -> np.ndarray:
        """The signal-to-noise ratios, rising."""
        return np.array(sorted({t.task.snr for t in self.trials}))

    @cached_property
    def crossings(self) -> dict[int, dict[int, float]]:
        """The SNR of the crossing by repetition and N, where there is a trial at each SNR and it is known."""
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
        """The N at which the boundary is inside the map in every run: above the smallest SNR, too."""
        return {n for n in self.reached_sizes if all(row[n] > self.snr[0] for row in self.crossings.values())}

    @cached_property
    def reached_sizes(self) -> set[int]:
        """The N at which every run has a boundary in the map or below it; of others only the lucky runs would count."""
        sizes = {n for row in self.crossings.values() for n in row}
        return {n for n in sizes if all(np.isfinite(row.get(n, np.inf)) for row in self.crossings.values())}

    @property
    def constant(self) -> Interval:
        """c, the geometric mean over runs and the N inside, with its interval."""
        if not self.inside:
            return mean([])
        logs = [float(np.mean([np.log(n * row[n] ** 2) for n in self.inside])) for row in self.crossings.values()]
        return exponential(mean(logs))

    @property
    def ends(self) -> tuple[int, int, int]:
        """How many crossings are at the smallest SNR, or below it; beyond the largest; and there are."""
        every = [snr for row in self.crossings.values() for snr in row.values()]
        return sum(snr == self.snr[0] for snr in every), sum(not np.isfinite(snr) for snr in every), len(every)

    def shift(self, other: Boundary) -> tuple[Interval, int]:
        """Return c over the other's at the N that both reach, paired by run, with its interval; and how many runs.

        Below 1, fewer samples or a weaker signal suffice for benign overfitting. A boundary below the map counts as
        one at its smallest SNR, which makes the change smaller than it is.
        """
        sizes, runs = self.reached_sizes & other.reached_sizes, sorted(set(self.crossings) & set(other.crossings))
        if not sizes:
            return mean([]), 0
        logs = [float(np.mean([2 * np.log(self.crossings[r][n] / other.crossings[r][n]) for n in sizes])) for r in runs]
        return exponential(mean(logs)), len(logs)

    def slope(self) -> Interval:
        """Return the slope of log N over log SNR along the boundary at the N inside, with its interval over runs.

        Fitted as log SNR over log N, since N is what is known without error. Infinite, without an interval, if in any
        run the SNR is the same at each N.
        """
        sizes = sorted(self.inside)
        if len(sizes) < 3:
            return mean([])
        rows = [np.log([row[n] for n in sizes]) for row in self.crossings.values()]
        rates = [line(np.log(sizes), row)[0] for row in rows]
        return (float("-inf"), None, None) if min(map(abs, rates)) < 1e-9 else mean([1 / rate for rate in rates])


def exponential(logs: Interval) -> Interval:
    """Return an interval of logarithms as one of values."""
    value, low, high = logs
    return (
        float(np.exp(value)),
        None if low is None else float(np.exp(low)),
        None if high is None else float(np.exp(high)),
    )


def loss_of(trial: Trial) -> float:
    """Return the test loss where the training loss was first low; NaN where it never was."""
    if trial.diverged or not is_fitted(trial):
        return float("nan")
    loss = trial.values["test_loss"]
    return float("nan") if loss is None else loss


def is_fitted(trial: Trial) -> bool:
    """Say whether the training loss fell below what the task asks for."""
    return not trial.diverged and trial.values.get("fitted") == 1
