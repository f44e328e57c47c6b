"""The spurious gap: how much accuracy is lost where the background does not fit the label."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sparsebench.stats.intervals import Interval
from sparsebench.stats.paired import Contender, halves

SIGNS = np.array([0.5, -0.5, -0.5, 0.5])
"""What the accuracy of each group counts in the gap: groups are numbered 2 class + background, which fit where they are
the same."""
Groups = Mapping[int, np.ndarray]
"""Of each seed (I,) which group each test item is in."""


def aligned_gap(one: Contender, groups: Groups, lone: bool = False) -> Interval | None:
    """Return accuracy where the background fits less that where it does not, with its 95 % interval.

    Unlike the average less the worst group it is not above 0 where groups are alike. None where items are not known. A
    single seed has an interval, over its items, where it is `lone`: where all have no more.
    """
    gap = _interval({s: hits for s, (_, hits) in sorted(one.hits.items()) if s in groups}, one, groups, lone)
    if gap is None or gap[1] is None or gap[2] is None:
        return gap
    return gap[0], max(-1.0, gap[1]), min(1.0, gap[2])


def gap_reduction(one: Contender, dense: Contender, groups: Groups, lone: bool = False) -> Interval | None:
    """Return the gap of dense less that of another, seed by seed and item by item, with its 95 % interval.

    Of a single seed as in `aligned_gap`.
    """
    seeds = [s for s in sorted(set(one.hits) & set(groups) & set(dense.hits)) if one.hits[s][0] == dense.hits[s][0]]
    return _interval({s: dense.hits[s][1].astype(float) - one.hits[s][1] for s in seeds}, one, groups, lone)


def worst_group(one: Contender, groups: Groups) -> float | None:
    """Return the accuracy of the worst group: that of the lowest mean over seeds, not of each seed's own lowest."""
    G = max((1 + int(group.max(initial=0)) for group in groups.values()), default=0)
    means = [_means(one.hits[s][1], groups[s], G) for s in sorted(set(one.hits) & set(groups))]
    whole = [mean for mean in np.transpose(means) if not np.isnan(mean).any()] if means else []
    return float(min(np.mean(mean) for mean in whole)) if whole else None


def _means(values: np.ndarray, group: np.ndarray, G: int) -> np.ndarray:
    """Return (G,) means of (I,) values over groups; NaN of an empty one."""
    with np.errstate(invalid="ignore"):
        return np.bincount(group, values.astype(float), minlength=G)[:G] / np.bincount(group, minlength=G)[:G]


def _interval(values: Mapping[int, np.ndarray], one: Contender, groups: Groups, lone: bool) -> Interval | None:
    """Return the mean over seeds of the gaps, with its 95 % interval; None where a group is empty.

    A gap is a sum of means. What an item adds to it is, to first order, how far it is from its group's mean, over the
    size of that group (Cochran 1977, section 6.6).

    Args:
        values: (I,) of each seed.
        one: whose tests they are.
        groups: of the items.
        lone: whether a single seed has an interval, over its items.
    """
    gaps, scores = {}, {}
    for s, value in values.items():
        means = _means(value, groups[s], len(SIGNS))
        gaps[s] = float((means * SIGNS).sum())
        known, score = groups[s] < len(SIGNS), np.zeros(len(value))
        group, n = groups[s][known], np.bincount(groups[s][known], minlength=len(SIGNS))
        score[known] = SIGNS[group] * (value[known] - means[group]) / n[group] * len(value)
        scores[s] = one.hits[s][0], score
    mean = float(np.mean(list(gaps.values()))) if gaps else math.nan
    if math.isnan(mean):
        return None
    (half,) = halves([Contender(gaps, scores, one.clusters)], lone).tolist()
    return (mean, None, None) if math.isnan(half) else (mean, mean - half, mean + half)
