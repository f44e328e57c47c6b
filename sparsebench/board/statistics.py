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

    The interval resamples complete repetitions, each with its successes at all sizes (percentile bootstrap, expanded
    for few repetitions, Hesterberg 2015). "Not reached" is a value like others, the largest.
    """
    grid = np.array(list(complete(trials).values()))
    if not grid.size:
        return float("nan"), None, None
    numbers = np.array(common_sizes(trials))
    value = _n50(numbers, grid)
    if len(grid) < 2:
        return value, None, None
    return value, *_percentiles(_resampled(numbers, grid), len(grid))


def n50_ratio(
    trials: Mapping[int, Mapping[int, float]], other: Mapping[int, Mapping[int, float]]
) -> tuple[float, float | None, float | None]:
    """Return the ratio of two N50 and its 95 % interval, of the repetitions that both have, resampled together.

    It is infinite where only the other is reached and 0 where only the first is; where neither is it is 1: nothing
    tells them apart. NaN where they share no complete repetition.
    """
    own, others = complete(trials), complete(other)
    shared = sorted(set(own) & set(others))
    if not shared:
        return float("nan"), None, None
    sides = ((trials, own), (other, others))
    pair = [(np.array(common_sizes(one)), np.array([rows[seed] for seed in shared])) for one, rows in sides]
    value = float(_ratio(*(np.array([_n50(*one)]) for one in pair))[0])
    if len(shared) < 2:
        return value, None, None
    return value, *_percentiles(_ratio(*(_resampled(*one) for one in pair)), len(shared))


def _ratio(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(own) & np.isinf(other), 1.0, own / other)


def _resampled(sizes: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Return (RESAMPLES,) N50 of resampled rows of the (repetitions, sizes) grid; equal lengths have equal draws."""
    return half_success(sizes, _drawn(len(grid)) @ grid / len(grid))  # sums of zeros and ones are exact


def _percentiles(resampled: np.ndarray, n: int) -> tuple[float, float]:
    """Return the 95 % interval of resampled values from n repetitions.

    The percentiles are those that the mean of n normal numbers would need, which lie farther out than 2.5 and 97.5.
    """
    from scipy.special import ndtr, stdtrit

    tail = float(ndtr(-stdtrit(n - 1, 0.5 + LEVEL / 2) * np.sqrt(n / (n - 1))))
    # inverted_cdf takes values that occurred, so that infinity is never interpolated.
    low, high = np.quantile(resampled, [tail, 1 - tail], method="inverted_cdf")
    return float(low), float(high)


@lru_cache(maxsize=4)
def _drawn(n: int) -> np.ndarray:
    """Return how often each of n repetitions is in each resample, (RESAMPLES, n)."""
    drawn = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    rows = n * np.arange(RESAMPLES)[:, None]
    return np.bincount((rows + drawn).ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n).astype(float)
