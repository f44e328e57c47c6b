"""Intervals over repetitions, and the sample complexity of a grid of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
BELOW = 0.0
"""Stands for a number of training images below the smallest one tried; infinity stands for one above the largest."""


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean and its 95 % Student t interval over repetitions; a single repetition has no interval.

    >>> [round(value, 3) for value in mean_interval([0.90, 0.92, 0.94])]
    [0.92, 0.87, 0.97]
    >>> mean_interval([0.9])
    (0.9, None, None)
    """
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, None, None
    from scipy.special import stdtrit

    half = float(stdtrit(len(x) - 1, 0.5 + LEVEL / 2) * x.std(ddof=1) / np.sqrt(len(x)))
    return mean, mean - half, mean + half


def wilson(rates: np.ndarray, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the Wilson 95 % intervals of success rates of n trials; n need not be an integer.

    scipy's function takes only integers, and its import takes longer than making a board.

    >>> low, high = wilson(np.array([0.9]), np.array([100]))
    >>> low.round(3), high.round(3)
    (array([0.826]), array([0.945]))
    """
    from scipy.special import ndtri

    z2 = float(ndtri(0.5 + LEVEL / 2)) ** 2
    middle = (rates + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * (rates * (1 - rates) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # If all or none succeed, one end is exactly 1 or 0, without rounding errors.
    return np.where(rates == 0, 0.0, middle - half), np.where(rates == 1, 1.0, middle + half)


def half_success(sizes: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Return N50 for each row of success rates (rows, len(sizes)) at increasing sample sizes.

    N50 is where the rate crosses 1/2 for the last time, interpolated linearly in log N; infinity ("not reached") if
    the rate is below 1/2 at the largest size, and the smallest size if it is never below.
    """
    below = rates < 0.5
    last = np.where(below.any(axis=1), rates.shape[1] - 1 - below[:, ::-1].argmax(axis=1), -1)
    out = np.full(len(rates), float(sizes[0]))
    out[last == len(sizes) - 1] = np.inf
    inside = np.flatnonzero((last >= 0) & (last < len(sizes) - 1))
    k = last[inside]
    low = rates[inside, k]
    high = rates[inside, k + 1]
    logs = np.log(sizes.astype(float))
    out[inside] = np.exp(logs[k] + (0.5 - low) / (high - low) * (logs[k + 1] - logs[k]))
    return out


@dataclass(frozen=True)
class Successes:
    """Successes of trials by repetition and number of training samples.

    Attributes:
        sizes: (k,) increasing numbers of training samples, those of more than half of the repetitions.
        seeds: (r,) the complete repetitions, which have all these sizes.
        wins: (r, k) their successes, 0 or 1.
    """

    sizes: np.ndarray
    seeds: np.ndarray
    wins: np.ndarray

    @classmethod
    def of(cls, repetitions: np.ndarray, sizes: np.ndarray, successes: np.ndarray) -> Successes:
        """Return the grid of n trials from (n,) arrays; trials with success NaN are left out."""
        mask = ~np.isnan(successes)
        seeds, row = np.unique(repetitions[mask], return_inverse=True)
        levels, column = np.unique(sizes[mask], return_inverse=True)
        table = np.full((len(seeds), len(levels)), np.nan)
        table[row, column] = successes[mask]
        kept = 2 * (~np.isnan(table)).sum(axis=0) > len(seeds)
        whole = kept.any() & ~np.isnan(table[:, kept]).any(axis=1)
        return cls(levels[kept], seeds[whole], table[np.ix_(whole, kept)])

    @classmethod
    def of_nested(cls, trials: Mapping[int, Mapping[int, float]]) -> Successes:
        """Return the grid of trials, a mapping from repetition and number of samples to success."""
        flat = [(seed, n, success) for seed, row in trials.items() for n, success in row.items()]
        seeds, sizes, successes = zip(*flat, strict=True) if flat else ((), (), ())
        return cls.of(np.array(seeds, dtype=int), np.array(sizes, dtype=int), np.array(successes, dtype=float))

    @property
    def n50(self) -> float:
        """N50, see `half_success`; NaN without a complete repetition."""
        return float(half_success(self.sizes, self.wins.mean(axis=0)[None])[0]) if self.wins.size else float("nan")

    def among(self, seeds: np.ndarray) -> Successes:
        """Return the grid of some of its repetitions; `seeds` are sorted."""
        return Successes(self.sizes, seeds, self.wins[np.searchsorted(self.seeds, seeds)])

    @cached_property
    def resamples(self) -> np.ndarray:
        """(RESAMPLES,) bootstrap values of N50, NaN for fewer than two repetitions; see `bootstrap_means`."""
        if len(self.seeds) < 2:
            return np.full(RESAMPLES, np.nan)
        return half_success(self.sizes, bootstrap_means(self.wins))  # sums of zeros and ones are exact


Interval = tuple[float, float | None, float | None]
"""A value and the ends of its 95 % interval, or None."""


def sample_complexity(grid: Successes) -> Interval:
    """Return N50 and its 95 % interval.

    The interval is from a percentile bootstrap over repetitions, each with its successes at all sizes, expanded for few
    repetitions (Hesterberg 2015). Infinity, "not reached", counts as the largest value.
    """
    if len(grid.seeds) < 2:
        return grid.n50, None, None
    return grid.n50, *percentiles(grid.resamples, len(grid.seeds))


def n50_ratio(grid: Successes, other: Successes) -> Interval:
    """Return the ratio of two N50 and its 95 % interval, over the common repetitions, which are resampled together.

    The ratio is infinite if only `other` reaches N50, 0 if only `grid` does, and 1 if neither does, as they do not
    differ. NaN without a common complete repetition.
    """
    seeds = np.intersect1d(grid.seeds, other.seeds)
    if not seeds.size:
        return float("nan"), None, None
    grid, other = grid.among(seeds), other.among(seeds)
    value = float(_ratio(np.array([grid.n50]), np.array([other.n50]))[0])
    if len(seeds) < 2:
        return value, None, None
    return value, *percentiles(_ratio(grid.resamples, other.resamples), len(seeds))


def _ratio(n50: np.ndarray, other: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(n50) & np.isinf(other), 1.0, n50 / other)


def percentiles(resamples: np.ndarray, n: int) -> tuple[float, float]:
    """Return the 95 % interval of bootstrap values from n repetitions, without NaNs.

    The percentiles are those that the mean of n normal numbers needs; they are wider than 2.5 and 97.5. NaN for fewer
    than two repetitions, or without values.
    """
    from scipy.special import ndtr, stdtrit

    values = resamples[~np.isnan(resamples)]
    if n < 2 or not values.size:
        return float("nan"), float("nan")
    tail = float(ndtr(-stdtrit(n - 1, 0.5 + LEVEL / 2) * np.sqrt(n / (n - 1))))
    # inverted_cdf returns one of the values, so infinity is never interpolated.
    low, high = np.quantile(values, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


def bootstrap_means(values: np.ndarray, stream: int = 0) -> np.ndarray:
    """Return the (RESAMPLES, ...) bootstrap means of (n, ...) values; NaN for n < 2, which has no interval.

    Draws for the same n and stream are the same; those of different streams are independent.
    """
    n = len(values)
    return draws(n, RESAMPLES, stream) @ values / n if n > 1 else np.full((RESAMPLES, *values.shape[1:]), np.nan)


@lru_cache(maxsize=4)
def draws(n: int, times: int, stream: int = 0) -> np.ndarray:
    """Return the (times, n) counts of n items in bootstrap samples of size n."""
    rng = np.random.default_rng(stream)
    return np.stack([np.bincount(rng.integers(0, n, n), minlength=n) for _ in range(times)]).astype(float)
