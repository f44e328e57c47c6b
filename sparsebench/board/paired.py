"""Comparisons of strategies, paired by seed and by test item.

Three things vary: test items, seeds (data, initial weights, order), and timings, which are in none of this. A
difference is taken for real only where it stands out from both of the first two: from the items, by McNemar's exact
test, and from the seeds, by Student's t test of the paired differences; over all pairs of a board by Holm's method.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from scipy.special import bdtr, stdtr, stdtrit

LEVEL = 0.95
POWER = 0.8


@dataclass(frozen=True)
class Contender:
    """What is compared, by seed: S seeds with I test items each.

    Attributes:
        means: the accuracy of each seed.
        hits: (I,) booleans of each seed, which items are predicted rightly, with a name that seeds share if they have
            the same items; empty where that is not known.
    """

    means: Mapping[int, float]
    hits: Mapping[int, tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Pairs:
    """What R contenders come to, row minus column; NaN where two share no seed, or too few.

    Attributes:
        mean: (R, R) the mean difference over the seeds that both have.
        half: (R, R) half the width of its 95 % interval.
        least: (R, R) the difference that would be found in 4 of 5 such experiments, at this level, if it were real.
        p_items: (R, R) of McNemar's exact test: would these networks differ on other items?
        p_seeds: (R, R) of the t test: would networks from other seeds differ?
        n_seeds: (R, R) how many seeds both have.
    """

    mean: np.ndarray
    half: np.ndarray
    least: np.ndarray
    p_items: np.ndarray
    p_seeds: np.ndarray
    n_seeds: np.ndarray

    @property
    def p(self) -> np.ndarray:
        """(R, R) the larger of both, adjusted by Holm's method over all pairs."""
        larger = np.fmax(self.p_items, self.p_seeds)
        upper = np.triu_indices(len(larger), 1)
        adjusted = np.full_like(larger, np.nan)
        adjusted[upper] = holm(larger[upper])
        adjusted.T[upper] = adjusted[upper]
        return adjusted

    def among(self, places: Sequence[int]) -> Pairs:
        """Return the comparisons of some of them with each other."""
        some = np.ix_(np.array(places, dtype=int), np.array(places, dtype=int))
        return Pairs(*(getattr(self, each.name)[some] for each in fields(self)))

    def better(self) -> np.ndarray:
        """Return (R, R) booleans, which row is told to be better than which column."""
        with np.errstate(invalid="ignore"):
            return np.asarray((self.p <= 1 - LEVEL) & (self.mean > 0))

    def rank_sets(self) -> list[tuple[int, int]]:
        """Return the ranks that each may have: below all that are told to be better, above all told to be worse."""
        better = self.better()
        return list(zip((1 + better.sum(axis=0)).tolist(), (len(better) - better.sum(axis=1)).tolist(), strict=True))


