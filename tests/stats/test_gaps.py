from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from sparsebench.stats.curves import Groups, aligned_gaps, gap_reductions, worst_group
from sparsebench.stats.intervals import Interval
from sparsebench.stats.paired import Results

RNG = np.random.default_rng
GROUPS = np.arange(80) % 4
FITS = {0: 1, 1: -1, 2: -1, 3: 1}


def aligned_gap(strategy: Results, groups: Groups, lone: bool = False) -> Interval | None:
    return aligned_gaps([strategy], [groups], lone)[0]


def gap_reduction(strategy: Results, dense: Results, groups: Groups) -> Interval | None:
    return gap_reductions([strategy], dense, [groups])[0]


def contender(hits: np.ndarray, *, shared: bool = False) -> Results:
    return Results(
        {s: float(row.mean()) for s, row in enumerate(hits)},
        {s: ("same" if shared else f"items {s}", row) for s, row in enumerate(hits)},
    )


def groups(S: int) -> dict[int, np.ndarray]:
    return dict.fromkeys(range(S), GROUPS)


def gap_by_loops(values: np.ndarray) -> tuple[float, float]:
    """Return the gap of (I,) values and its variance over items, computed by group."""
    gap, variance = 0.0, 0.0
    for g, sign in FITS.items():
        mine = [float(x) for x, group in zip(values, GROUPS, strict=True) if group == g]
        mean = sum(mine) / len(mine)
        gap += sign * mean / 2
        variance += sum((x - mean) ** 2 for x in mine) / (len(mine) - 1) / len(mine) / 4
    return gap, variance


def check(result: Interval | None, values: np.ndarray) -> None:
    """Compare an interval with Student's over seeds and over items."""
    S = len(values)
    gaps, variances = zip(*map(gap_by_loops, values), strict=True)
    assert result is not None
    mean, low, high = result
    assert mean == pytest.approx(sum(gaps) / S)
    by_seeds = stats.t.ppf(0.975, S - 1) * stats.sem(gaps)
    by_items = stats.t.ppf(0.975, S * len(GROUPS) - 1) * sum(variances) ** 0.5 / S
    assert (low, high) == pytest.approx((mean - max(by_seeds, by_items), mean + max(by_seeds, by_items)), abs=2e-3)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_gap_is_aligned_minus_conflicting_accuracy(noise: float) -> None:
    rng = RNG(0)
    hits = rng.random((4, 80)) < np.array([0.9, 0.4, 0.5, 0.8])[GROUPS] + noise * rng.normal(0, 1, (4, 1)) * (
        GROUPS == 1
    )
    check(aligned_gap(contender(hits), groups(4)), hits.astype(float))


def test_the_reduction_of_the_gap_is_paired_by_seed_and_item() -> None:
    mine, dense = RNG(1).random((2, 4, 80)) < 0.6
    check(gap_reduction(contender(mine), contender(dense), groups(4)), dense.astype(float) - mine)
    fewer = contender(dense[:3])
    check(gap_reduction(contender(mine), fewer, groups(4)), dense[:3].astype(float) - mine[:3])
    other = Results(fewer.means, {s: (f"other {s}", hits) for s, (_, hits) in fewer.hits.items()})
    assert gap_reduction(contender(mine), other, groups(4)) is None


def test_the_gap_of_groups_that_are_alike_is_not_above_zero() -> None:
    gaps, worst = [], []
    for seed in range(200):
        hits = RNG(seed).random((3, 80)) < 0.7
        result = aligned_gap(contender(hits), groups(3))
        assert result is not None
        gaps.append(result[0])
        worst.append(hits.mean() - worst_group(contender(hits), groups(3)))
    assert abs(np.mean(gaps)) < 3 * stats.sem(gaps) and np.mean(worst) > 10 * stats.sem(worst)


def test_the_worst_group_is_that_of_the_mean_over_seeds() -> None:
    hits = np.zeros((2, 80), bool)
    for seed, right in enumerate(((20, 5, 10, 20), (20, 11, 4, 20))):
        for g, n in enumerate(right):
            hits[seed, np.flatnonzero(g == GROUPS)[:n]] = True
    assert worst_group(contender(hits), groups(2)) == pytest.approx(
        7 / 20
    )  # the mean of each seed's lowest is 4.5 of 20
    assert worst_group(contender(hits), {}) is None


@pytest.mark.parametrize("call", [
    lambda: aligned_gap(contender(np.ones((3, 80), bool)), {}),
    lambda: aligned_gap(contender(np.ones((3, 80), bool)), dict.fromkeys(range(3), np.zeros(80, dtype=int))),
    lambda: aligned_gap(Results({0: 0.5}, {}), groups(1)),
])  # fmt: skip
def test_there_is_no_gap_without_four_groups(call: Callable[[], Interval | None]) -> None:
    assert call() is None


def test_one_seed_has_no_interval() -> None:
    hits = RNG(3).random((1, 80)) < 0.5
    assert aligned_gap(contender(hits), groups(1)) == (
        pytest.approx(gap_by_loops(hits[0].astype(float))[0]),
        None,
        None,
    )


def clustered(hits: np.ndarray, numbers: np.ndarray) -> Results:
    """Return a contender whose item i of seed s shows foreground numbers[s, i]."""
    plain = contender(hits)
    return Results(plain.means, plain.hits, dict(enumerate(numbers)))


def test_the_interval_of_the_gap_covers_if_results_depend_on_foregrounds() -> None:
    """Eight networks, each tested on 400 images of the same 40 foregrounds; the results depend on the foreground."""
    S, group, covers = 8, np.arange(400) % 4, {True: 0, False: 0}
    for world in range(200):
        rng = RNG(world)
        hard = rng.normal(0, 0.25, (40, 2))
        numbers = np.array(
            [20 * (group // 2) + rng.integers(0, 20, 400) for _ in range(S)]
        )  # each foreground has one class
        hits = rng.random((S, 400)) < 0.5 + hard[numbers, group % 2]
        for known in covers:
            result = aligned_gap(clustered(hits, numbers) if known else contender(hits), dict.fromkeys(range(S), group))
            assert result is not None and result[1] is not None and result[2] is not None
            covers[known] += result[1] <= 0 <= result[2]
    assert covers[True] >= 184 > covers[False]


def test_several_gaps_equal_the_gaps_computed_separately() -> None:
    rng = RNG(5)
    hits, other = rng.random((3, 4, 80)) < 0.6, rng.random((4, 80)) < 0.6
    every = [*map(contender, hits), contender(other[:2], shared=True), Results({0: 0.5}, {})]
    of_each = [groups(4), {s: GROUPS[::-1].copy() for s in range(4)}, groups(3), groups(2), groups(1)]
    assert aligned_gaps(every, of_each) == [aligned_gap(*pair) for pair in zip(every, of_each, strict=True)]
    result = gap_reductions(every, every[0], of_each)
    for gap, strategy, known in zip(result, every, of_each, strict=True):
        assert gap == (None if gap is None else pytest.approx(gap_reduction(strategy, every[0], known)))
    assert len(set(result[:3])) == 3


def test_the_interval_of_a_gap_ends_at_one() -> None:
    hits = np.array([GROUPS % 3 == 0, (GROUPS % 3 == 0) & (np.arange(80) < 60)])
    result = aligned_gap(contender(hits), groups(2))
    assert result is not None and 0.8 < result[0] < 1 and result[2] == 1
