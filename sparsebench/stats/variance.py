"""The variance of a mean difference in accuracy: the part from test items, and the overdispersion over seeds.

Test items come in clusters, such as items with the same foreground; without such information each item is a cluster.
Overdispersion is the variance over seeds divided by the variance that items explain. It cannot be estimated well from
few seeds, so it is pooled over a board's strategies: empirical Bayes on its logarithm, by moments (Smyth 2004, "Linear
models and empirical Bayes methods for assessing differential expression in microarray experiments", section 6.2).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import digamma, polygamma, stdtrit

from sparsebench.stats.intervals import LEVEL

EQUAL = 1e-12
"""Squared differences of two rows below this share of their squares are rounding; one item of a million is more."""
FEWEST = 4
"""The smallest number of overdispersions that are pooled; three strategies have only three pairs."""


def add_up(scores: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (C,) sorted unique cluster numbers of I items, and the (..., C) sums of (..., I) scores by cluster.

    Scores in single precision must be counts. The order of the items is cached, because all strategies of a seed have
    the same items.
    """
    names, order, starts = _in_order(numbers.tobytes(), numbers.dtype.str)
    scores = np.take(scores, order, axis=-1)
    if len(starts) < len(order):
        scores = np.add.reduceat(scores, starts, axis=-1)
    return names, scores.astype(float)


def clusters_of(numbers: np.ndarray) -> np.ndarray:
    """Return the (C,) sorted unique cluster numbers of I items."""
    return _in_order(numbers.tobytes(), numbers.dtype.str)[0]


