"""Agreement of orders: the rank correlation of two boards, and the share of votes that agree."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np

from sparsebench.stats.curves import common_seeds, resample
from sparsebench.stats.intervals import LEVEL, RESAMPLES, Interval, draws
from sparsebench.stats.paired import Results

FEWEST = 5
"""Fewer strategies have no interval."""
FIRST, SECOND, STRATEGIES = 0, 1, 100
"""Streams of random numbers."""
PARTS = 5
"""Test items are drawn in as many parts, as numbers of draws of all items need memory."""


def spearman(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the (B,) rank correlations of (B, R) values; equal values share a mean rank. NaN if one does not vary."""
    from scipy.stats import rankdata

    ranks = [rankdata(values, axis=1) for values in (first, second)]
    x, y = (of_values - of_values.mean(axis=1, keepdims=True) for of_values in ranks)
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    with np.errstate(invalid="ignore"):
        return np.asarray((x * y).sum(axis=1) / np.where(scale > 0, scale, np.nan))


def rank_correlation(first: Sequence[Results], second: Sequence[Results], same_networks: bool = False) -> Interval:
    """Return Spearman's correlation of the mean accuracies of R strategies on two boards, with its 95 % interval.

    The interval is from a percentile bootstrap: strategies are drawn again, and the networks of each board, or the test
    items of a board of one network. None for fewer than FEWEST strategies. NaN if accuracies do not vary.

    Args:
        first, second: the results of the strategies on each board, in the same order; those of a board share a seed.
        same_networks: whether both boards have the same networks, which are then drawn once.
    """
    value = correlation_of_means(first, second)
    R = len(first)
    if R < FEWEST or math.isnan(value):
        return value, None, None
    of_boards = _drawn_means(first, FIRST), _drawn_means(second, FIRST if same_networks else SECOND)
    strategies = np.random.default_rng(STRATEGIES).integers(0, R, (RESAMPLES, R))
    samples = spearman(*(np.take_along_axis(drawn, strategies, axis=1) for drawn in of_boards))
    low, high = np.quantile(samples[~np.isnan(samples)], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return value, float(low), float(high)


def correlation_of_means(first: Sequence[Results], second: Sequence[Results]) -> float:
    """Return Spearman's correlation of the mean accuracies of strategies on two boards, see `rank_correlation`."""
    means = [np.array([_mean(result, common_seeds(board)) for result in board]) for board in (first, second)]
    return float(spearman(means[0][None], means[1][None])[0])


def _mean(result: Results, seeds: Sequence[int]) -> float:
    return float(np.mean([result.means[seed] for seed in seeds]))


def _drawn_means(results: Sequence[Results], stream: int) -> np.ndarray:
    """Return (RESAMPLES, R) means of strategies over networks that are drawn again; over items if there is only one."""
    seeds = common_seeds(results)
    means = np.array([[result.means[seed] for result in results] for seed in seeds])
    if len(seeds) > 1:
        return draws(len(seeds), RESAMPLES, stream) @ means / len(seeds)
    parts = [resample(results, seeds, means, RESAMPLES // PARTS, PARTS * stream + part) for part in range(PARTS)]
    return np.concatenate(parts)[:, 0]


def share_interval(agrees: Sequence[bool], sources: Sequence[Hashable]) -> Interval:
    """Return the share of votes that agree, with its 95 % interval; votes of one source are not independent.

    The interval is Clopper and Pearson's, with an effective number of votes from the variance of the share over
    sources (Korn and Graubard 1998, "Confidence intervals for proportions with small expected number of positive counts
    estimated from survey data"). Student's t has the degrees of freedom of Kish's number of sources, n^2 / sum n_c^2,
    as sources have unequal numbers of votes. It is also the number of votes if all agree, or none does. There is no
    interval for a single source.
    """
    from scipy.special import betaincinv, stdtrit

    n = len(agrees)
    share = float(np.mean(agrees))
    sizes = Counter(sources)
    residuals: dict[Hashable, float] = defaultdict(float)
    for vote, source in zip(agrees, sources, strict=True):
        residuals[source] += (vote - share) / n
    C = len(sizes)
    if C < 2:
        return share, None, None

    n_sources = n**2 / sum(size**2 for size in sizes.values())
    effective = n_sources
    variance = C / (C - 1) * sum(residual**2 for residual in residuals.values())
    if 0 < share < 1:
        t = stdtrit(np.array([n - 1, n_sources - 1]), (1 + LEVEL) / 2)
        independent = share * (1 - share) / variance if variance > 0 else math.inf
        effective = min(float(n), independent * float(t[0] / t[1]) ** 2)
    wins = share * effective
    losses = (1 - share) * effective
    low = float(betaincinv(wins, losses + 1, (1 - LEVEL) / 2)) if wins > 0 else 0.0
    high = float(betaincinv(wins + 1, losses, (1 + LEVEL) / 2)) if losses > 0 else 1.0
    return share, low, high
