"""Curves of strategies over their budgets: mean accuracy, the MACs that keep dense accuracy, and spurious gaps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sparsebench.stats.intervals import Interval, draws, percentiles
from sparsebench.stats.paired import Results, halves
from sparsebench.stats.variance import add_up, clusters_of

LOSS = 0.02
"""The largest loss of accuracy, compared with dense, that counts as kept: two points."""
DRAWS = 400
ROUNDING = 1e-9


def weights(spent: Sequence[float], lowest: float) -> np.ndarray:
    """Return the (K + 1,) weights of K accuracies and dense's in the mean height of a curve from `lowest` to 1.

    Args:
        spent: (K,) shares of dense MACs, below 1; accuracies at equal shares are averaged.
        lowest: the share of dense MACs at which the curve begins, below 1.
    """
    x, mean = _knots(spent)
    grid = np.unique([lowest, *x[x > lowest]])
    heights = np.array([np.interp(grid, x, unit) for unit in np.eye(len(x))])
    area = (heights[:, 1:] + heights[:, :-1]) / 2 @ np.diff(grid)
    return np.asarray(area @ mean / (1 - lowest))


def _knots(spent: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return the (U,) unique shares of MACs, dense's last, and the (U, K + 1) weights that average equal shares."""
    x, place, n = np.unique([*spent, 1.0], return_inverse=True, return_counts=True)
    mean = (place == np.arange(len(x))[:, None]) / n[:, None]
    return x, mean


def area(points: Sequence[Results], spent: Sequence[float], lowest: float) -> Results | None:
    """Return the mean height of a curve for each seed and test item, as results; None without a common seed.

    Args:
        points: the results at K budgets, then dense.
        spent, lowest: see `weights`.
    """
    counts = weights(spent, lowest)
    dense = points[-1]
    seeds = common_seeds(points)
    if not seeds:
        return None
    means = {}
    hits = {}
    for s in seeds:
        means[s] = float(sum(w * point.means[s] for w, point in zip(counts, points, strict=True)))
        if _have_hits(points, [s]):
            parts = (w * point.hits[s][1] for w, point in zip(counts, points, strict=True))
            hits[s] = dense.hits[s][0], np.asarray(sum(parts), dtype=float)
    return Results(means, hits, dense.clusters)


def kept_accuracy(heights: Sequence[Results], dense: Results, lone: bool = False) -> list[Interval]:
    """Return the heights of curves divided by dense's accuracy, means over seeds with 95 % intervals.

    To first order an item with the scores z and d contributes (z - r d) / mean(d) to the ratio r of its seed. With
    `lone` a single seed has an interval over its items, see `paired.halves`.
    """
    return _mean_intervals([_ratio(height, dense) for height in heights], lone, 0.0, math.inf)


def _mean_intervals(values: Sequence[Results], lone: bool, least: float, most: float) -> list[Interval]:
    """Return the means over seeds, NaN without a seed, with 95 % intervals clipped to `least` and `most`."""
    intervals: list[Interval] = []
    for value, half in zip(values, halves(values, lone).tolist(), strict=True):
        mean = float(np.mean(list(value.means.values()))) if value.means else math.nan
        if math.isnan(half):
            intervals.append((mean, None, None))
        else:
            intervals.append((mean, max(least, mean - half), min(most, mean + half)))
    return intervals


def _ratio(height: Results, dense: Results) -> Results:
    """Return a height divided by dense's accuracy for each seed, with the contributions of items."""
    ratios = {s: height.means[s] / dense.means[s] for s in sorted(height.means) if dense.means.get(s)}
    hits = {
        s: (name, (z - ratios[s] * dense.hits[s][1]) / dense.means[s])
        for s, (name, z) in height.hits.items()
        if s in ratios
    }
    return Results(ratios, hits, height.clusters)


class Resampled(NamedTuple):
    """The mean accuracies of K points and of dense, with bootstrap samples over seeds and clusters of test items.

    Attributes:
        mean: (K + 1,) means over the S common seeds, dense's last.
        samples: (B, K + 1) bootstrap samples of them.
        shares: (B, S) shares of the seeds in each sample.
        n: number of what is resampled: seeds, or clusters of a lone network. There is no interval below 2.
    """

    mean: np.ndarray
    samples: np.ndarray
    shares: np.ndarray
    n: int

    def interval(self, values: np.ndarray) -> tuple[float | None, float | None]:
        """Return the ends of the 95 % interval of (B,) values of the samples, see `percentiles`."""
        if self.n < 2:
            return None, None
        return percentiles(values[~np.isnan(self.samples).any(axis=1)], self.n)


