"""Images to a target: the number of training images at which a learning curve reaches an accuracy, with its interval.

A curve is the accuracy at rising numbers of training images, linear in their logarithm. The target is fixed, or lies
between chance and the accuracy of dense at the largest number. The interval has all numbers at which the curve does not
differ significantly from the target, from the first to the last one (Fieller 1954). For a given number the difference
of curve and target is a mean over test items and repetitions, so its interval is Student's, see `paired.halves`. The
target is estimated too, and its error is a part of that of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sparsebench.stats.intervals import BELOW, Interval
from sparsebench.stats.paired import Results, halves_of_both

SHARE = 0.9
"""The share of the way from chance to the accuracy of dense at which the relative target lies."""
STEPS = 6
"""Number of points between two numbers of training images at which the interval is computed."""


class Target(NamedTuple):
    """A target: `constant` + `share` times the accuracy of dense at the largest number of training images."""

    constant: float
    share: float = 0.0

    @classmethod
    def of_dense(cls, chance: float) -> Target:
        """Return the target at `SHARE` of the way from chance to the accuracy of dense."""
        return cls((1 - SHARE) * chance, SHARE)


def images_to_target(
    curves: Sequence[Sequence[Results]], sizes: Sequence[int], target: Target, dense: Results | None, lone: bool
) -> list[Interval]:
    """Return for each curve the number of training images at which it reaches the target, with its 95 % interval.

    It is where the curve crosses the target for the last time, interpolated in the logarithm of the number. It is BELOW
    if the curve is never below the target, and infinity if it is below at the largest number. The ends of an interval
    can be BELOW and infinity too. NaN without a common repetition.

    Args:
        curves: for each curve the results at each number of training images.
        sizes: (k,) rising numbers of training images.
        target: the target.
        dense: the results of dense at the largest number, of which the target may be a share.
        lone: whether all curves have a single repetition; then intervals are over its items, and otherwise a curve
            with a single repetition has none.
    """
    logs = np.log(np.asarray(sizes, dtype=float))
    inside = [np.linspace(a, b, STEPS + 1) for a, b in pairwise(logs)]
    places = np.unique(np.concatenate([logs, *inside]))
    gaps: list[Results] = []
    for curve in curves:
        gaps += [_gap(curve, logs, place, target, dense) for place in places]
    half = halves_of_both(gaps, lone).reshape(len(curves), len(places))
    means = np.array([_mean(gap) for gap in gaps]).reshape(half.shape)
    return [_interval(places, mean, width) for mean, width in zip(means, half, strict=True)]


def _gap(curve: Sequence[Results], logs: np.ndarray, place: float, target: Target, dense: Results | None) -> Results:
    """Return the difference of a curve and the target at one place on the axis of log N."""
    right = int(np.clip(np.searchsorted(logs, place), 1, len(logs) - 1)) if len(logs) > 1 else 0
    parts = [(1.0, curve[0])]
    if right:
        share = float((place - logs[right - 1]) / (logs[right] - logs[right - 1]))
        parts = [(1 - share, curve[right - 1]), (share, curve[right])]
    if target.share:
        assert dense is not None
        parts.append((-target.share, dense))
    return combined(parts, -target.constant)


def combined(parts: Sequence[tuple[float, Results]], constant: float = 0.0) -> Results:
    """Return the weighted sum of results plus a constant, for each common seed and, if all have them, its items."""
    seeds = sorted(set.intersection(*(set(part.means) for _, part in parts)))
    means = {}
    hits = {}
    for seed in seeds:
        means[seed] = float(sum(weight * part.means[seed] for weight, part in parts) + constant)
        items = [part.hits.get(seed) for _, part in parts]
        first = items[0]
        if first is None or any(item is None or item[0] != first[0] for item in items):
            continue
        scores = [weight * part.hits[seed][1].astype(float) for weight, part in parts]
        hits[seed] = first[0], np.sum(scores, axis=0) + constant
    return Results(means, hits, parts[0][1].clusters)


def _mean(gap: Results) -> float:
    return float(np.mean(list(gap.means.values()))) if gap.means else math.nan


def _interval(places: np.ndarray, mean: np.ndarray, half: np.ndarray) -> Interval:
    """Return where a curve reaches the target, and the interval; see `images_to_target`.

    Args:
        places: (p,) places on the axis of log N.
        mean, half: (p,) differences of curve and target, and half the widths of their intervals.
    """
    if np.isnan(mean).any():
        return math.nan, None, None
    value = _last_crossing(places, mean)
    if np.isnan(half).any():
        return value, None, None
    return value, _first_crossing(places, mean + half), _last_crossing(places, mean - half)


def _last_crossing(places: np.ndarray, heights: np.ndarray) -> float:
    """Return the number of images at which heights rise above 0 for the last time."""
    below = np.flatnonzero(heights < 0)
    if not len(below):
        return BELOW
    last = int(below[-1])
    return math.inf if last == len(places) - 1 else _between(places, heights, last)


def _first_crossing(places: np.ndarray, heights: np.ndarray) -> float:
    """Return the number of images at which heights rise above 0 for the first time."""
    above = np.flatnonzero(heights >= 0)
    if not len(above):
        return math.inf
    first = int(above[0])
    return BELOW if first == 0 else _between(places, heights, first - 1)


def _between(places: np.ndarray, heights: np.ndarray, left: int) -> float:
    """Return the number of images at which heights cross 0 between the places `left` and `left` + 1."""
    low = heights[left]
    high = heights[left + 1]
    share = -low / (high - low)
    return float(np.exp(places[left] + share * (places[left + 1] - places[left])))


def ties(values: Sequence[float]) -> list[tuple[int, int] | None]:
    """Return the first and the last rank of each value, the smallest first; equal values are ties. None for NaN.

    All values BELOW are equal, and so are all infinite ones.
    """
    known = np.array([value for value in values if not math.isnan(value)])
    ranks: list[tuple[int, int] | None] = []
    for value in values:
        if math.isnan(value):
            ranks.append(None)
        else:
            ranks.append((int((known < value).sum()) + 1, int((known <= value).sum())))
    return ranks
