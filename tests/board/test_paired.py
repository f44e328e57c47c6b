import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit

from sparsebench.board.paired import Contender, compare, holm, mcnemar

RNG = np.random.default_rng


def contender(hits: np.ndarray, *, shared: bool = False, first: int = 0) -> Contender:
    """Return a contender from (S, I) booleans."""
    return Contender(
        {first + s: float(one.mean()) for s, one in enumerate(hits)},
        {first + s: ("same" if shared else f"items {first + s}", one) for s, one in enumerate(hits)},
    )


def drawn(R: int, S: int, I: int, seed: int = 0, p: float = 0.6) -> np.ndarray:
    return RNG(seed).random((R, S, I)) < p


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_is_the_step_down_procedure(p: list[float]) -> None:
    found, order = holm(np.array(p)), np.argsort(p, kind="stable")
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for step, index in enumerate(order):
            if p[index] > level / (len(p) - step):
                break
            rejected.add(int(index))
        close = {i for i in range(len(p)) if abs(found[i] - level) < 1e-12}
        assert {i for i in range(len(p)) if found[i] <= level} - close == rejected - close


def test_holm_leaves_out_what_has_no_p() -> None:
    np.testing.assert_array_equal(holm(np.array([0.01, np.nan, 0.04])), [0.02, np.nan, 0.04])


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (0, 5), (3, 12), (7, 7), (40, 22)])
def test_mcnemar_is_the_binomial_test_of_the_items_that_one_alone_gets_right(b: int, c: int) -> None:
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar(np.array(b), np.array(c)) == pytest.approx(expected)


def test_a_pair_is_compared_seed_by_seed_and_item_by_item() -> None:
    hits = drawn(2, 4, 50)
    found = compare([contender(one) for one in hits])
    each = hits[0].mean(axis=1) - hits[1].mean(axis=1)
    low, high = stats.t.interval(0.95, 3, loc=each.mean(), scale=stats.sem(each))
    assert found.mean[0, 1] == pytest.approx(each.mean()) == -found.mean[1, 0]
    assert found.half[0, 1] == pytest.approx((high - low) / 2) == found.half[1, 0]
    assert found.p_seeds[0, 1] == pytest.approx(stats.ttest_rel(*hits.mean(axis=2)).pvalue)
    only = (hits[0] & ~hits[1]).sum(), (hits[1] & ~hits[0]).sum()
    assert found.p_items[0, 1] == pytest.approx(stats.binomtest(only[0], sum(only), 0.5).pvalue)
    assert found.n_seeds[0, 1] == 4
    assert found.p[0, 1] == pytest.approx(max(found.p_seeds[0, 1], found.p_items[0, 1]))


def test_only_seeds_that_both_have_are_compared_and_other_items_are_not_paired() -> None:
    hits = drawn(2, 4, 50, seed=1)
    found = compare([contender(hits[0]), contender(hits[1], first=2)])
    each = hits[0].mean(axis=1)[2:] - hits[1].mean(axis=1)[:2]
    assert found.mean[0, 1] == pytest.approx(each.mean()) and found.n_seeds[0, 1] == 2
    other = Contender(found_means(hits[1]), {s: (f"other {s}", one) for s, one in enumerate(hits[1])})
    found = compare([contender(hits[0]), other])
    assert np.isnan(found.p_items[0, 1]) and not np.isnan(found.p_seeds[0, 1])
    assert found.p[0, 1] == found.p_seeds[0, 1]


def found_means(hits: np.ndarray) -> dict[int, float]:
    return {s: float(one.mean()) for s, one in enumerate(hits)}


def test_a_single_seed_is_judged_by_its_items_and_has_no_interval() -> None:
    hits = np.zeros((2, 1, 40), bool)
    hits[0, 0, :30] = True
    found = compare([contender(one) for one in hits])
    assert np.isnan(found.half[0, 1]) and np.isnan(found.p_seeds[0, 1])
    assert found.p[0, 1] == pytest.approx(2 * 0.5**30) and found.rank_sets() == [(1, 1), (2, 2)]


def test_contenders_without_a_seed_in_common_are_not_told_apart() -> None:
    found = compare([contender(np.ones((2, 9), bool)), contender(np.zeros((2, 9), bool), first=5)])
    assert np.isnan(found.mean[0, 1]) and found.rank_sets() == [(1, 2), (1, 2)]


def crossed_by_loops(difference: np.ndarray) -> tuple[float, float]:
    """Return variance of the mean and degrees of freedom of (S, I) differences, from sums of squares one by one."""
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
    found = compare([contender(one, shared=True) for one in hits])
    variance, freedom = crossed_by_loops(hits[0].astype(float) - hits[1])
    assert found.half[0, 1] == pytest.approx(stats.t.ppf(0.975, freedom) * variance**0.5)


def test_blocks_of_unlike_seeds_compare_as_pairs_do() -> None:
    hits = drawn(5, 6, 40, seed=3)
    some = [contender(one[: 3 + i % 3], first=i % 2) for i, one in enumerate(hits)]
    whole = compare(some)
    for i in range(5):
        for j in range(5):
            pair = compare([some[i], some[j]])
            for name in ("mean", "half", "least", "p_items", "p_seeds", "n_seeds"):
                np.testing.assert_allclose(getattr(whole, name)[i, j], getattr(pair, name)[0, 1], atol=1e-12)


def test_rank_sets_are_bounded_by_those_that_are_told_to_be_better_and_worse() -> None:
    rates = [0.9, 0.88, 0.7, 0.69, 0.3]
    hits = np.stack([RNG([7, k]).random((5, 400)) < rate for k, rate in enumerate(rates)])
    found = compare([contender(one) for one in hits])
    assert found.rank_sets() == [(1, 2), (1, 2), (3, 4), (3, 4), (5, 5)]
    assert found.among([2, 4]).rank_sets() == [(1, 1), (2, 2)]


def test_equals_are_not_told_apart() -> None:
    hits = drawn(1, 3, 30)[0]
    found = compare([contender(hits)] * 3)
    assert found.rank_sets() == [(1, 3)] * 3 and found.p[0, 1] == 1 and found.mean[0, 1] == 0


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["items of each seed", "the same items"])
@pytest.mark.parametrize("S", [3, 5, 10])
def test_intervals_cover_what_they_say_and_equals_have_no_winner(shared: bool, S: int) -> None:
    """Ten strategies that are equal in the mean over seeds and items, each better on some items and seeds."""
    rng = RNG([S, shared])
    pairs, covered, told = np.triu_indices(10, 1), [], []
    for _ in range(150):
        of_items = rng.normal(0, 1, (1, 1 if shared else S, 300)) + rng.normal(0, 0.5, (10, 1 if shared else S, 300))
        hits = rng.random((10, S, 300)) < expit(of_items + rng.normal(0, 0.2, (10, S, 1)))
        found = compare([contender(one, shared=shared) for one in hits])
        covered.append((np.abs(found.mean) <= found.half)[pairs].mean())
        told.append(found.better().any())
    assert 0.93 <= np.mean(covered) <= 0.97
    assert np.mean(told) <= 0.08  # 5 %, and what 150 worlds leave open