def common_seeds(points: Sequence[Results]) -> list[int]:
    """Return the seeds that all points have."""
    return sorted(set.intersection(*(set(point.means) for point in points)))


def resampled(points: Sequence[Results], lone: bool = False) -> Resampled:
    """Return the means of points that share a seed, dense's last, and their bootstrap samples.

    A single seed is not resampled, unless it is `lone`: the board has only one seed. Then only items are.
    """
    seeds = common_seeds(points)
    means = np.array([[point.means[s] for point in points] for s in seeds])
    n = len(seeds)
    if lone and _have_hits(points, seeds):
        n = len(np.unique(_clusters(points[-1], seeds)[0]))
    samples = np.random.default_rng(0).integers(0, len(seeds), (DRAWS, len(seeds)))
    shares = (samples[:, :, None] == np.arange(len(seeds))).mean(axis=1)
    heights = means.mean(axis=0)[None] if n < 2 else np.einsum("bs,bsk->bk", shares, resample(points, seeds, means))
    return Resampled(means.mean(axis=0), heights, shares, n)


def least_macs(points: Sequence[Results], spent: Sequence[float], lone: bool = False, loss: float = LOSS) -> Interval:
    """Return the smallest share of dense MACs that loses at most `loss` of dense's accuracy, with its 95 % interval.

    It is where the mean curve, followed down from 1, first falls below this accuracy: infinity if it is below already
    at the largest share, and the smallest share if it is never below. The interval is from a percentile bootstrap over
    seeds and clusters of test items, expanded for few seeds as for N50. A single seed has no interval, unless it is
    `lone`; then only items are resampled.

    Args:
        points: the results at K budgets, then dense; they share a seed.
        spent: (K,) realised shares of dense MACs, below 1.
        lone: whether the board has only one seed.
        loss: the loss of accuracy, 0.02 for two points.
    """
    means = resampled(points, lone)
    value = float(crossing(spent, means.mean[None], loss)[0])
    return value, *means.interval(crossing(spent, means.samples, loss))


def speed_at_loss(
    points: Sequence[Results],
    spent: Sequence[float],
    speeds: np.ndarray,
    lone: bool = False,
    loss: float = LOSS,
) -> Interval:
    """Return images/s at the MACs of `least_macs`, with its 95 % interval.

    The time of an image is linear in MACs between two points. The samples of `least_macs` are used, with the times of
    their seeds. A sample that is below at the largest share has dense's speed; without a value at `least_macs` there is
    none here.

    Args:
        points, spent, lone, loss: see `least_macs`.
        speeds: images/s at the K points, then dense's: (S, K + 1) for the common seeds, or (1, K + 1).
    """
    means = resampled(points, lone)
    (value,) = crossing(spent, means.mean[None], loss)
    if np.isinf(value):
        return math.nan, None, None
    times = 1 / np.asarray(speeds, dtype=float)
    of_samples = means.shares @ times if len(times) > 1 else np.broadcast_to(times, (DRAWS, times.shape[1]))
    speed = 1 / _time_at(spent, np.array([value]), times.mean(axis=0)[None])
    if means.n < 2:
        return float(speed[0]), None, None
    places = np.minimum(crossing(spent, means.samples, loss), 1.0)
    return float(speed[0]), *means.interval(1 / _time_at(spent, places, of_samples))


