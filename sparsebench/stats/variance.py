"""The variance of a mean difference in accuracy: what its test items explain, and how much more its seeds differ.

Test items come in clusters, such as those that show the same foreground; where nothing is known of that each item is a
cluster. Overdispersion is the variance over seeds as a multiple of what the items explain of it. Few seeds say little
of it, so the strategies of a board help each other: empirical Bayes on its logarithm, by moments (Smyth 2004, "Linear
models and empirical Bayes methods for assessing differential expression in microarray experiments", section 6.2).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy.special import digamma, polygamma, stdtrit

from sparsebench.stats.intervals import LEVEL

EQUAL = 1e-12
"""The share of two rows' squares below which their difference is rounding; one item of a million is more."""
FEWEST = 4
"""Overdispersions below which there is nothing to pool; three strategies have three pairs."""


def add_up(scores: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (C,) different numbers of clusters of I items, rising, and (..., I) scores added up by them, (..., C).

    The scores are numbers, single precision only for counts. All strategies of a seed were tested on the same items, so
    what order those are in is found out once.
    """
    names, order, starts = _in_order(numbers.tobytes(), numbers.dtype.str)
    scores = np.take(scores, order, axis=-1)
    if len(starts) < len(order):
        scores = np.add.reduceat(scores, starts, axis=-1)
    return names, scores.astype(float)


def clusters_of(numbers: np.ndarray) -> np.ndarray:
    """Return the (C,) different numbers of clusters of I items, rising."""
    return _in_order(numbers.tobytes(), numbers.dtype.str)[0]


@lru_cache(maxsize=2048)
def _in_order(content: bytes, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the different ones of some numbers, rising, the order that sorts them, and where each begins there."""
    numbers = np.frombuffer(content, kind)
    order = np.argsort(numbers, kind="stable")
    values = numbers[order]
    starts = np.flatnonzero(np.r_[True, values[1:] != values[:-1]])
    return values[starts], order, starts


def squared_differences(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return (a, b) sums of squared differences between the rows of (a, C) and (b, C) numbers, of counts exactly.

    Those of equal rows are 0, which rounding would otherwise hide where they are no counts.
    """
    squares = [(x * x).sum(axis=1, dtype=float) for x in (left, right)]
    sums = squares[0][:, None] + squares[1]
    result = sums - 2 * (left @ right.T).astype(float)
    return np.where(result > EQUAL * sums, result, 0.0)


def item_variance(left: np.ndarray, right: np.ndarray, sizes: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Return (a, b) variances of differences in accuracy on one test, were its C clusters drawn again.

    That of a ratio of totals, to first order (Cochran 1977, section 6.6); with clusters of one item that of a mean.

    Args:
        left, right: (a, C) and (b, C) how many items of each cluster are right, or what they score together.
        sizes: (C,) how many there are.
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
    """Return what items explain of a mean over S seeds: their part that differs by seed, and their main effect.

    Items and seeds are crossed random effects (Searle, Casella and McCulloch 1992, chapter 4). The main effect does not
    shrink with more seeds; it is 0 where no two seeds share a cluster. NaN of a single seed.

    Args:
        separate: the variance that items give the mean if no two seeds shared any.
        joint: the same with the clusters as they are, each drawn again with what it is in all seeds.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        interaction = np.maximum(0.0, (S * separate - joint) / (S - 1.0))
    return interaction, np.maximum(0.0, joint - interaction)


def satterthwaite(*parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of variances and its degrees of freedom (Satterthwaite 1946), from those of each part."""
    total = np.asarray(sum(variance for variance, _ in parts))
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = total**2 / sum(variance**2 / freedom for variance, freedom in parts)
    return total, np.where(total > 0, freedom, parts[0][1])


def optional(variance: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a part of a variance, as none where it is NaN."""
    return np.nan_to_num(variance), np.where(np.isnan(variance), 1.0, freedom)


def student_half(variance: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Return half the width of the 95 % interval of a mean, Student's."""
    return np.asarray(stdtrit(freedom, 0.5 + LEVEL / 2) * np.sqrt(variance))


def inverse_trigamma(value: float) -> float:
    """Return where the trigamma function has this positive value, by Newton's method (Smyth 2004, appendix)."""
    x = 0.5 + 1 / value
    for _ in range(50):
        now = float(polygamma(1, x))
        step = now * (1 - now / value) / float(polygamma(2, x))
        x += step
        if abs(step) < 1e-10 * x:
            break
    return x


def prior(ratios: np.ndarray, freedom: np.ndarray) -> tuple[float, float]:
    """Return centre and degrees of freedom of the distribution that (n,) overdispersions come from.

    Centre over it is chi-square over its degrees of freedom; infinitely many where the ratios differ no more than equal
    ones would with (n,) degrees of freedom each.
    """
    logs = np.log(ratios) - digamma(freedom / 2) + np.log(freedom / 2)
    excess = float(logs.var(ddof=1) - polygamma(1, freedom / 2).mean())
    if excess <= 0:
        return float(np.exp(logs.mean())), np.inf
    half = inverse_trigamma(excess)
    return float(np.exp(logs.mean() + digamma(half) - np.log(half))), 2 * half


def shrink(ratios: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (n,) overdispersions pulled towards their prior, and their degrees of freedom; NaN where they are, or few.

    None is below 1, as networks on other items differ at least as items say, and none below what its own seeds show.
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
    """Return (R, R) overdispersions of pairs, none below 1, and degrees of freedom; NaN where they are not known.

    They are pulled towards the board's twice, pair by pair and strategy by strategy. The larger counts, with the fewer
    degrees of freedom, which are never more than the seeds of all strategies have.

    Args:
        between: (R, R) variance of the mean difference as its seeds show it.
        items: (R, R) what items explain of that.
        seeds: (R, R) how many both have.
        sizes: (R, R) test items I of a seed. Accuracies are rounded to 1/I, and no spread is less than rounding gives:
            the logarithm of one that is 0 by chance would outweigh all others.
    """
    mask, d = np.isfinite(between) & (items > 0), seeds - 1.0
    ratios, factors, freedom = np.full((3, *items.shape), np.nan)
    between = np.where(mask, np.maximum(between, 1 / (12 * np.maximum(seeds, 1) * sizes**2)), between)
    ratios[mask] = between[mask] / items[mask]
    upper = np.triu_indices(len(items), 1)
    factors[upper], freedom[upper] = shrink(ratios[upper], d[upper])
    factors.T[upper], freedom.T[upper] = factors[upper], freedom[upper]
    rows = np.flatnonzero(mask.any(axis=0))
    if len(rows) >= FEWEST:
        block = np.ix_(rows, rows)
        others, fewer = by_strategy(between[block] * seeds[block], items[block] * seeds[block], d[block])
        factors[block] = np.fmax(factors[block], others)
        freedom[block] = np.fmin(np.fmin(freedom[block], fewer), (len(rows) - 1) * d[block])
    return np.where(mask, factors, np.nan), np.where(mask, freedom, np.nan)


def by_strategy(between: np.ndarray, items: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (R, R) overdispersions of pairs from those of both strategies, as what items explain weights them.

    Args:
        between, items: (R, R) variances of one seed's differences, 0 on the diagonal; NaN where they are not known.
        freedom: (R, R) seeds less one.
    """
    mask = np.isfinite(between) & np.isfinite(items)
    rows = np.nanmean(np.where(mask, [between, items], np.nan), axis=2)
    b, w = rows - rows.mean(axis=1, keepdims=True) / 2  # about the mean of all, from those of differences
    w[w <= 0] = np.nan
    factors, d = shrink(b / w, np.nanmean(np.where(mask, freedom, np.nan), axis=1))
    parts = factors * w
    total, more = satterthwaite((parts[:, None], d[:, None]), (parts[None], d[None]))
    return total / (w[:, None] + w), more
