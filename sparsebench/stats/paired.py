"""Comparisons of strategies, paired by seed and by test item; ranks, and marks against references."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from scipy.special import bdtr, ndtr, stdtr, stdtrit

from sparsebench.stats.intervals import LEVEL, wilson
from sparsebench.stats.variance import (
    add_up,
    clusters_of,
    item_parts,
    item_variance,
    optional,
    overdispersion,
    satterthwaite,
    squared_differences,
    student_half,
)

POWER = 0.8
"""Share of the pairs in which a detectable difference is significant."""
DRAWS = 10_000
MANY = 1e6
"""Degrees of freedom that are practically infinite."""
BETTER, WORSE, NOT_SIGNIFICANT = "better", "worse", "not significant"
DIFFERENCE = np.dtype(
    [
        (name, float)
        for name in (
            "mean",
            "between",
            "n_seeds",
            "separate",
            "joint",
            "clusters",
            "n_items",
            "p_items",
        )
    ]
)
"""The comparison of two strategies, see `Pairs`. `between` is the variance of the mean, estimated from its seeds, NaN
for a single seed. `separate` and `joint` are the parts that items explain, see `variance.item_parts`. `clusters` is the
number of tested clusters, and `n_items` the number of items of a seed."""


@dataclass(frozen=True)
class Results:
    """The results of one strategy by seed, with I test items for each seed.

    Attributes:
        means: the accuracy of each seed.
        hits: for each seed, a name and (I,) results of its items: booleans (predicted correctly) or real scores. Seeds
            with the same items have the same name. Empty if unknown.
        clusters: for each seed, the (I,) integer number of each item's foreground, the same for the same foreground in
            all seeds; None if each item is its own cluster.
    """

    means: Mapping[int, float]
    hits: Mapping[int, tuple[Hashable, np.ndarray]]
    clusters: Mapping[int, np.ndarray] | None = None


@dataclass(frozen=True)
class Pairs:
    """The comparisons of R strategies, row minus column; NaN for pairs without a common seed, or with too few.

    Attributes:
        mean: (R, R) mean difference over the common seeds.
        half: (R, R) half the width of its 95 % interval: over items if all strategies have only one seed. Otherwise a
            pair with a single common seed has no interval.
        error: (R, R) standard error of the difference; for a single seed, that of its items.
        freedom: (R, R) degrees of freedom of the error.
        overdispersion: (R, R) variance over seeds as a multiple of what items explain; NaN if it is not pooled.
        p_items: (R, R) p-values for other items and the same networks: McNemar's exact test for booleans without
            clusters, else Student's t, with `_lone_variance` for a single network.
        p_seeds: (R, R) p-values for other items and networks from other seeds: Student's t of mean and error.
        n_seeds: (R, R) number of common seeds.
        accuracy: (R, 2) ends of the 95 % interval of each strategy's accuracy.
    """

    mean: np.ndarray
    half: np.ndarray
    error: np.ndarray
    freedom: np.ndarray
    overdispersion: np.ndarray
    p_items: np.ndarray
    p_seeds: np.ndarray
    n_seeds: np.ndarray
    accuracy: np.ndarray

    @property
    def p_alone(self) -> np.ndarray:
        """(R, R) unadjusted p-values: the larger of `p_items` and `p_seeds`, ignoring NaN."""
        return np.fmax(self.p_items, self.p_seeds)

    @property
    def p(self) -> np.ndarray:
        """(R, R) p-values `p_alone`, adjusted by Holm's method over all pairs."""
        alone = self.p_alone
        upper = np.triu_indices(len(alone), 1)
        adjusted = np.full_like(alone, np.nan)
        adjusted[upper] = holm(alone[upper])
        adjusted.T[upper] = adjusted[upper]
        return adjusted

    def among(self, places: Sequence[int]) -> Pairs:
        """Return the comparisons of some strategies; errors stay those estimated from all."""
        rows = np.array(places, dtype=int)
        block = np.ix_(rows, rows)
        matrices = {name: getattr(self, name)[block] for name in MATRICES}
        return Pairs(**matrices, accuracy=self.accuracy[rows])

    def better(self) -> np.ndarray:
        """Return (R, R) booleans: whether the row is significantly better than the column."""
        with np.errstate(invalid="ignore"):
            return np.asarray((self.p <= 1 - LEVEL) & (self.mean > 0))

    def ranks(self) -> np.ndarray:
        """Return (R, 2) integers: each strategy's first possible rank, after all that are significantly better, and
        its last, before all that are worse.
        """
        better = self.better()
        first = 1 + better.sum(axis=0)
        last = len(better) - better.sum(axis=1)
        return np.stack([first, last], axis=1)

    def least(self) -> float:
        """Return the difference that would be significant in 4 of 5 pairs, at the level of the next pair.

        With Holm's method this level depends on the number of pairs that are not yet significant. A difference is
        significant above a critical value, which depends on its error. NaN without errors.
        """
        upper = np.triu_indices(len(self.mean), 1)
        n_not_significant = max(1, int((self.p[upper] > 1 - LEVEL).sum()))
        error, freedom = self.error[upper], self.freedom[upper]
        mask = np.isfinite(error) & (error > 0)
        if not mask.any():
            return float("nan")
        error = error[mask]
        critical = stdtrit(freedom[mask], 1 - (1 - LEVEL) / (2 * n_not_significant)) * error
        # The difference is found by bisection. The upper bound is at least five errors above each critical value, so it
        # is significant in practically all cases.
        low = 0.0
        high = float((critical + 5 * error).max())
        for _ in range(50):
            middle = (low + high) / 2
            enough = ndtr((middle - critical) / error).mean() >= POWER
            low, high = (low, middle) if enough else (middle, high)
        return high