def holm(p: np.ndarray) -> np.ndarray:
    """Return (n,) p-values adjusted by Holm's step-down method (Holm 1979); those that are NaN stay so."""
    adjusted = np.full_like(p, np.nan)
    there = np.flatnonzero(~np.isnan(p))
    order = there[np.argsort(p[there], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return adjusted


def mcnemar(only_a: np.ndarray, only_b: np.ndarray) -> np.ndarray:
    """Return the exact two-sided p-values of McNemar's test, from how many items only one of both gets right."""
    fewer, both = np.minimum(only_a, only_b), only_a + only_b
    return np.minimum(1.0, 2 * bdtr(fewer, np.asarray(both, dtype=np.int64), 0.5))


def compare(contenders: Sequence[Contender]) -> Pairs:
    """Return the comparisons of all pairs."""
    R = len(contenders)
    mean, half, least, p_items, p_seeds = np.full((5, R, R), np.nan)
    found = Pairs(mean, half, least, p_items, p_seeds, np.zeros((R, R), dtype=int))
    alike = defaultdict(list)
    for index, one in enumerate(contenders):
        alike[tuple(sorted(one.means)), tuple(sorted((s, name) for s, (name, _) in one.hits.items()))].append(index)
    blocks = [np.array(indices) for indices in alike.values()]
    for place, rows in enumerate(blocks):
        for columns in blocks[place:]:
            _compare(found, contenders, rows, columns)
    return found


def _compare(found: Pairs, contenders: Sequence[Contender], rows: np.ndarray, columns: np.ndarray) -> None:
    """Fill in the comparisons of two blocks; within each all have the same seeds and items."""
    a, b = contenders[rows[0]], contenders[columns[0]]
    seeds = sorted(set(a.means) & set(b.means))
    if not seeds:
        return
    left, right = (np.array([[contenders[i].means[s] for s in seeds] for i in block]) for block in (rows, columns))
    paired = all(s in a.hits and s in b.hits and a.hits[s][0] == b.hits[s][0] for s in seeds)
    shared = paired and len({a.hits[s][0] for s in seeds}) == 1 < len(seeds)
    mean = np.array([(one - right).mean(axis=1) for one in left])
    p_items = np.full(mean.shape, np.nan)
    half, least, p_seeds = (np.full(mean.shape, np.nan) for _ in range(3))
    spread = np.array([(one - right).var(axis=1, ddof=1) for one in left]) if len(seeds) > 1 else None
    if paired:
        first = _stacked(contenders, rows, seeds)
        second = first if columns is rows else _stacked(contenders, columns, seeds)
        both = first @ second.T
        only_a, only_b = first.sum(axis=1)[:, None] - both, second.sum(axis=1)[None] - both
        p_items = mcnemar(only_a, only_b)
    if spread is not None:
        variance, freedom = spread / len(seeds), np.full(mean.shape, len(seeds) - 1.0)
        half, least, p_seeds = _student(mean, variance, freedom)
        if shared:
            by_item = [h.reshape(len(h), len(seeds), -1).mean(axis=1, dtype=float) for h in (first, second)]
            variance, freedom = _crossed(mean, spread, only_a + only_b, by_item[0], by_item[1], len(seeds))
            half, least, p_both = _student(mean, variance, freedom)
            p_seeds = np.maximum(p_seeds, p_both)  # far in the tail Satterthwaite's approximation is too bold
    for name, block in (("half", half), ("least", least), ("p_items", p_items), ("p_seeds", p_seeds)):
        getattr(found, name)[np.ix_(rows, columns)] = block
        getattr(found, name)[np.ix_(columns, rows)] = block.T
    found.mean[np.ix_(rows, columns)], found.mean[np.ix_(columns, rows)] = mean, -mean.T
    found.n_seeds[np.ix_(rows, columns)] = found.n_seeds[np.ix_(columns, rows)] = len(seeds)


def _stacked(contenders: Sequence[Contender], block: np.ndarray, seeds: Sequence[int]) -> np.ndarray:
    """Return (a, S I), 0 or 1, what the contenders of a block get right, seed after seed.

    Their products count items, which single precision does exactly up to 16 million.
    """
    kind = np.float32 if sum(len(contenders[block[0]].hits[s][1]) for s in seeds) < 2**24 else np.float64
    return np.array([np.concatenate([contenders[i].hits[s][1] for s in seeds]) for i in block], dtype=kind)


def _student(mean: np.ndarray, variance: np.ndarray, freedom: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return half the interval, the least difference that would be found, and p, of means with such variances."""
    error, edge = np.sqrt(variance), stdtrit(freedom, 0.5 + LEVEL / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.isclose(mean, 0, atol=1e-12), 0.0, np.abs(mean) / error)
    return edge * error, (edge + stdtrit(freedom, POWER)) * error, 2 * stdtr(freedom, -ratio)


def _crossed(
    mean: np.ndarray, spread: np.ndarray, apart: np.ndarray, left: np.ndarray, right: np.ndarray, S: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return variance and degrees of freedom of mean differences over S seeds that all have the same I items.

    Items and seeds are crossed random effects (Searle, Casella and McCulloch 1992, chapter 4; the degrees of freedom
    by Satterthwaite 1946): what resampling both would give, without its surplus at few seeds (Owen 2007).

    Args:
        mean, spread: (a, b) of the differences, and their variance over seeds.
        apart: (a, b) how often just one of both is right.
        left, right: (a, I) and (b, I) the mean over seeds of each item.
    """
    I = left.shape[1]
    of_items = np.array([((one - right - m[:, None]) ** 2).sum(axis=1) for one, m in zip(left, mean, strict=True)])
    by_seed, by_item = I * spread, S * of_items / (I - 1)
    rest = apart - S * I * mean**2 - (S - 1) * by_seed - (I - 1) * by_item
    noise = np.maximum(0.0, rest / ((S - 1) * (I - 1)))
    items = np.maximum(0.0, by_item - noise)
    total, parts = by_seed + items, by_seed**2 / (S - 1) + items**2 / (I - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        freedom = np.where(parts > 0, total**2 / parts, S - 1.0)
    return total / (S * I), freedom