def _time_at(spent: Sequence[float], places: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return (B,) times at (B,) shares of MACs, linear between (B, K + 1) times of points, dense's last."""
    x, mean = _knots(spent)
    return np.array([np.interp(place, x, row) for place, row in zip(places, times @ mean.T, strict=True)])


def macs_difference(
    first: tuple[Sequence[Results], Sequence[float]],
    second: tuple[Sequence[Results], Sequence[float]],
    dense: Results,
    lone: bool = False,
    loss: float = LOSS,
) -> Interval:
    """Return the MACs of one curve at a loss minus those of another, with the 95 % interval, resampled together.

    Both have at least the larger one of their smallest shares, so that curves that never fall below do not differ. A
    curve that is below at its largest share has the MACs of dense.

    Args:
        first, second: results and realised shares of dense MACs of each curve's points, without dense's.
        dense: the results of dense; all points share a seed.
        lone, loss: see `least_macs`.
    """
    K = len(first[1])
    means = resampled([*first[0], *second[0], dense], lone)
    lowest = max(min(first[1]), min(second[1]))

    def difference(heights: np.ndarray) -> np.ndarray:
        of_dense = heights[:, -1:]
        at_loss = [
            np.clip(crossing(spent, np.hstack([part, of_dense]), loss), lowest, 1.0)
            for spent, part in ((first[1], heights[:, :K]), (second[1], heights[:, K:-1]))
        ]
        return np.asarray(at_loss[0] - at_loss[1])

    return float(difference(means.mean[None])[0]), *means.interval(difference(means.samples))


def crossing(spent: Sequence[float], heights: np.ndarray, loss: float = LOSS) -> np.ndarray:
    """Return the (B,) shares of MACs at which (B, K + 1) accuracies, dense's last, fall below; see `least_macs`."""
    x, mean = _knots(spent)
    y = heights @ mean.T
    below = y < (heights[:, -1] - loss - ROUNDING)[:, None]
    last = len(x) - 1 - below[:, ::-1].argmax(axis=1)
    out = np.full(len(y), x[0])
    crosses = below.any(axis=1)
    out[crosses & (last >= len(x) - 2)] = np.inf
    inside = np.flatnonzero(crosses & (last < len(x) - 2))
    k = last[inside]
    low = y[inside, k]
    high = y[inside, k + 1]
    share = (heights[inside, -1] - loss - low) / (high - low)
    out[inside] = x[k] + np.minimum(1.0, share) * (x[k + 1] - x[k])
    return out


def resample(
    points: Sequence[Results], seeds: Sequence[int], means: np.ndarray, times: int = DRAWS, stream: int = 0
) -> np.ndarray:
    """Return (times, S, K + 1) accuracies of resampled clusters of test items; `means` if items are unknown."""
    dense = points[-1]
    if not _have_hits(points, seeds):
        return np.broadcast_to(means, (times, *means.shape))
    numbers = _clusters(dense, seeds)
    names = [clusters_of(items) for items in numbers]
    clusters = np.unique(np.concatenate(names))
    scores = np.zeros((len(seeds), len(points) + 1, len(clusters)))
    for place, (seed, items, columns) in enumerate(zip(seeds, numbers, names, strict=True)):
        hits = np.array([*(point.hits[seed][1] for point in points), np.ones(len(items))], dtype=float)
        scores[place][:, np.searchsorted(clusters, columns)] = add_up(hits, items)[1]
    samples = draws(len(clusters), times, stream) @ scores.reshape(-1, len(clusters)).T
    samples = samples.reshape(times, len(seeds), -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(samples[:, :, :-1] / samples[:, :, -1:])


def _have_hits(points: Sequence[Results], seeds: Sequence[int]) -> bool:
    """Return whether all points have results of the same test items for these seeds."""
    dense = points[-1]
    for s in seeds:
        if s not in dense.hits:
            return False
        items = dense.hits[s][0]
        if not all(s in point.hits and point.hits[s][0] == items for point in points):
            return False
    return True


def _clusters(strategy: Results, seeds: Sequence[int]) -> list[np.ndarray]:
    """Return for each seed the (I,) cluster numbers of its items; a cluster has the same number in all seeds."""
    if strategy.clusters is not None:
        return [strategy.clusters[s] for s in seeds]
    numbers: dict[Hashable, np.ndarray] = {}
    start = 0
    of_seeds = []
    for s in seeds:
        test, hits = strategy.hits[s]
        if test not in numbers:
            numbers[test] = start + np.arange(len(hits))
            start += len(hits)
        of_seeds.append(numbers[test])
    return of_seeds


SIGNS = np.array([0.5, -0.5, -0.5, 0.5])
"""Weights of the groups' accuracies in the gap. Group 2 class + background is aligned if both numbers are equal."""
Groups = Mapping[int, np.ndarray]
"""(I,) group numbers of the test items, for each seed."""


def aligned_gaps(strategies: Sequence[Results], groups: Sequence[Groups], lone: bool = False) -> list[Interval | None]:
    """Return each strategy's accuracy on aligned backgrounds minus that on others, with a 95 % interval.

    Unlike the average minus the worst group, this gap is not biased above 0 if groups do not differ. None if items are
    unknown. A single seed has an interval, over its items, if it is `lone`: the only seed of all strategies.
    """
    values = []
    for strategy, numbers in zip(strategies, groups, strict=True):
        values.append({s: strategy.hits[s][1] for s in sorted(strategy.hits) if s in numbers})
    return _intervals(values, strategies, groups, lone, 1.0)


def gap_reductions(
    strategies: Sequence[Results], dense: Results, groups: Sequence[Groups], lone: bool = False
) -> list[Interval | None]:
    """Return the gap of dense minus the gap of each strategy, paired by seed and item, with its 95 % interval.

    A single seed is treated as in `aligned_gaps`.
    """
    dense_hits = {s: (name, hits.astype(float)) for s, (name, hits) in dense.hits.items()}
    values = []
    for strategy, numbers in zip(strategies, groups, strict=True):
        differences = {}
        for s in sorted(strategy.hits.keys() & dense_hits.keys() & numbers.keys()):
            name, hits = strategy.hits[s]
            of_dense, hits_of_dense = dense_hits[s]
            if name == of_dense:
                differences[s] = hits_of_dense - hits
        values.append(differences)
    return _intervals(values, strategies, groups, lone, math.inf)


def worst_group(strategy: Results, groups: Groups) -> float | None:
    """Return the lowest of the groups' mean accuracies over seeds; not the mean of each seed's lowest."""
    G = max((1 + int(group.max(initial=0)) for group in groups.values()), default=0)
    means = []
    for s in sorted(strategy.hits.keys() & groups.keys()):
        hits = strategy.hits[s][1]
        means.append(_means(hits[None], groups[s], G)[0])
    if not means:
        return None
    whole = [mean for mean in np.transpose(means) if not np.isnan(mean).any()]
    return float(min(np.mean(mean) for mean in whole)) if whole else None


def _means(values: np.ndarray, group: np.ndarray, G: int) -> np.ndarray:
    """Return the (R, G) means of (R, I) values in each group; NaN for an empty group."""
    members = (group[:, None] == np.arange(G)).astype(float)
    with np.errstate(invalid="ignore"):
        return np.asarray(values.astype(float) @ members / members.sum(axis=0))


def _intervals(
    values: Sequence[Mapping[int, np.ndarray]],
    strategies: Sequence[Results],
    groups: Sequence[Groups],
    lone: bool,
    most: float,
) -> list[Interval | None]:
    """Return the gaps, means over seeds with 95 % intervals; None if a group is empty.

    Args:
        values: for each strategy and seed, (I,) values of the items.
        strategies: the strategies.
        groups: the groups of each strategy's items.
        lone: whether a single seed has an interval, over its items.
        most: intervals are clipped to [-most, most].
    """
    gaps_of: list[dict[int, float]] = [{} for _ in strategies]
    scores_of: list[dict[int, tuple[Hashable, np.ndarray]]] = [{} for _ in strategies]
    blocks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (value, numbers) in enumerate(zip(values, groups, strict=True)):
        for s in value:
            blocks[s, id(numbers[s])].append(i)  # strategies with the same items share one array
    for (s, _), places in blocks.items():
        gaps, scores = _linear(np.array([values[i][s] for i in places]), groups[places[0]][s])
        for i, gap, score in zip(places, gaps.tolist(), scores, strict=True):
            gaps_of[i][s] = gap
            scores_of[i][s] = strategies[i].hits[s][0], score
    linear = []
    for strategy, gaps_of_seeds, scores_of_seeds in zip(strategies, gaps_of, scores_of, strict=True):
        linear.append(Results(gaps_of_seeds, scores_of_seeds, strategy.clusters))
    return [None if math.isnan(gap[0]) else gap for gap in _mean_intervals(linear, lone, -most, most)]


def _linear(values: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (R,) gaps of (R, I) values, and the (R, I) contributions of the items.

    A gap is a sum of means. To first order the contribution of an item is its difference from the mean of its group,
    divided by the size of the group (Cochran 1977, section 6.6). Items of other groups contribute nothing.
    """
    means = _means(values, group, len(SIGNS))
    mask = group < len(SIGNS)
    members = group[mask]
    counts = np.bincount(members, minlength=len(SIGNS))
    scores = np.zeros(values.shape)
    scores[:, mask] = (values[:, mask] - means[:, members]) * SIGNS[members] / counts[members] * len(group)
    return means @ SIGNS, scores