MATRICES = tuple(field.name for field in fields(Pairs) if field.name != "accuracy")
"""The attributes of `Pairs` with a row and a column for each strategy."""


def detectable(pairs: Pairs, quantity: str = "accuracy", unit: str = "seeds") -> str | None:
    """Return a clause with the difference that would be significant in 4 of 5 pairs, or None if it is unknown.

    The quantity is a share, so differences are at most 1; `unit` is the name of the seeds.
    """
    least = pairs.least()
    if np.isnan(least):
        return None
    upper = np.triu_indices(len(pairs.mean), 1)
    n = int(np.median(pairs.n_seeds[upper]))
    networks = f"{n} {unit} each" if n > 1 else "one network"
    board = f"{networks}; {len(upper[0])} pairs of strategies on this board"
    if least > 1:
        return f"no difference in {quantity} is large enough to be significant in 80 % of cases ({board})"
    return (
        f"a difference of {least:.3f} in {quantity} between two strategies is significant in 80 % of cases ({board}); "
        "smaller differences may exist and not be significant"
    )


def holm(p: np.ndarray) -> np.ndarray:
    """Return (n,) p-values adjusted by Holm's step-down method (Holm 1979); NaNs stay NaN.

    >>> holm(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.06, 0.06]
    """
    adjusted = np.full_like(p, np.nan)
    places = np.flatnonzero(~np.isnan(p))
    order = places[np.argsort(p[places], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * factors))
    return adjusted


def mcnemar(only_a: np.ndarray, only_b: np.ndarray) -> np.ndarray:
    """Return exact two-sided p-values of McNemar's test, from the numbers of items that only a or only b gets right."""
    fewer = np.minimum(only_a, only_b)
    total = only_a + only_b
    return np.minimum(1.0, 2 * bdtr(fewer, np.asarray(total, dtype=np.int64), 0.5))


