"""The spurious gap: how much accuracy is lost where the background does not fit the label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sparsebench.stats.intervals import Interval
from sparsebench.stats.paired import Contender
from sparsebench.stats.variance import half_width, student_half

TASKS = ("spurious", "waterbirds")
"""Those whose four test groups are numbered 2 class + background, which fit each other where they are the same."""
SIGNS = np.array([0.5, -0.5, -0.5, 0.5])
"""What each of these groups' accuracies counts in the gap."""
Groups = Mapping[int, np.ndarray]
"""Of each seed (I,) which group each test item is in."""


def aligned_gap(one: Contender, groups: Groups, lone: bool = False) -> Interval | None:
    """Return accuracy where the background fits less that where it does not, with its 95 % interval.

    Unlike the average less the worst group it is not above 0 where groups are alike. None where items are not known. A
    single seed has an interval, over its items, where it is `lone`: where all have no more.
    """
    seeds = sorted(set(one.hits) & set(groups))
    gap = _interval([one.hits[s][1] for s in seeds], seeds, one, groups, lone)
    if gap is None or gap[1] is None or gap[2] is None:
        return gap
    return gap[0], max(-1.0, gap[1]), min(1.0, gap[2])


def gap_reduction(one: Contender, dense: Contender, groups: Groups, lone: bool = False) -> Interval | None:
    """Return the gap of dense less that of another, seed by seed and item by item, with its 95 % interval.

    Of a single seed as in `aligned_gap`.
    """
    seeds = [s for s in sorted(set(one.hits) & set(groups) & set(dense.hits)) if one.hits[s][0] == dense.hits[s][0]]
    values = [dense.hits[s][1].astype(float) - one.hits[s][1] for s in seeds]
    return _interval(values, seeds, one, groups, lone)


def worst_group(one: Contender, groups: Groups) -> float | None:
    """Return the accuracy of the worst group: that of the lowest mean over seeds, not of each seed's own lowest."""
    seeds = sorted(set(one.hits) & set(groups))
    if not seeds:
        return None
    n, sums, _ = _moments([one.hits[s][1] for s in seeds], [groups[s] for s in seeds])
    whole = (n > 0).all(axis=0)
    return float((sums[:, whole] / n[:, whole]).mean(axis=0).min()) if whole.any() else None


def _moments(values: Sequence[np.ndarray], groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (S, G) how many items groups have in each seed, and the sums of their values and of the squares."""
    G = max(len(SIGNS), 1 + max(int(one.max(initial=0)) for one in groups))
    each = zip((one.astype(float) for one in values), groups, strict=True)  # a seed at a time, which is less memory
    seeds = [[np.bincount(group, x, minlength=G) for x in (None, value, value**2)] for value, group in each]
    n, sums, squares = (np.array(moment) for moment in zip(*seeds, strict=True))
    return n, sums, squares


def _interval(
    values: Sequence[np.ndarray], seeds: Sequence[int], one: Contender, groups: Groups, lone: bool
) -> Interval | None:
    """Return the mean over S seeds of the gaps, with its 95 % interval; None where a group is empty.

    Args:
        values: (I,) of each seed.
        seeds: their numbers.
        one: whose tests they are.
        groups: of the items.
        lone: whether a single seed has an interval, over its items.
    """
    S, grouped = len(values), [groups[s] for s in seeds]
    gaps, items = _gaps(*_moments(values, grouped)) if S else (np.array([np.nan]), np.array([np.nan]))
    mean = float(gaps.mean())
    if np.isnan(mean):
        return None
    if S < 2 and not lone:
        return mean, None, None
    apart, I = items.sum() / S**2, sum(map(len, values))
    together = apart
    if one.clusters is not None:
        apart, together, I = _cluster_variance(values, grouped, [one.clusters[s] for s in seeds])
    elif len({one.hits[s][0] for s in seeds}) == 1:
        (together,), I = _gaps(*_moments([np.mean(values, axis=0)], grouped[:1]))[1], len(values[0])
    if S < 2:
        half = float(student_half(together, np.array(I - 1.0)))
    else:
        half = float(half_width(gaps.var(ddof=1) / S, apart, together, np.array(S), np.array(I)))
    return mean, mean - half, mean + half


def _cluster_variance(
    values: Sequence[np.ndarray], groups: Sequence[np.ndarray], clusters: Sequence[np.ndarray]
) -> tuple[float, float, int]:
    """Return what items explain of the mean gap over S seeds, were their clusters drawn again, and how many there are.

    First as if no two seeds shared any, then with the clusters as they are. A gap is a sum of means, and an item's part
    in it, to first order, how far it is from its group's mean, over the size of that group (Cochran 1977, section 6.6).
    """
    S, parts = len(values), []
    for value, group in zip(values, groups, strict=True):
        n, sums, _ = (x[0] for x in _moments([value], [group]))
        signs = np.concatenate([SIGNS, np.zeros(len(n) - len(SIGNS))])
        parts.append(signs[group] * (value - sums[group] / n[group]) / (n[group] * S))
    apart = sum(_variance(part, numbers) for part, numbers in zip(parts, clusters, strict=True))
    every = np.concatenate(clusters)
    return float(apart), _variance(np.concatenate(parts), every), len(np.unique(every))


def _variance(parts: np.ndarray, clusters: np.ndarray) -> float:
    """Return the variance of a sum of (I,) parts whose clusters are drawn again."""
    totals = np.bincount(np.unique(clusters, return_inverse=True)[1], parts)
    return float((totals**2).sum() * len(totals) / (len(totals) - 1)) if len(totals) > 1 else float("nan")


def _gaps(n: np.ndarray, sums: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (S,) gaps and their variances by items; NaN of seeds without two items of each group."""
    n, sums, squares = (x[:, : len(SIGNS)] for x in (n, sums, squares))
    with np.errstate(divide="ignore", invalid="ignore"):
        means = sums / n
        variances = (squares / n - means**2) / (n - 1)
    return means @ SIGNS, variances @ SIGNS**2
