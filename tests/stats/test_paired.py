from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loops import rule_by_loops
from scipy import stats
from scipy.special import expit

from sparsebench.stats.paired import Results, compare, detectable, holm

RNG = np.random.default_rng


def contender(hits: np.ndarray, *, shared: bool = False, first: int = 0) -> Results:
    """Return a contender from (S, I) booleans."""
    return Results(
        {first + s: float(row.mean()) for s, row in enumerate(hits)},
        {first + s: ("same" if shared else f"items {first + s}", row) for s, row in enumerate(hits)},
    )


def drawn(R: int, S: int, I: int, seed: int = 0, p: float = 0.6) -> np.ndarray:
    return RNG(seed).random((R, S, I)) < p


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_the_step_down_procedure(p: list[float]) -> None:
    result, order = holm(np.array(p)), np.argsort(p, kind="stable")
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for step, index in enumerate(order):
            if p[index] > level / (len(p) - step):
                break
            rejected.add(int(index))
        close = {i for i in range(len(p)) if abs(result[i] - level) < 1e-12}
        assert {i for i in range(len(p)) if result[i] <= level} - close == rejected - close


def test_holm_ignores_pairs_without_p() -> None:
    np.testing.assert_array_equal(holm(np.array([0.01, np.nan, 0.04])), [0.02, np.nan, 0.04])


def test_a_pair_is_compared_seed_by_seed_and_item_by_item() -> None:
    hits = drawn(2, 4, 50)
    result = compare([contender(row) for row in hits])
    each = hits[0].mean(axis=1) - hits[1].mean(axis=1)
    low, high = stats.t.interval(0.95, 3, loc=each.mean(), scale=stats.sem(each))
    assert result.mean[0, 1] == pytest.approx(each.mean()) == -result.mean[1, 0]
    items = stats.t.ppf(0.975, 199) * item_error(hits[0].astype(float) - hits[1])
    assert result.half[0, 1] == pytest.approx(max((high - low) / 2, items)) == result.half[1, 0]
    assert result.p_seeds[0, 1] == pytest.approx(stats.ttest_rel(*hits.mean(axis=2)).pvalue)
    only = (hits[0] & ~hits[1]).sum(), (hits[1] & ~hits[0]).sum()
    assert result.p_items[0, 1] == pytest.approx(stats.binomtest(only[0], sum(only), 0.5).pvalue)
    assert result.n_seeds[0, 1] == 4
    assert result.p[0, 1] == pytest.approx(max(result.p_seeds[0, 1], result.p_items[0, 1]))


def item_error(difference: np.ndarray) -> float:
    """Return the standard error of the mean from (S, I) items alone, computed by loops."""
    S, I = difference.shape
    squares = (sum((x - row.mean()) ** 2 for x in row) / (I - 1) / I for row in difference)
    return float(sum(squares)) ** 0.5 / S


def test_only_common_seeds_are_compared() -> None:
    """Only seeds that both have are compared and other items are not paired."""
    hits = drawn(2, 4, 50, seed=1)
    result = compare([contender(hits[0]), contender(hits[1], first=2)])
    each = hits[0].mean(axis=1)[2:] - hits[1].mean(axis=1)[:2]
    assert result.mean[0, 1] == pytest.approx(each.mean()) and result.n_seeds[0, 1] == 2
    other = Results(found_means(hits[1]), {s: (f"other {s}", row) for s, row in enumerate(hits[1])})
    result = compare([contender(hits[0]), other])
    assert np.isnan(result.p_items[0, 1]) and not np.isnan(result.p_seeds[0, 1])
    assert result.p[0, 1] == result.p_seeds[0, 1]


def found_means(hits: np.ndarray) -> dict[int, float]:
    return {s: float(row.mean()) for s, row in enumerate(hits)}


def test_one_network_is_judged_by_its_items() -> None:
    hits = np.zeros((2, 1, 400), bool)
    hits[0, 0, :30] = True
    hits[1, 0, 20:26] = hits[1, 0, 100:104] = True
    result = compare([contender(row) for row in hits])
    only, other, n = 24.5, 4.5, 400 + 2  # Agresti and Min: half an item is added to each of the four cells
    mean = (only - other) / n
    half = stats.t.ppf(0.975, 399) * np.sqrt(((only + other) / n - mean**2) / n)
    assert result.mean[0, 1] == pytest.approx(0.05) and result.half[0, 1] == pytest.approx(half, rel=0.02)
    assert result.half.diagonal().tolist() == [0, 0] and np.isnan(result.p_seeds[0, 1])
    assert result.p[0, 1] == pytest.approx(stats.binomtest(4, 28).pvalue)
    low, high = stats.binomtest(30, 400).proportion_ci(method="wilson")
    assert result.accuracy[0].tolist() == pytest.approx([low, high], rel=0.005)


