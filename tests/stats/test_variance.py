import math

import numpy as np
import pytest
from loops import item_variance_by_loops, overdispersion_by_loops, prior_by_loops, shrink_by_loops
from scipy import stats
from scipy.special import polygamma

from sparsebench.stats.variance import (
    FEWEST,
    about_mean,
    half_width,
    inverse_trigamma,
    item_parts,
    item_variance,
    overdispersion,
    prior,
    satterthwaite,
    shrink,
    squared_differences,
)

RNG = np.random.default_rng


@pytest.mark.parametrize("seed", range(4))
def test_the_variance_of_a_difference_is_that_of_its_clusters(seed: int) -> None:
    rng = RNG(seed)
    hits = rng.integers(0, 2, (5, 40))
    clusters = np.arange(40) if seed == 0 else rng.integers(0, 9, 40)
    names, place, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    counts = np.array([[int(one[place == c].sum()) for c in range(len(names))] for one in hits], dtype=float)
    left, right = counts[:2], counts[2:]
    variances = item_variance(left, right, sizes.astype(float), squared_differences(left, right))
    for i in range(2):
        for j in range(3):
            expected = item_variance_by_loops(hits[i].tolist(), hits[2 + j].tolist(), clusters.tolist())
            assert variances[i, j] == pytest.approx(expected, rel=1e-12)
    if seed == 0:
        difference = hits[0] - hits[2]
        assert variances[0, 0] == pytest.approx(difference.var(ddof=1) / 40)


def test_strategies_that_predict_the_same_have_no_variance_and_one_cluster_says_nothing() -> None:
    counts = RNG(0).integers(0, 7, (1, 50)).astype(np.float32)
    sizes = np.full(50, 7, dtype=np.float32)
    assert item_variance(counts, counts, sizes, squared_differences(counts, counts)) == 0
    assert np.isnan(item_variance(counts[:, :1], counts[:, :1], sizes[:1], np.zeros((1, 1)))).all()


def test_what_items_explain_is_parted_as_in_an_analysis_of_variance() -> None:
    S, I = 4, 30
    x = RNG(1).normal(0, 1, (S, I)) + RNG(2).normal(0, 2, (1, I))
    grand = sum(x[s, i] for s in range(S) for i in range(I)) / (S * I)
    by_seed = [sum(x[s]) / I for s in range(S)]
    by_item = [sum(x[:, i]) / S for i in range(I)]
    apart = sum((x[s, i] - by_seed[s]) ** 2 for s in range(S) for i in range(I)) / ((I - 1) * I * S**2)
    together = sum((one - grand) ** 2 for one in by_item) / ((I - 1) * I)
    left_over = sum((x[s, i] - by_seed[s] - by_item[i] + grand) ** 2 for s in range(S) for i in range(I))
    noise = left_over / ((S - 1) * (I - 1))
    main = (S * sum((one - grand) ** 2 for one in by_item) / (I - 1) - noise) / S
    rest, effect = item_parts(np.array(apart), np.array(together), np.array(S))
    assert float(rest) == pytest.approx(noise / (S * I)) and float(effect) == pytest.approx(main / I)
    rest, effect = item_parts(np.array(apart), np.array(apart), np.array(S))  # no two seeds share any
    assert float(rest) == pytest.approx(apart) and float(effect) == pytest.approx(0, abs=1e-15)


def test_degrees_of_freedom_are_satterthwaites() -> None:
    variance, freedom = satterthwaite((np.array([2.0, 0.0]), np.array([3.0, 4.0])), (np.array([1.0, 0.0]), 10.0))
    assert variance.tolist() == [3, 0]
    assert freedom.tolist() == pytest.approx([3**2 / (2**2 / 3 + 1**2 / 10), 4])


def test_satterthwaites_freedom_is_that_of_simulated_sums() -> None:
    rng = RNG(0)
    parts = [(2.0, 3.0), (1.0, 5.0)]
    drawn = sum(variance * rng.chisquare(d, 200_000) / d for variance, d in parts)
    _, freedom = satterthwaite(*((np.array(v), np.array(d)) for v, d in parts))
    assert 2 * drawn.mean() ** 2 / drawn.var() == pytest.approx(float(freedom), rel=0.03)


@pytest.mark.parametrize("x", [0.01, 0.3, 1.0, 7.5, 4000.0])
def test_the_trigamma_function_is_inverted(x: float) -> None:
    assert inverse_trigamma(float(polygamma(1, x))) == pytest.approx(x)


