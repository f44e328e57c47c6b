"""Statistics of trials by condition: success grids, N50, and competing fits of their growth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from sparsebench.paper import Trial, interval
from sparsebench.stats.intervals import Interval, Successes, mean_interval, percentiles, sample_complexity

K = TypeVar(
    "K", str, float, bool, tuple[int, int], tuple[int, float], tuple[str, int], tuple[str, str, float],
    tuple[float, float, float],
)  # fmt: skip


def group_by(trials: Iterable[Trial], key: Callable[[Trial], K]) -> dict[K, list[Trial]]:
    """Return the trials grouped by a key, sorted by it."""
    groups: dict[K, list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[key(trial)].append(trial)
    return dict(sorted(groups.items()))


@dataclass(frozen=True)
class Grid:
    """Successes of the trials of one condition, by repetition and number of training samples."""

    trials: Mapping[int, Mapping[int, float]]

    @classmethod
    def of(cls, trials: Iterable[Trial]) -> Grid:
        """Collect the trials of one condition."""
        grid: dict[int, dict[int, float]] = defaultdict(dict)
        for trial in trials:
            grid[trial.repetition][trial.n] = trial.success
        return cls(grid)

    @cached_property
    def successes(self) -> Successes:
        """The successes of the complete repetitions."""
        return Successes.of_nested(self.trials)

    @property
    def sizes(self) -> np.ndarray:
        """The numbers of training samples N, in ascending order."""
        return self.successes.sizes

    @property
    def wins(self) -> np.ndarray:
        """(repetitions, sizes), 0 or 1."""
        return self.successes.wins

    @property
    def rates(self) -> np.ndarray:
        """(sizes,) success rates; NaN without a complete repetition."""
        return self.wins.mean(axis=0) if len(self.wins) else np.full(len(self.sizes), np.nan)

    @cached_property
    def n50(self) -> Interval:
        """The number of samples with which half of the trials succeed, with its interval.

        Infinite if no N is enough, NaN without a complete repetition.
        """
        return sample_complexity(self.successes)

    @property
    def n95(self) -> float:
        """The smallest N from which on at least 95 % of the trials succeed; infinite or NaN as `n50`."""
        if not len(self.wins):
            return float("nan")
        below = np.flatnonzero(self.rates < 0.95)
        first = 0 if below.size == 0 else int(below[-1]) + 1
        return float(self.sizes[first]) if first < len(self.sizes) else float("inf")

    @property
    def ends(self) -> tuple[float, float]:
        """The smallest and the largest N; NaN without a complete repetition."""
        return (float(self.sizes[0]), float(self.sizes[-1])) if len(self.wins) else (float("nan"), float("nan"))

    @property
    def row(self) -> dict[str, float | None]:
        """The number of repetitions, and N50, as columns of a table."""
        return {"trials": len(self.wins), **columns(self.n50, "N50", "N50_low", "N50_high")}

    def success_rows(self) -> list[dict[str, int]]:
        """Return a row with the number of successes for each N."""
        won = zip(self.sizes, self.wins.sum(axis=0), strict=True)
        return [{"N": int(n), "trials": len(self.wins), "successes": int(wins)} for n, wins in won]

    def within(self, bottom: float, top: float) -> bool:
        """Return whether the interval of N50 lies above `bottom` and not above `top`."""
        _, low, high = self.n50
        return low is not None and high is not None and bottom < low and high <= top


def resamples_of(grids: Iterable[Grid]) -> tuple[np.ndarray, list[int]]:
    """Return (P, RESAMPLES) resampled N50 of P grids, and their numbers of repetitions; see `Successes.resamples`."""
    successes = [grid.successes for grid in grids]
    return np.array([trials.resamples for trials in successes]), [len(trials.seeds) for trials in successes]


ENOUGH = 4
"""Number of points needed to judge whether a line fits; through three points most curves look linear."""
DIGITS = 9
"""Digits to which slopes are rounded; later digits are not 0 even if rises and falls cancel."""


@dataclass(frozen=True)
class Fit:
    """How well y is a line in x, and the exponent p of y ~ x^p with its interval.

    Attributes:
        points: number of values of x.
        range: the largest x over the smallest.
    """

    name: str
    r2: float
    exponent: float
    low: float
    high: float
    points: int
    range: float

    @property
    def rises(self) -> bool:
        """Whether the exponent's interval lies above 0."""
        return self.low > 0

    @property
    def flat(self) -> bool:
        """Whether y neither rises nor doubles over the range of x, even at the interval's upper end."""
        return not self.rises and self.high * np.log(self.range) < np.log(2)

    @property
    def text(self) -> str:
        """A phrase for the table of verdicts."""
        return f"{self.name}: R2 {self.r2:.3f}, exponent {interval(self.exponent, self.low, self.high)}"