def test_a_contender_with_one_seed_has_no_interval_if_others_have_several() -> None:
    """An interval over items only would be narrower, because it does not include differences between networks."""
    several, alone = drawn(2, 3, 60, seed=9), drawn(1, 1, 60, seed=8)
    result = compare([*map(contender, several), contender(alone[0])])
    assert np.isnan(result.half[0, 2]) and np.isnan(result.accuracy[2]).all()
    assert not np.isnan(result.half[0, 1]) and not np.isnan(result.accuracy[:2]).any()


def test_outlying_contenders_do_not_affect_the_variance_of_others() -> None:
    hits = [contender(row) for row in drawn(7, 3, 200, seed=5)]
    unsteady = [Results({0: 0.9, 1: 0.1}, {}), contender(np.arange(2)[:, None] == np.zeros(200))]
    alone, beside = compare(hits), compare([*hits, *unsteady], outsiders=[7, 8])
    block = beside.among(range(7))
    for name in ("mean", "half", "p", "error", "overdispersion", "accuracy"):
        assert getattr(block, name) == pytest.approx(getattr(alone, name), nan_ok=True), name
    assert not np.isnan(beside.mean[0, 7])


def test_a_single_seed_is_judged_by_its_clusters_where_they_are_known() -> None:
    hits = np.repeat(drawn(2, 1, 30, seed=4), 5, axis=2)
    numbers = np.repeat(np.arange(30), 5)
    result = compare([replace(contender(row), clusters={0: numbers}) for row in hits])
    each = hits[0, 0, ::5].astype(float) - hits[1, 0, ::5]
    assert result.error[0, 1] == pytest.approx(stats.sem(each))
    error = np.sqrt(stats.sem(each) ** 2 + 1 / 30**2)  # half a cluster is added to each side
    assert result.p_items[0, 1] == pytest.approx(2 * stats.t.sf(abs(each.mean()) / error, 29)) == result.p[0, 1]
    assert result.half[0, 1] == pytest.approx(stats.t.ppf(0.975, 29) * error)


def test_contenders_without_a_common_seed_do_not_differ_significantly() -> None:
    result = compare([contender(np.ones((2, 9), bool)), contender(np.zeros((2, 9), bool), first=5)])
    assert np.isnan(result.mean[0, 1]) and result.ranks().tolist() == [[1, 2], [1, 2]]


def crossed_by_loops(difference: np.ndarray) -> tuple[float, float]:
    """Return the variance of the mean and degrees of freedom of (S, I) differences, from sums of squares in loops."""
    S, I = difference.shape
    grand = difference.mean()
    seeds = sum(I * (difference[s].mean() - grand) ** 2 for s in range(S)) / (S - 1)
    items = sum(S * (difference[:, i].mean() - grand) ** 2 for i in range(I)) / (I - 1)
    rest = sum(
        (difference[s, i] - difference[s].mean() - difference[:, i].mean() + grand) ** 2
        for s in range(S)
        for i in range(I)
    ) / ((S - 1) * (I - 1))
    items = max(0.0, items - rest)
    return (seeds + items) / (S * I), (seeds + items) ** 2 / (seeds**2 / (S - 1) + items**2 / (I - 1))


@pytest.mark.parametrize("seed", range(4))
def test_where_all_seeds_have_the_same_items_both_vary(seed: int) -> None:
    rng = RNG(seed)
    p = expit(rng.normal(0, 1, (2, 1, 30)) + rng.normal(0, 0.5, (2, 3, 1)))
    hits = rng.random((2, 3, 30)) < p
    result = compare([contender(row, shared=True) for row in hits])
    difference = hits[0].astype(float) - hits[1]
    variance, freedom = crossed_by_loops(difference)
    items = stats.t.ppf(0.975, 29) * item_error(difference.mean(axis=0, keepdims=True))
    assert result.half[0, 1] == pytest.approx(max(stats.t.ppf(0.975, freedom) * variance**0.5, items))