@lru_cache(maxsize=2048)
def _in_order(content: bytes, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sorted unique numbers, the order that sorts all numbers, and the start of each in this order."""
    numbers = np.frombuffer(content, kind)
    order = np.argsort(numbers, kind="stable")
    values = numbers[order]
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    return values[starts], order, starts


def squared_differences(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the (a, b) sums of squared differences between the rows of (a, C) and (b, C) numbers, exact for counts.

    They are exactly 0 for equal rows, despite rounding.
    """
    squares = [(x * x).sum(axis=1, dtype=float) for x in (left, right)]
    sums = squares[0][:, None] + squares[1]
    result = sums - 2 * (left @ right.T).astype(float)
    return np.where(result > EQUAL * sums, result, 0.0)


def item_variance(left: np.ndarray, right: np.ndarray, sizes: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return the (a, b) variances of differences in accuracy on one test over samples of its C clusters.

    It is that of a ratio of totals, to first order (Cochran 1977, section 6.6), or of a mean if clusters have one item.

    Args:
        left, right: (a, C) and (b, C) numbers of correct items, or sums of scores, of each cluster.
        sizes: (C,) numbers of items.
        squares: (a, b) `squared_differences` of left and right.
    """
    C, I = len(sizes), float(sizes.sum())
    if C < 2:
        return np.full_like(squares, np.nan)
    means = (left.sum(axis=1, dtype=float)[:, None] - right.sum(axis=1, dtype=float)) / I
    moments = I * means if I == C else (left @ sizes)[:, None] - right @ sizes
    residuals = squares - means * (2 * moments - means * float(sizes @ sizes))
    return np.where(squares > 0, np.maximum(0.0, residuals), 0.0) * (C / ((C - 1) * I**2))


def item_parts(separate: np.ndarray, joint: np.ndarray, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the variance that items explain of a mean over S seeds: the interaction with seeds, and the main effect.

    Items and seeds are crossed random effects (Searle, Casella and McCulloch 1992, chapter 4). The main effect does not
    decrease with more seeds; it is 0 if no two seeds share a cluster. NaN for a single seed.

    Args:
        separate: the variance of the mean from items if no two seeds shared a cluster.
        joint: the variance from the clusters as they are: a cluster is sampled together in all seeds.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        interaction = np.maximum(0.0, (S * separate - joint) / (S - 1.0))
    return interaction, np.maximum(0.0, joint - interaction)


def satterthwaite(*parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of variances and its degrees of freedom (Satterthwaite 1946); parts are pairs of both."""
    total = np.asarray(sum(variance for variance, _ in parts))
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = total**2 / sum(variance**2 / freedom for variance, freedom in parts)
    return total, np.where(total > 0, freedom, parts[0][1])


def optional(variance: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a part of a variance for `satterthwaite`, with 0 instead of NaN."""
    return np.nan_to_num(variance), np.where(np.isnan(variance), 1.0, freedom)


def student_half(variance: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Return half the width of Student's 95 % interval of a mean."""
    return np.asarray(stdtrit(freedom, 0.5 + LEVEL / 2) * np.sqrt(variance))


def inverse_trigamma(value: float) -> float:
    """Return the inverse of the trigamma function for a positive value, by Newton's method (Smyth 2004, appendix)."""
    x = 0.5 + 1 / value
    for _ in range(50):
        trigamma = float(polygamma(1, x))
        step = trigamma * (1 - trigamma / value) / float(polygamma(2, x))
        x += step
        if abs(step) < 1e-10 * x:
            break
    return x


def prior(ratios: np.ndarray, freedom: np.ndarray) -> tuple[float, float]:
    """Return the centre and the degrees of freedom d0 of the prior of (n,) overdispersions.

    In the prior, the centre divided by an overdispersion is distributed as chi-square / d0. d0 is infinite if the
    ratios vary no more than equal overdispersions with (n,) degrees of freedom would.
    """
    logs = np.log(ratios) - digamma(freedom / 2) + np.log(freedom / 2)
    excess = float(logs.var(ddof=1) - polygamma(1, freedom / 2).mean())
    if excess <= 0:
        return float(np.exp(logs.mean())), np.inf
    half = inverse_trigamma(excess)
    return float(np.exp(logs.mean() + digamma(half) - np.log(half))), 2 * half


def shrink(ratios: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) overdispersions shrunk towards their prior, and their degrees of freedom.

    None is below 1, because the variance is at least that from items, and none is below the ratio from its own seeds.
    NaN for ratios that are NaN, and for all if there are fewer than FEWEST.
    """
    factors, more = np.full((2, len(ratios)), np.nan)
    mask = ratios > 0
    if mask.sum() < FEWEST:
        return factors, more
    x, d = ratios[mask], freedom[mask]
    centre, d0 = prior(x, d)
    share = 1.0 if np.isinf(d0) else d0 / (d0 + d)
    factors[mask] = np.maximum(np.maximum(1.0, x), share * max(1.0, centre) + (1 - share) * x)
    more[mask] = d0 + d
    return factors, more


def overdispersion(
    between: np.ndarray, items: np.ndarray, seeds: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (R, R) overdispersions of pairs, at least 1, and their degrees of freedom; NaN if unknown.

    They are shrunk towards the board's twice, by pair and by strategy. The larger value and the smaller degrees of
    freedom are used; the latter are at most those of the seeds of all strategies.

    Args:
        between: (R, R) variances of the mean difference, estimated from seeds.
        items: (R, R) parts of these variances that items explain.
        seeds: (R, R) numbers of common seeds.
        sizes: (R, R) numbers I of test items of a seed. Accuracies are rounded to 1/I, so variances are at least those
            of rounding. Otherwise the logarithm of a variance that is 0 by chance would outweigh all others.
    """
    is_known = np.isfinite(between) & (items > 0)
    d = seeds - 1.0
    rounding = 1 / (12 * np.maximum(seeds, 1) * sizes**2)
    between = np.where(is_known, np.maximum(between, rounding), between)
    factors, freedom = _by_pair(between, items, d, is_known)

    rows = np.flatnonzero(is_known.any(axis=0))
    if len(rows) >= FEWEST:
        block = np.ix_(rows, rows)
        of_one_seed = between[block] * seeds[block], items[block] * seeds[block]
        factors_of_strategies, freedom_of_strategies = by_strategy(*of_one_seed, d[block])
        factors[block] = np.fmax(factors[block], factors_of_strategies)
        freedom[block] = np.fmin(freedom[block], freedom_of_strategies)
        freedom[block] = np.fmin(freedom[block], (len(rows) - 1) * d[block])
    return np.where(is_known, factors, np.nan), np.where(is_known, freedom, np.nan)


def _by_pair(
    between: np.ndarray, items: np.ndarray, d: np.ndarray, is_known: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return (R, R) overdispersions, shrunk towards those of all pairs, and their degrees of freedom.

    Args:
        between, items: see `overdispersion`.
        d: (R, R) numbers of seeds minus one.
        is_known: (R, R) whether both variances are known.
    """
    ratios = np.full(items.shape, np.nan)
    ratios[is_known] = between[is_known] / items[is_known]
    factors = np.full(items.shape, np.nan)
    freedom = np.full(items.shape, np.nan)
    upper = np.triu_indices(len(items), 1)
    factors[upper], freedom[upper] = shrink(ratios[upper], d[upper])
    factors.T[upper] = factors[upper]
    freedom.T[upper] = freedom[upper]
    return factors, freedom


def by_strategy(between: np.ndarray, items: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (R, R) overdispersions of pairs from those of both strategies, weighted by what items explain.

    Args:
        between, items: (R, R) variances of one seed's differences, 0 on the diagonal; NaN if unknown.
        freedom: (R, R) numbers of seeds minus one.
    """
    mask = np.isfinite(between) & np.isfinite(items)
    rows = np.nanmean(np.where(mask, [between, items], np.nan), axis=2)
    b, w = rows - rows.mean(axis=1, keepdims=True) / 2  # variances about the mean of all, from those of differences
    w[w <= 0] = np.nan
    factors, d = shrink(b / w, np.nanmean(np.where(mask, freedom, np.nan), axis=1))
    parts = factors * w
    total, more = satterthwaite((parts[:, None], d[:, None]), (parts[None], d[None]))
    return total / (w[:, None] + w), more