def student(mean: np.ndarray, variance: np.ndarray, freedom: np.ndarray) -> np.ndarray:
    """Return two-sided p-values of Student's t test; for a mean of 0 the p-value is 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.isclose(mean, 0, atol=1e-12), 0.0, np.abs(mean) / np.sqrt(variance))
    return np.asarray(2 * stdtr(freedom, -ratio))


def compare(strategies: Sequence[Results], outsiders: Collection[int] = ()) -> Pairs:
    """Return the comparisons of all pairs.

    Args:
        strategies: the strategies, in the order of rows and columns.
        outsiders: places of strategies that lack seeds of the others; the variances of the others do not use them.
    """
    R = len(strategies)
    blocks = _blocks_of(strategies)
    differences = np.empty((R, R), DIFFERENCE)
    for place, left in enumerate(blocks):
        for right in blocks[place:]:
            of_blocks = _differences(left, right)
            differences[np.ix_(left.places, right.places)] = of_blocks
            # Columns minus rows. A block with itself is written twice, with the same values.
            mirrored = of_blocks.T.copy()
            mirrored["mean"] *= -1
            differences[np.ix_(right.places, left.places)] = mirrored

    others = np.setdiff1d(np.arange(R), list(outsiders))
    lone = len({seed for place in others for seed in strategies[place].means}) == 1
    accuracy = np.full((R, 2), np.nan)
    for block in blocks:
        accuracy[block.places] = _accuracy(_differences(block, block.zero()), lone)

    pairs = _judge(differences, accuracy, lone)
    if len(others) < R:
        # The pairs of the others are judged again among themselves, without the outsiders' variances.
        among_others = np.ix_(others, others)
        judged_alone = _judge(differences[among_others], accuracy[others], lone)
        for name in MATRICES:
            getattr(pairs, name)[among_others] = getattr(judged_alone, name)
    return pairs


class _Block:
    """The a strategies that have the same seeds and items; a block that they are compared with has b strategies.

    Attributes:
        places: (a,) their places among all strategies.
        strategies: the strategies.
        example: one of them, for what they share: seeds, names of items, clusters.
    """

    def __init__(self, places: Sequence[int], strategies: Sequence[Results]) -> None:
        self.places = np.array(places)
        self.strategies = strategies
        self.example = strategies[0]
        self._sums: dict[tuple[int, bytes | None], np.ndarray] = {}

    def zero(self) -> _Block:
        """Return a block without correct predictions on the same tests: the difference to it is the accuracy."""
        wrong = {seed: (name, np.zeros_like(hits)) for seed, (name, hits) in self.example.hits.items()}
        return _Block([0], [Results(dict.fromkeys(self.example.means, 0.0), wrong, self.example.clusters)])

    def sums(self, seed: int, cluster_numbers: np.ndarray | None) -> np.ndarray:
        """Return the (a, C) sums of the scores of a seed over its C clusters.

        Booleans are in single precision if each item is a cluster, because counts of items are exact in it. Sums over
        larger clusters and real numbers are in double precision.

        Args:
            seed: the seed.
            cluster_numbers: the (I,) cluster number of each item; None if each item is a cluster.
        """
        key = seed, None if cluster_numbers is None else cluster_numbers.tobytes()
        if key not in self._sums:
            scores = [strategy.hits[seed][1] for strategy in self.strategies]
            are_boolean = all(hits.dtype == bool for hits in scores)
            block = np.array(scores, dtype=np.float32 if are_boolean else float)
            self._sums[key] = block if cluster_numbers is None else add_up(block, cluster_numbers)[1]
        return self._sums[key]

    def cluster_sizes(self, seed: int, cluster_numbers: np.ndarray | None) -> np.ndarray:
        """Return the (C,) numbers of items of a seed's clusters, see `sums`."""
        ones = np.ones(len(self.example.hits[seed][1]), np.float32)  # counts, as in `sums`
        return ones if cluster_numbers is None else add_up(ones, cluster_numbers)[1]


def _blocks_of(strategies: Sequence[Results]) -> list[_Block]:
    """Return blocks of the strategies with the same seeds and items."""
    places_of_block = defaultdict(list)
    for place, strategy in enumerate(strategies):
        seeds = tuple(sorted(strategy.means))
        tests = tuple(sorted((seed, name) for seed, (name, _) in strategy.hits.items()))
        # The name of items stands for their foregrounds too, so equal names have equal clusters, if there are any.
        has_clusters = strategy.clusters is not None
        are_boolean = all(hits.dtype == bool for _, hits in strategy.hits.values())
        places_of_block[seeds, tests, has_clusters, are_boolean].append(place)
    return [_Block(places, [strategies[place] for place in places]) for places in places_of_block.values()]