CLUSTERS = {
    "each item its own": np.arange(3 * 60).reshape(3, 60),
    "the same items": np.tile(np.arange(60), (3, 1)),
    "clusters": RNG(1).integers(0, 9, (3, 60)) + 100 * np.arange(3)[:, None],
    "the same clusters": RNG(2).integers(0, 15, (3, 60)),
}


@pytest.mark.parametrize("kind", CLUSTERS)
def test_strategies_of_a_board_are_judged_by_the_overdispersion_of_all(kind: str) -> None:
    rng, clusters = RNG(3), CLUSTERS[kind]
    hard = rng.normal(0, 1, 1 + clusters.max())[clusters]
    logits = hard + rng.normal(0, 0.4, (6, 3, 1)) + rng.normal(0, 0.3, (6, 1, 1))
    hits = rng.random((6, 3, 60)) < expit(logits)
    some = [contender(row, shared=kind == "the same items") for row in hits]
    if "clusters" in kind:
        some = [replace(row, clusters=dict(enumerate(clusters))) for row in some]
    result = compare(some)
    for i, j in combinations(range(6), 2):
        mean, variance, freedom = rule_by_loops(hits.astype(int), clusters, i, j)
        assert result.mean[i, j] == pytest.approx(mean)
        p = 2 * stats.t.sf(abs(mean) / variance**0.5, freedom)
        assert result.p_seeds[i, j] == pytest.approx(p, rel=1e-5)
        assert result.half[i, j] == pytest.approx(stats.t.ppf(0.975, freedom) * variance**0.5, rel=1e-5)
        assert result.error[i, j] == pytest.approx(variance**0.5, rel=1e-5)


def test_copies_of_items_add_no_information_if_clusters_are_known() -> None:
    hits = drawn(5, 3, 40, seed=2)
    copies = np.repeat(hits, 6, axis=2)
    numbers = np.repeat(np.arange(40), 6)
    clusters = {s: numbers + 40 * s for s in range(3)}
    once = compare([contender(row) for row in hits])
    known = compare([replace(contender(row), clusters=clusters) for row in copies])
    blind = compare([contender(row) for row in copies])
    for name in ("mean", "half", "error", "accuracy"):
        np.testing.assert_allclose(getattr(known, name), getattr(once, name), rtol=0.02, atol=1e-12)
    upper = np.triu_indices(5, 1)
    assert (known.p_items[upper] >= once.p_items[upper] * 0.5).all()
    assert (blind.p_items[upper] < known.p_items[upper]).all()


def test_lucky_seeds_do_not_make_an_interval_narrower() -> None:
    """Seeds that agree by luck do not make an interval narrower than its items."""
    hits = np.zeros((5, 3, 100), bool)
    for k in range(5):
        for s in range(3):
            hits[k, s, RNG([k, s]).permutation(100)[: 30 + 2 * k]] = True  # the same accuracy for each seed
    for some in (hits, hits[:2]):
        result = compare([contender(row) for row in some])
        items = item_error(some[0].astype(float) - some[1])
        assert result.half[0, 1] >= 1.96 * items and result.p[0, 1] > 0.05
        binomial = (0.3 * 0.7 / 300) ** 0.5
        assert result.accuracy[0, 1] - result.accuracy[0, 0] >= 2 * 1.95 * binomial
    low, high = stats.binomtest(90, 300).proportion_ci(method="wilson")
    assert result.accuracy[0].tolist() == pytest.approx([low, high], rel=0.02)


def test_an_accuracy_interval_covers_seeds_that_differ_much() -> None:
    """The interval of an accuracy is Student's where seeds differ more than items explain."""
    hits = np.stack([RNG(s).random(400) < rate for s, rate in enumerate((0.3, 0.5, 0.7))])
    means = hits.mean(axis=1)
    expected = stats.t.interval(0.95, 2, loc=means.mean(), scale=stats.sem(means))
    assert compare([contender(hits)]).accuracy[0].tolist() == pytest.approx(expected)
    alone = Results({s: float(x) for s, x in enumerate(means)}, {})
    assert compare([alone]).accuracy[0].tolist() == pytest.approx(expected)
    assert np.isnan(compare([Results({0: 0.3}, {})]).accuracy).all()


