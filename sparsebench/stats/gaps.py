"""The spurious gap: how much accuracy is lost where the background does not fit the label."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from sparsebench.stats.intervals import Interval
from sparsebench.stats.paired import Contender, halves

SIGNS = np.array([0.5, -0.5, -0.5, 0.5])
"""What the accuracy of each group counts in the gap: groups are numbered 2 class + background, which fit where they are
the same."""
Groups = Mapping[int, np.ndarray]
"""Of each seed (I,) which group each test item is in."""


def aligned_gaps(every: Sequence[Contender], groups: Sequence[Groups], lone: bool = False) -> list[Interval | None]:
    """Return of each contender accuracy where the background fits less that where it does not, with a 95 % interval.

    Unlike the average less the worst group it is not above 0 where groups are alike. None where items are not known. A
    single seed has an interval, over its items, where it is `lone`: where all have no more.
    """
    values = [{s: hits for s, (_, hits) in sorted(one.hits.items()) if s in known}
              for one, known in zip(every, groups, strict=True)]  # fmt: skip
    return [
        gap if gap is None or gap[1] is None or gap[2] is None else (gap[0], max(-1.0, gap[1]), min(1.0, gap[2]))
        for gap in _intervals(values, every, groups, lone)
    ]


def gap_reductions(
    every: Sequence[Contender], dense: Contender, groups: Sequence[Groups], lone: bool = False
) -> list[Interval | None]:
    """Return the gap of dense less that of each contender, seed by seed and item by item, with its 95 % interval.

    Of a single seed as in `aligned_gaps`.
    """
    of_dense = {s: (name, hits.astype(float)) for s, (name, hits) in dense.hits.items()}
    values = [
        {s: of_dense[s][1] - hits for s, (name, hits) in sorted(one.hits.items())
         if s in known and s in of_dense and name == of_dense[s][0]}
        for one, known in zip(every, groups, strict=True)
    ]  # fmt: skip
    return _intervals(values, every, groups, lone)


def worst_group(one: Contender, groups: Groups) -> float | None:
    """Return the accuracy of the worst group: that of the lowest mean over seeds, not of each seed's own lowest."""
    G = max((1 + int(group.max(initial=0)) for group in groups.values()), default=0)
    means = [_means(one.hits[s][1][None], groups[s], G)[0] for s in sorted(set(one.hits) & set(groups))]
    whole = [mean for mean in np.transpose(means) if not np.isnan(mean).any()] if means else []
    return float(min(np.mean(mean) for mean in whole)) if whole else None


def _means(values: np.ndarray, group: np.ndarray, G: int) -> np.ndarray:
    """Return (R, G) means of (R, I) values over groups; NaN of an empty one."""
    members = (group[:, None] == np.arange(G)).astype(float)
    with np.errstate(invalid="ignore"):
        return np.asarray(values.astype(float) @ members / members.sum(axis=0))


def _intervals(
    values: Sequence[Mapping[int, np.ndarray]], every: Sequence[Contender], groups: Sequence[Groups], lone: bool
) -> list[Interval | None]:
    """Return the means over seeds of gaps, with their 95 % intervals; None where a group is empty.

    Args:
        values: (I,) of each seed, of each contender.
        every: whose tests they are.
        groups: of the items, of each.
        lone: whether a single seed has an interval, over its items.
    """
    parts: list[tuple[dict[int, float], dict[int, tuple[Hashable, np.ndarray]]]] = [({}, {}) for _ in every]
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (value, known) in enumerate(zip(values, groups, strict=True)):
        for s in value:
            alike[s, id(known[s])].append(i)  # contenders with the same items share one array
    for (s, _), places in alike.items():
        gaps, scores = _linear(np.array([values[i][s] for i in places]), groups[places[0]][s])
        for i, gap, score in zip(places, gaps.tolist(), scores, strict=True):
            parts[i][0][s], parts[i][1][s] = gap, (every[i].hits[s][0], score)
    linear = [Contender(*part, one.clusters) for part, one in zip(parts, every, strict=True)]
    means = [float(np.mean(list(one.means.values()))) if one.means else math.nan for one in linear]
    return [
        None if math.isnan(mean) else (mean, None, None) if math.isnan(half) else (mean, mean - half, mean + half)
        for mean, half in zip(means, halves(linear, lone).tolist(), strict=True)
    ]


def _linear(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (R,) gaps of (R, I) values, and (R, I) what each item adds to them.

    A gap is a sum of means. What an item adds to it is, to first order, how far it is from its group's mean, over the
    size of that group (Cochran 1977, section 6.6). An item that is in none of the groups adds nothing.
    """
    means, known = _means(values, group, len(SIGNS)), group < len(SIGNS)
    of_item = group[known]
    counts, scores = np.bincount(of_item, minlength=len(SIGNS)), np.zeros(values.shape)
    scores[:, known] = (values[:, known] - means[:, of_item]) * SIGNS[of_item] / counts[of_item] * len(group)
    return means @ SIGNS, scores