def _differences(left: _Block, right: _Block) -> np.ndarray:
    """Return the (a, b) comparisons of two blocks, with the dtype DIFFERENCE."""
    seeds = sorted(set(left.example.means) & set(right.example.means))
    result = np.full((len(left.strategies), len(right.strategies)), np.nan, DIFFERENCE)
    result["n_seeds"] = len(seeds)
    if not seeds:
        return result
    left_means = np.array([[strategy.means[seed] for seed in seeds] for strategy in left.strategies])
    right_means = np.array([[strategy.means[seed] for seed in seeds] for strategy in right.strategies])
    result["mean"] = np.array([(row - right_means).mean(axis=1) for row in left_means])
    if len(seeds) > 1:
        result["between"] = np.array([(row - right_means).var(axis=1, ddof=1) for row in left_means]) / len(seeds)
    if _have_same_items(left.example, right.example, seeds):
        _add_items(result, left, right, seeds)
    return result


def _have_same_items(left: Results, right: Results, seeds: Sequence[int]) -> bool:
    """Return whether two strategies have results of the same items for all of some seeds."""
    for seed in seeds:
        if seed not in left.hits or seed not in right.hits:
            return False
        left_name, _ = left.hits[seed]
        right_name, _ = right.hits[seed]
        if left_name != right_name:
            return False
    return True


class _SeedItems(NamedTuple):
    """What the items of one seed say about the differences of two blocks of a and b strategies.

    Attributes:
        variance: (a, b) variances of the mean difference, see `item_variance`.
        squares: (a, b) sums over clusters of the squared differences.
        totals: (a, b) sums over clusters of the differences.
        n_clusters: number of clusters.
        are_correct: whether each cluster is an item, and each score says whether its prediction is correct.
    """

    variance: np.ndarray
    squares: np.ndarray
    totals: np.ndarray
    n_clusters: int
    are_correct: bool


def _items_of_seed(left: _Block, right: _Block, seed: int, cluster_numbers: np.ndarray | None) -> _SeedItems:
    """Return what the items of a seed say; for `cluster_numbers` see `_Block.sums`."""
    left_sums = left.sums(seed, cluster_numbers)
    right_sums = right.sums(seed, cluster_numbers)
    cluster_sizes = left.cluster_sizes(seed, cluster_numbers)
    squares = squared_differences(left_sums, right_sums)
    return _SeedItems(
        variance=item_variance(left_sums, right_sums, cluster_sizes, squares),
        squares=squares,
        totals=left_sums.sum(axis=1)[:, None] - right_sums.sum(axis=1),
        n_clusters=len(cluster_sizes),
        # Sums of booleans are in single precision.
        are_correct=cluster_numbers is None and left_sums.dtype != float and right_sums.dtype != float,
    )


def _add_items(result: np.ndarray, left: _Block, right: _Block, seeds: list[int]) -> None:
    """Add the parts that items explain to the comparisons of two blocks with the same items.

    `separate` treats equal clusters of different seeds as different. `joint` adds up a cluster over all seeds that have
    it. Both are equal if no two seeds share a cluster.
    """
    numbers = _cluster_numbers(left.example if right.example.clusters is None else right.example, seeds)
    parts = []
    for place, seed in enumerate(seeds):
        cluster_numbers = numbers[place] if numbers else None
        parts.append(_items_of_seed(left, right, seed, cluster_numbers))
    nothing = np.zeros(result.shape)
    separate = sum((part.variance / len(seeds) ** 2 for part in parts), start=nothing)

    result["separate"] = separate
    result["joint"] = separate
    result["clusters"] = sum(part.n_clusters for part in parts)
    result["n_items"] = max(len(left.example.hits[seed][1]) for seed in seeds)
    if numbers:
        _add_joint(result, left, right, seeds, numbers)

    if all(part.are_correct for part in parts):
        # The squares count the items that only one of both gets right. The totals are those of the left minus those of
        # the right.
        either = sum((part.squares for part in parts), start=nothing)
        difference = sum((part.totals for part in parts), start=nothing)
        result["p_items"] = mcnemar((either + difference) / 2, (either - difference) / 2)
    else:
        variance = result["joint"] if len(seeds) > 1 else _lone_variance(result)
        result["p_items"] = student(result["mean"], variance, result["clusters"] - 1)