def test_an_accuracy_of_one_has_an_interval() -> None:
    low, high = compare([contender(np.ones((3, 50), bool))]).accuracy[0]
    assert low == pytest.approx(stats.binomtest(150, 150).proportion_ci(method="wilson").low) and high == 1


def test_the_detectable_difference_is_detected_in_four_of_five_pairs() -> None:
    hits = drawn(6, 4, 300, seed=5)
    hits[0] = RNG(1).random((4, 300)) < 0.05
    result = compare([contender(row) for row in hits])
    assert result.better().sum() == 5  # all others are better than the first, which leaves ten pairs
    least, power = result.least(), []
    for i, j in combinations(range(6), 2):
        edge = stats.t.ppf(1 - 0.05 / 10 / 2, result.freedom[i, j])
        power.append(stats.norm.cdf(least / result.error[i, j] - edge))
    assert np.mean(power) == pytest.approx(0.8, abs=1e-6)
    assert result.among([1, 2]).least() < result.least()  # fewer pairs
    assert np.isnan(compare([contender(hits[0])]).least())


def test_no_detectable_difference_above_the_largest_possible_one() -> None:
    hits = np.array([[[1] * 9, [0] * 9], [[0] * 9, [1] * 9]], dtype=bool)
    result = compare([contender(row) for row in hits])
    assert result.least() > 1
    assert (detectable(result) or "").startswith("no difference in accuracy is large enough")


def test_blocks_of_unlike_seeds_compare_as_pairs_do() -> None:
    hits = drawn(5, 6, 40, seed=3)
    some = [contender(row[: 3 + i % 3], first=i % 2) for i, row in enumerate(hits)]
    for three in combinations(some, 3):  # with more contenders, seeds are pooled
        whole = compare(three)
        for i in range(3):
            for j in range(3):
                pair = compare([three[i], three[j]])
                for name in ("mean", "half", "error", "freedom", "p_items", "p_seeds", "n_seeds"):
                    np.testing.assert_allclose(getattr(whole, name)[i, j], getattr(pair, name)[0, 1], atol=1e-12)
                np.testing.assert_allclose(whole.accuracy[i], pair.accuracy[0], atol=1e-12)
    whole = compare(some)
    for i in range(5):
        for j in range(5):
            pair = compare([some[i], some[j]])
            for name in ("mean", "p_items", "n_seeds"):
                np.testing.assert_allclose(getattr(whole, name)[i, j], getattr(pair, name)[0, 1], atol=1e-12)


def test_ranks_are_bounded_by_the_numbers_of_better_and_worse_contenders() -> None:
    rates = [0.9, 0.88, 0.7, 0.69, 0.3]
    hits = np.stack([RNG([7, k]).random((5, 400)) < rate for k, rate in enumerate(rates)])
    result = compare([contender(row) for row in hits])
    assert result.ranks().tolist() == [[1, 2], [1, 2], [3, 4], [3, 4], [5, 5]]
    assert result.among([2, 4]).ranks().tolist() == [[1, 1], [2, 2]]


def test_equal_contenders_do_not_differ_significantly() -> None:
    hits = drawn(1, 3, 30)[0]
    result = compare([contender(hits)] * 3)
    assert result.ranks().tolist() == [[1, 3]] * 3 and result.p[0, 1] == 1 and result.mean[0, 1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["items of each seed", "the same items"])
@pytest.mark.parametrize("S", [3, 5, 10])
def test_intervals_have_their_coverage_and_equals_do_not_differ(shared: bool, S: int) -> None:
    """Ten strategies with equal means over seeds and items, each better on some items and seeds."""
    rng = RNG([S, shared])
    pairs, covered, any_significant = np.triu_indices(10, 1), [], []
    for _ in range(150):
        of_items = rng.normal(0, 1, (1, 1 if shared else S, 300)) + rng.normal(0, 0.5, (10, 1 if shared else S, 300))
        hits = rng.random((10, S, 300)) < expit(of_items + rng.normal(0, 0.2, (10, S, 1)))
        result = compare([contender(row, shared=shared) for row in hits])
        covered.append((np.abs(result.mean) <= result.half)[pairs].mean())
        any_significant.append(result.better().any())
    assert 0.93 <= np.mean(covered) <= 0.985
    assert np.mean(any_significant) <= 0.08  # 5 % plus the sampling error of 150 worlds
