"""The parts of the comparison of strategies as plain float64 loops, written from their equations."""

import math

import numpy as np
from scipy import optimize
from scipy.special import digamma, polygamma


def by_cluster(hits: list[int], clusters: list[int]) -> dict[int, tuple[int, int]]:
    """Return for each cluster the number of correct items and the number of items."""
    counts: dict[int, tuple[int, int]] = {}
    for hit, cluster in zip(hits, clusters, strict=True):
        right, size = counts.get(cluster, (0, 0))
        counts[cluster] = right + hit, size + 1
    return counts


def item_variance_by_loops(a: list[int], b: list[int], clusters: list[int]) -> float:
    """Return the variance of the difference in accuracy, cluster by cluster."""
    first, second = by_cluster(a, clusters), by_cluster(b, clusters)
    I, C = len(a), len(first)
    mean = (sum(a) - sum(b)) / I
    total = 0.0
    for name, (right, size) in first.items():
        total += (right - second[name][0] - size * mean) ** 2
    return total * C / (C - 1) / I**2


def prior_by_loops(ratios: list[float], freedom: list[float]) -> tuple[float, float]:
    """Return centre and degrees of freedom by Smyth's equations for the moments of log F, solved by bisection."""
    n = len(ratios)
    e = [math.log(x) - float(digamma(d / 2)) + math.log(d / 2) for x, d in zip(ratios, freedom, strict=True)]
    mean = sum(e) / n
    moment = sum((x - mean) ** 2 for x in e) / (n - 1) - sum(float(polygamma(1, d / 2)) for d in freedom) / n
    if moment <= 0:
        return math.exp(mean), math.inf
    d0 = 2 * optimize.brentq(lambda half: float(polygamma(1, half)) - moment, 1e-6, 1e9, xtol=1e-12, rtol=1e-12)
    return math.exp(mean + float(digamma(d0 / 2)) - math.log(d0 / 2)), d0


def shrink_by_loops(ratios: list[float], d: float) -> list[tuple[float, float]]:
    centre, d0 = prior_by_loops(ratios, [d] * len(ratios))
    centre = max(1.0, centre)
    posterior = [centre if math.isinf(d0) else (d0 * centre + d * x) / (d0 + d) for x in ratios]
    return [(max(1.0, x, drawn), d0 + d) for x, drawn in zip(ratios, posterior, strict=True)]


def overdispersion_by_loops(between: np.ndarray, items: np.ndarray, S: int, I: int) -> tuple[np.ndarray, np.ndarray]:
    """Return factors and degrees of freedom, pair by pair."""
    R, d = len(items), S - 1.0
    pairs = [(i, j) for i in range(R) for j in range(i + 1, R)]
    between = between.copy()
    for i, j in pairs:
        between[i, j] = between[j, i] = max(between[i, j], 1 / I**2 / 12 / S)
    by_pair = shrink_by_loops([between[i, j] / items[i, j] for i, j in pairs], d)

    def about(x: np.ndarray, i: int) -> float:
        whole = sum(x[j, k] for j in range(R) for k in range(R)) / R**2
        return S * (sum(x[i, j] for j in range(R)) / R - whole / 2)

    weights = [about(items, i) for i in range(R)]
    by_strategy = shrink_by_loops([about(between, i) / weights[i] for i in range(R)], d)
    factors, freedom = np.full((2, R, R), np.nan)
    for (i, j), (factor, more) in zip(pairs, by_pair, strict=True):
        a, b = by_strategy[i][0] * weights[i], by_strategy[j][0] * weights[j]
        denominator = a**2 / by_strategy[i][1] + b**2 / by_strategy[j][1]
        fewer = math.inf if denominator == 0 else (a + b) ** 2 / denominator
        factors[i, j] = factors[j, i] = max(factor, (a + b) / (weights[i] + weights[j]))
        freedom[i, j] = freedom[j, i] = min(more, fewer, (R - 1) * d)
    return factors, freedom


def rule_by_loops(hits: np.ndarray, clusters: np.ndarray, i: int, j: int) -> tuple[float, float, float]:
    """Return mean, variance and degrees of freedom of the difference of a pair, from (R, S, I) outcomes.

    Args:
        hits: 1 if the item is correct, otherwise 0.
        clusters: (S, I) cluster numbers; a cluster has the same number in all seeds.
    """
    R, S, I = hits.shape
    every = sorted(set(clusters.ravel().tolist()))
    flat = clusters.ravel().tolist()
    between, rest, main = np.zeros((3, R, R))
    for a in range(R):
        for b in range(R):
            means = [(int(hits[a, s].sum()) - int(hits[b, s].sum())) / I for s in range(S)]
            grand = sum(means) / S
            between[a, b] = sum((x - grand) ** 2 for x in means) / (S - 1) / S
            apart = (
                sum(
                    item_variance_by_loops(hits[a, s].tolist(), hits[b, s].tolist(), clusters[s].tolist())
                    for s in range(S)
                )
                / S**2
            )
            together = apart
            if len(every) < sum(len(set(row.tolist())) for row in clusters):
                together = item_variance_by_loops(hits[a].ravel().tolist(), hits[b].ravel().tolist(), flat)
            rest[a, b] = max(0.0, (S * apart - together) / (S - 1))
            main[a, b] = max(0.0, together - rest[a, b])
    factors, freedom = overdispersion_by_loops(between, rest, S, I)
    seeds = factors[i, j] * rest[i, j]
    variance = seeds + main[i, j]
    denominator = seeds**2 / freedom[i, j] + main[i, j] ** 2 / (len(every) - 1)
    return float(hits[i].mean() - hits[j].mean()), variance, variance**2 / denominator