def compete(
    candidates: Mapping[str, np.ndarray], y: np.ndarray, resamples: np.ndarray, repetitions: Sequence[int]
) -> list[Fit]:
    """Return the fit of each candidate, best R2 first.

    Args:
        candidates: (P,) values of x by name.
        y: (P,) measured values; values that are not finite are left out.
        resamples: (P, R) values from resampled trials.
        repetitions: (P,) number of repetitions that were resampled; the smallest determines the width of intervals.
    """
    finite = np.isfinite(y)
    if finite.sum() < 3:
        return []
    n = min((count for count, is_finite in zip(repetitions, finite, strict=True) if is_finite and count > 1), default=0)
    fits = []
    for name, values in candidates.items():
        x = values[finite]
        exponent = float(exponents(np.log(x), y[finite, None])[0])
        low, high = percentiles(exponents(np.log(x), resamples[finite]), n)
        fits.append(Fit(name, line(x, y[finite])[2], exponent, low, high, len(x), float(x.max() / x.min())))
    return sorted(fits, key=lambda fit: -fit.r2)


def differences(first: Sequence[Trial], other: Sequence[Trial], metric: str) -> list[float]:
    """Return the differences of a metric by repetition, `first` minus `other`."""
    ours, others = ({t.repetition: t.values[metric] for t in part if not t.diverged} for part in (first, other))
    repetitions = sorted(set(ours) & set(others))
    return [a - b for a, b in ((ours[r], others[r]) for r in repetitions) if a is not None and b is not None]


def values_of(trials: Iterable[Trial], metric: str) -> list[float]:
    """Return a metric of the trials that did not diverge and have a value, in order of repetition."""
    values = (t.values[metric] for t in sorted(trials, key=lambda t: t.repetition) if not t.diverged)
    return [value for value in values if value is not None]


def errors_of(trials: Iterable[Trial]) -> list[float]:
    """Return the test errors of the trials that did not diverge."""
    return [1 - accuracy for accuracy in values_of(trials, "accuracy")]


def mean(values: Sequence[float] | np.ndarray) -> Interval:
    """Return the mean with its interval; NaN without values."""
    return mean_interval(list(values)) if len(values) else (float("nan"), None, None)


def ends(value: Interval) -> tuple[float, float]:
    """Return the ends of an interval; a missing end is infinite."""
    _, low, high = value
    return (-np.inf if low is None else low, np.inf if high is None else high)


def columns(value: Interval, name: str, low: str = "low", high: str = "high") -> dict[str, float | None]:
    """Return a value with its interval as columns of a table."""
    return dict(zip((name, low, high), value, strict=True))


def series_of(trials: Iterable[Trial], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (S,) and values (T, S) of a quantity watched in training, of the T trials that did not diverge.

    All trials were watched at the same steps.
    """
    good = [t for t in trials if not t.diverged]
    if not good:
        return np.arange(0), np.empty((0, 0))
    return np.array(good[0].curves["watched_steps"]), np.array([t.curves[f"watched_{name}"] for t in good])


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return slope, intercept and R2 of the least-squares line; R2 is 0 if y is constant."""
    slope, intercept = np.polyfit(x, y, 1)
    residuals, spread = ((y - slope * x - intercept) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    varies = spread > 1e-12 * (y**2).sum()
    return float(slope), float(intercept), float(1 - residuals / spread) if varies else 0.0


def exponents(log_x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (R,) slopes of log y on log x over the finite values of y (P, R); NaN with fewer than two."""
    valid = np.isfinite(y)
    weights = valid / np.maximum(valid.sum(axis=0), 1)
    log_y = np.log(np.where(valid, y, 1.0))
    dx = log_x[:, None] - (weights * log_x[:, None]).sum(axis=0)
    dy = log_y - np.take_along_axis(
        log_y, valid.argmax(axis=0)[None], axis=0
    )  # exactly 0 for constant y, unlike differences from the mean
    spread = (weights * dx**2).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        slopes = np.where(valid.sum(axis=0) >= 2, (weights * dx * dy).sum(axis=0) / spread, np.nan)
    return np.round(slopes, DIGITS)


def slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (R,) least-squares slopes of the columns of y (P, R) on x (P,)."""
    dx, dy = x - x.mean(), y - y[0]  # exactly 0 for constant y, unlike differences from the mean
    return np.round((dx[:, None] * dy).sum(axis=0) / (dx**2).sum(), DIGITS)


def crossing(x: np.ndarray, y: np.ndarray, threshold: float) -> float:
    """Return the x from which on y is below the threshold, interpolated in logarithms; `x` is in ascending order.

    Return the smallest x if y is always below, infinity if it is not below at the largest x, and NaN if the last y that
    is not below is NaN.
    """
    above = np.flatnonzero(~(y < threshold))
    if not len(above):
        return float(x[0])
    last = above[-1]
    if np.isnan(y[last]):
        return float("nan")
    if last + 1 == len(x):
        return float("inf")
    with np.errstate(divide="ignore"):  # y may be 0
        log_x, log_y = np.log(x[last : last + 2]), np.log(y[last : last + 2])
    share = (log_y[0] - np.log(threshold)) / (log_y[0] - log_y[1])
    return float(np.exp(log_x[0] + share * (log_x[1] - log_x[0])))
