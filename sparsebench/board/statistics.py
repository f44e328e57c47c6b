"""Intervals over repetitions, and the sample complexity of a grid of trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def sample_complexity(
    trials: Mapping[int, Mapping[int, float]],
) -> tuple[float, float | None, float | None]:
    """Return N50 and its 95 % interval from trials[repetition][n] = success (0 or 1).

    The interval resamples repetitions, each with its successes at all sizes. Only repetitions that have every size
    count.
    """
    sizes = sorted({n for one in trials.values() for n in one})
    grid = np.array([[one[n] for n in sizes] for _, one in sorted(trials.items()) if len(one) == len(sizes)])
    if not len(grid):
        return float("nan"), None, None
    numbers = np.array(sizes)
    (value,) = half_success(numbers, grid.mean(axis=0, keepdims=True))
    if len(grid) < 2:
        return float(value), None, None
    drawn = np.random.default_rng(0).integers(0, len(grid), (RESAMPLES, len(grid)))
    resampled = half_success(numbers, grid[drawn].mean(axis=1))
    # inverted_cdf takes values that occurred, so that infinity is never interpolated.
    low, high = np.quantile(resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(value), float(low), float(high)
