"""Intervals over repetitions, and the sample complexity of a grid of trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
NOT_REACHED = float("inf")


def mean_interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean and its 95 % Student t interval over repetitions; no interval from a single one."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return mean, None, None
    from scipy.special import stdtrit

    half = float(stdtrit(len(x) - 1, 0.5 + LEVEL / 2) * x.std(ddof=1) / np.sqrt(len(x)))
    return mean, mean - half, mean + half


def half_success(sizes: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Return N50 for each row of success rates (rows, len(sizes)) on rising sample sizes.

    N50 is where the rate crosses 1/2 for the last time, interpolated linearly in log N; infinity ("not reached") if
    the rate is below 1/2 at the largest size, and the smallest size if it is never below.
    """
    below = rates < 0.5
    last = np.where(below.any(axis=1), rates.shape[1] - 1 - below[:, ::-1].argmax(axis=1), -1)
    out = np.full(len(rates), float(sizes[0]))
    out[last == len(sizes) - 1] = NOT_REACHED
    inside = np.flatnonzero((last >= 0) & (last < len(sizes) - 1))
    k = last[inside]
    low, high = rates[inside, k], rates[inside, k + 1]
    logs = np.log(sizes.astype(float))
    out[inside] = np.exp(logs[k] + (0.5 - low) / (high - low) * (logs[k + 1] - logs[k]))
    return out


def complete(trials: Mapping[int, Mapping[int, float]]) -> dict[int, list[float]]:
    """Return the successes of each complete repetition, in the order of the sizes that most repetitions have."""
    sizes = common_sizes(trials)
    return {seed: [one[n] for n in sizes] for seed, one in sorted(trials.items()) if set(sizes) <= set(one)}


def common_sizes(trials: Mapping[int, Mapping[int, float]]) -> list[int]:
    """Return the sizes that more than half of the repetitions have."""
    counted = Counter(n for one in trials.values() for n in one)
    return sorted(n for n, times in counted.items() if 2 * times > len(trials))


def n50(trials: Mapping[int, Mapping[int, float]]) -> float:
    """Return N50 of trials[repetition][n] = success (0 or 1); NaN if there are no complete repetitions."""
    grid = np.array(list(complete(trials).values()))
    return _n50(np.array(common_sizes(trials)), grid) if grid.size else float("nan")


def _n50(sizes: np.ndarray, grid: np.ndarray) -> float:
    return float(half_success(sizes, grid.mean(axis=0, keepdims=True))[0])


def sample_complexity(
    trials: Mapping[int, Mapping[int, float]],
) -> tuple[float, float | None, float | None]:
    """Return N50 and its 95 % interval, see `n50`, from trials[repetition][n] = success (0 or 1).

    The interval resamples complete repetitions (percentile bootstrap), each with its successes at all sizes. From few
    repetitions it is too narrow: from 5 it covers the true N50 in about 4 of 5 cases.
    """
    grid = np.array(list(complete(trials).values()))
    if not grid.size:
        return float("nan"), None, None
    numbers = np.array(common_sizes(trials))
    value = _n50(numbers, grid)
    if len(grid) < 2:
        return value, None, None
    resampled = half_success(numbers, _drawn(len(grid)) @ grid / len(grid))  # sums of zeros and ones are exact
    # inverted_cdf takes values that occurred, so that infinity is never interpolated.
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return value, float(low), float(high)


@lru_cache(maxsize=4)
def _drawn(n: int) -> np.ndarray:
    """Return how often each of n repetitions is in each resample, (RESAMPLES, n)."""
    drawn = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    rows = n * np.arange(RESAMPLES)[:, None]
    return np.bincount((rows + drawn).ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(float)