def _add_joint(
    result: np.ndarray, left: _Block, right: _Block, seeds: Sequence[int], numbers: Sequence[np.ndarray]
) -> None:
    """Replace `joint`, and the number of clusters, if seeds share clusters.

    Args:
        result: the comparisons of the blocks, with the number of clusters of all seeds.
        left, right, seeds, numbers: see `_over_seeds`.
    """
    left_sums, right_sums, cluster_sizes = _over_seeds(left, right, seeds, numbers)
    share_clusters = len(cluster_sizes) < result["clusters"].flat[0]
    if share_clusters:
        square = squared_differences(left_sums, right_sums)
        result["joint"] = item_variance(left_sums, right_sums, cluster_sizes, square)
        result["clusters"] = len(cluster_sizes)


def _over_seeds(
    left: _Block, right: _Block, seeds: Sequence[int], numbers: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sums over all seeds for each of C clusters: (a, C) and (b, C) scores, and (C,) numbers of items.

    Args:
        left, right: two blocks with a and b strategies.
        seeds: the seeds.
        numbers: for each seed, the (I,) cluster numbers of its items.
    """
    clusters_of_seeds = [clusters_of(of_seed) for of_seed in numbers]
    clusters = np.unique(np.concatenate(clusters_of_seeds))
    left_sums = np.zeros((len(left.strategies), len(clusters)))
    right_sums = np.zeros((len(right.strategies), len(clusters)))
    cluster_sizes = np.zeros(len(clusters))
    for seed, of_seed, clusters_of_seed in zip(seeds, numbers, clusters_of_seeds, strict=True):
        columns = np.searchsorted(clusters, clusters_of_seed)
        left_sums[:, columns] += left.sums(seed, of_seed)
        right_sums[:, columns] += right.sums(seed, of_seed)
        cluster_sizes[columns] += left.cluster_sizes(seed, of_seed)
    return left_sums, right_sums, cluster_sizes


def _cluster_numbers(strategy: Results, seeds: Sequence[int]) -> list[np.ndarray]:
    """Return for each seed the (I,) cluster numbers of its items.

    They are those of the strategy, if it has any. Otherwise, if all of several seeds have the same items, an item is a
    cluster that all seeds share. Otherwise each item of each seed is its own cluster, and the list is empty.
    """
    if strategy.clusters is not None:
        return [strategy.clusters[seed] for seed in seeds]
    names = {strategy.hits[seed][0] for seed in seeds}
    share_items = len(seeds) > 1 and len(names) == 1
    if share_items:
        _, hits = strategy.hits[seeds[0]]
        return [np.arange(len(hits))] * len(seeds)
    return []


def _judge(result: np.ndarray, accuracy: np.ndarray, lone: bool) -> Pairs:
    """Return the comparisons with intervals and p-values.

    The variance of a mean difference has two parts: one of the seeds, and one of the items that seeds share. Errors and
    intervals are from both, or from items alone where these are wider. With `lone`, only one seed in all, intervals are
    from items.
    """
    S = result["n_seeds"]
    mean = result["mean"]
    freedom_of_items = result["clusters"] - 1

    # Pairs pool what seeds vary beyond their items: one factor, unless it is unknown for a pair. Such a pair has only
    # the variance over its own seeds.
    interaction, main = item_parts(result["separate"], result["joint"], S)
    factor, freedom_of_factor = overdispersion(result["between"], interaction, S, result["n_items"])
    is_unpooled = np.isnan(factor)
    seed_variance = np.where(is_unpooled, result["between"], factor * interaction)
    seed_freedom = np.where(is_unpooled, S - 1.0, freedom_of_factor)
    variance, freedom = satterthwaite((seed_variance, seed_freedom), optional(main, freedom_of_items))

    # Far in the tail Satterthwaite's approximation gives too small p-values for pairs that are not pooled.
    p_seeds = student(mean, variance, freedom)
    p_of_own_seeds = student(mean, seed_variance, seed_freedom)
    p_seeds = np.where(is_unpooled, np.fmax(p_seeds, p_of_own_seeds), p_seeds)

    half_by_both = student_half(variance, freedom)
    half_by_items = student_half(result["joint"], freedom_of_items)
    with np.errstate(invalid="ignore"):
        are_items_wider = np.isnan(half_by_both) | (half_by_items > half_by_both)
    half_of_single = _half_of_single(result) if lone else np.nan
    return Pairs(
        mean=mean,
        half=np.where(S > 1, np.fmax(half_by_both, half_by_items), half_of_single),
        error=np.sqrt(np.where(are_items_wider, result["joint"], variance)),
        freedom=np.where(are_items_wider, freedom_of_items, freedom),
        overdispersion=factor,
        p_items=result["p_items"],
        p_seeds=p_seeds,
        n_seeds=S.astype(int),
        accuracy=accuracy,
    )


def _half_of_single(result: np.ndarray) -> np.ndarray:
    """Return (R, R) half widths of the 95 % intervals of differences on one network; 0 of a strategy to itself."""
    half = student_half(_lone_variance(result), result["clusters"] - 1)
    of_itself = np.where(np.isnan(np.diag(half)), np.nan, 0.0)
    np.fill_diagonal(half, of_itself)
    return half


def _lone_variance(result: np.ndarray) -> np.ndarray:
    """Return the (a, b) variances of differences on one network over resampled clusters of items.

    Half an item, or half a cluster, is counted as won by each strategy (Agresti and Min 2005, "Simple improved
    confidence intervals for comparing matched proportions"), because with few differing items the variance alone is too
    small.
    """
    return np.asarray(result["joint"] + 1 / result["clusters"] ** 2)


def halves(strategies: Sequence[Results], lone: bool) -> np.ndarray:
    """Return (R,) half widths of the 95 % intervals of means, each from its own seeds and items.

    NaN for a single seed, unless it is `lone`: the only seed of all strategies.
    """
    half = np.full(len(strategies), np.nan)
    for block in _blocks_of(strategies):
        half[block.places] = _half(_differences(block, block.zero()), lone)
    return half


def halves_of_both(strategies: Sequence[Results], lone: bool) -> np.ndarray:
    """Return what `halves` returns, from seeds and items together, even where those for items alone are wider.

    Such an interval covers 95 %, and not more. It suits quantities of which the items explain little.
    """
    half = np.full(len(strategies), np.nan)
    for block in _blocks_of(strategies):
        result = _differences(block, block.zero())
        S, freedom_of_items = result["n_seeds"], result["clusters"] - 1
        _, main = item_parts(result["separate"], result["joint"], S)
        by_both = student_half(*satterthwaite((result["between"], S - 1), optional(main, freedom_of_items)))
        of_single = student_half(result["joint"], freedom_of_items) if lone else np.nan
        half[block.places] = np.where(S > 1, by_both, of_single)[:, 0]
    return half


def _half(result: np.ndarray, lone: bool) -> np.ndarray:
    """Return (a,) half widths of the 95 % intervals of means over seeds, from the differences to `zero`.

    They are Student's, with random seeds and items: the result of resampling both, without its excess for few seeds
    (Owen 2007), and never narrower than Student's for seeds or items alone. NaN for a single seed, unless it is `lone`;
    then Student's for items.
    """
    S = result["n_seeds"]
    freedom_of_items = result["clusters"] - 1
    seed_part = result["between"], S - 1
    _, main = item_parts(result["separate"], result["joint"], S)
    half_by_both = student_half(*satterthwaite(seed_part, optional(main, freedom_of_items)))
    half_by_seeds = student_half(*seed_part)
    half_by_items = student_half(result["joint"], freedom_of_items)
    widest = np.fmax(np.fmax(half_by_both, half_by_seeds), half_by_items)
    half_of_single = half_by_items if lone else np.nan
    return np.where(S > 1, widest, half_of_single)[:, 0]


def _accuracy(result: np.ndarray, lone: bool) -> np.ndarray:
    """Return the (a, 2) ends of the 95 % intervals of accuracies, from the differences to `zero`.

    The intervals include Wilson's interval for the effective number of items, given their clusters. For a lone network
    they are Wilson's. NaN for a single seed otherwise.
    """
    half = _half(result, lone)
    mean = result["mean"][:, 0]
    variance = result["joint"][:, 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        effective = np.where(variance > 0, mean * (1 - mean) / variance, result["clusters"][:, 0])
    low, high = wilson(mean, effective)
    is_single = lone & (result["n_seeds"][:, 0] == 1)
    low = np.where(is_single, low, np.fmin(mean - half, low))
    high = np.where(is_single, high, np.fmax(mean + half, high))
    ends = np.stack([low, high], axis=1)
    return np.where(np.isnan(half)[:, None], np.nan, ends)


def marks(pairs: Pairs, references: Mapping[int, int]) -> dict[int, str]:
    """Return whether rows are significantly better or worse than their references, or neither.

    With a probability of 95 %, no mark is a false positive.

    Args:
        pairs: the comparisons of all rows.
        references: the reference of each row to mark; references may differ, for example by budget.
    """
    rows, others = (np.array(x, dtype=int) for x in (list(references), list(references.values())))
    p, mean = pairs.p_alone[rows, others], pairs.mean[rows, others]
    if not len(rows):
        return {}
    degrees = pairs.freedom[rows, others]
    freedom = np.where(degrees > 0, degrees, MANY)  # a single seed has no degrees of freedom, and p is NaN
    with np.errstate(invalid="ignore"):
        significant = p <= critical_p(correlation(pairs.error**2, rows, others), freedom)
    words = np.where(significant, np.where(mean > 0, BETTER, WORSE), NOT_SIGNIFICANT)
    return dict(zip(rows.tolist(), words.tolist(), strict=True))


def correlation(variance: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return (J, J) correlations of J differences, rows minus others, from (R, R) variances of all differences.

    If a variance is unknown, two differences count as independent, which makes marks more conservative.
    """
    # Cov(a - b, c - d) = (Var(a - d) + Var(b - c) - Var(a - c) - Var(b - d)) / 2
    cross = variance[np.ix_(rows, others)]
    covariance = (cross + cross.T - variance[np.ix_(rows, rows)] - variance[np.ix_(others, others)]) / 2
    scale = np.sqrt(np.diag(covariance))
    with np.errstate(divide="ignore", invalid="ignore"):
        result = np.nan_to_num(covariance / np.outer(scale, scale), posinf=0.0, neginf=0.0)
    np.fill_diagonal(result, 1.0)
    # Variances that were pooled by pair need not form a covariance matrix: use the nearest positive definite one.
    values, vectors = np.linalg.eigh(result)
    result = (vectors * np.maximum(values, 1e-8)) @ vectors.T
    scale = np.sqrt(np.diag(result))
    return np.asarray(result / np.outer(scale, scale))


def critical_p(correlations: np.ndarray, freedom: np.ndarray) -> float:
    """Return the critical p-value for J differences: without real differences, 1 of 20 boards has a significant one.

    Args:
        correlations: (J, J) correlations of the differences.
        freedom: (J,) degrees of freedom of their errors.
    """
    rng, J = np.random.default_rng(0), len(correlations)
    normal = rng.standard_normal((DRAWS, J)) @ np.linalg.cholesky(correlations).T
    ratios = np.abs(normal) / np.sqrt(rng.chisquare(freedom, (DRAWS, J)) / freedom)

    # Bisection. A draw that is significant at `low` is so for every larger p, and a draw that is not significant at
    # `high` is not so for any smaller p. So each step tests only the draws that these two do not decide.
    low, high = 0.0, 1 - LEVEL
    n_significant = 0  # draws that are significant at `low`
    undecided = ratios
    for _ in range(30):
        middle = (low + high) / 2
        is_significant = (undecided > stdtrit(freedom, 1 - middle / 2)).any(axis=1)
        n_at_middle = n_significant + is_significant.sum()
        if n_at_middle / DRAWS > 1 - LEVEL:
            high = middle
            undecided = undecided[is_significant]
        else:
            low = middle
            n_significant = n_at_middle
            undecided = undecided[~is_significant]
    return low