@pytest.mark.parametrize(("seed", "d0"), [(0, 3.0), (1, 20.0), (2, math.inf)])
def test_the_prior_is_that_of_the_moments(seed: int, d0: float) -> None:
    rng = RNG(seed)
    freedom = rng.integers(2, 5, 60).astype(float)
    real = np.ones(60) if math.isinf(d0) else d0 / rng.chisquare(d0, 60)
    ratios = 1.7 * real * rng.chisquare(freedom) / freedom
    assert prior(ratios, freedom) == pytest.approx(prior_by_loops(ratios.tolist(), freedom.tolist()), rel=1e-6)


def test_the_prior_of_many_is_what_they_were_drawn_from() -> None:
    rng = RNG(3)
    ratios = 2.5 * 6 / rng.chisquare(6, 20_000) * rng.chisquare(2, 20_000) / 2
    centre, d0 = prior(ratios, np.full(20_000, 2.0))
    assert centre == pytest.approx(2.5, rel=0.05) and d0 == pytest.approx(6, rel=0.1)
    centre, d0 = prior(2.5 * rng.chisquare(2, 20_000) / 2, np.full(20_000, 2.0))
    assert centre == pytest.approx(2.5, rel=0.05) and d0 > 40


@pytest.mark.parametrize("d0", [3.0, 1e6])
def test_overdispersions_are_pulled_towards_the_prior_never_below_one_or_what_was_seen(d0: float) -> None:
    rng = RNG(4)
    ratios = 1.5 * d0 / rng.chisquare(d0, 40) * rng.chisquare(2, 40) / 2
    ratios[9] = np.nan  # a pair without a seed in common
    factors, freedom = shrink(ratios, np.full(40, 2.0))
    rest = np.delete(np.arange(40), 9)
    expected = shrink_by_loops(ratios[rest].tolist(), 2.0)
    np.testing.assert_allclose(factors[rest], [x for x, _ in expected], rtol=1e-6)
    np.testing.assert_allclose(freedom[rest], [x for _, x in expected], rtol=1e-5)
    assert np.isnan(factors[9]) and np.isnan(freedom[9])
    assert (factors[rest] >= np.maximum(1, ratios[rest])).all()


def test_a_few_are_not_pooled() -> None:
    factors, freedom = shrink(np.array([1.0, 2.0, 3.0, np.nan]), np.full(4, 2.0))
    assert np.isnan(factors).all() and np.isnan(freedom).all()
    assert np.isfinite(shrink(np.arange(1.0, 1 + FEWEST), np.full(FEWEST, 2.0))[0]).all()


def test_variances_about_the_mean_follow_from_those_of_differences() -> None:
    x = RNG(5).normal(0, 1, (6, 9))
    squares = np.array([[(one - other).var(ddof=1) for other in x] for one in x])
    np.testing.assert_allclose(about_mean(squares), (x - x.mean(axis=0)).var(axis=1, ddof=1))


@pytest.mark.parametrize("unsteady", [0.0, 3.0])
def test_the_larger_overdispersion_of_pair_and_strategies_counts_with_the_fewer_degrees_of_freedom(
    unsteady: float,
) -> None:
    rng, R, S, I = RNG(6), 9, 3, 200
    noise = 0.03 * np.exp(unsteady * (np.arange(R) < 2))
    accuracy = rng.normal(0, 1, (R, S)) * noise[:, None]
    accuracy[1] = accuracy[0] + 0.1  # seeds that differ by exactly the same
    outcomes = rng.normal(0, 0.5, (R, S, I))
    between, items = np.zeros((2, R, R))
    for i in range(R):
        for j in range(R):
            between[i, j] = (accuracy[i] - accuracy[j]).var(ddof=1) / S
            items[i, j] = sum((outcomes[i, s] - outcomes[j, s]).var(ddof=1) for s in range(S)) / I / S**2
    factors, freedom = overdispersion(between, items, np.full((R, R), S), np.full((R, R), I))
    expected = overdispersion_by_loops(between, items, S, I)
    np.testing.assert_allclose(factors, expected[0], rtol=1e-6)
    np.testing.assert_allclose(freedom, expected[1], rtol=1e-5)


def test_intervals_are_never_narrower_than_seeds_or_items_ask_for() -> None:
    S, C, zero = np.array(3), np.array(100), np.array(0.0)
    t = stats.t.ppf
    by_items = half_width(zero, np.array(1e-4), np.array(1e-4), S, C)
    assert float(by_items) == pytest.approx(t(0.975, 99) * 0.01)
    by_seeds = half_width(np.array(1e-4), np.array(1e-6), np.array(1e-6), S, C)
    assert float(by_seeds) == pytest.approx(t(0.975, 2) * 0.01)
    unknown = half_width(np.array(1e-4), np.array(np.nan), np.array(np.nan), S, np.array(np.nan))
    assert float(unknown) == pytest.approx(t(0.975, 2) * 0.01)
    assert np.isnan(half_width(np.array(np.nan), np.array(1e-4), np.array(1e-4), np.array(1), C))
