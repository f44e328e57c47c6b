import numpy as np
import pytest
from loops import overdispersion_by_loops

from sparsebench.stats.variance import (
    FEWEST,
    item_variance,
    overdispersion,
    prior,
    shrink,
    squared_differences,
)

RNG = np.random.default_rng


def test_equal_predictions_have_no_variance() -> None:
    """Strategies that predict the same have no variance and one cluster says nothing."""
    counts = RNG(0).integers(0, 7, (1, 50)).astype(np.float32)
    sizes = np.full(50, 7, dtype=np.float32)
    assert item_variance(counts, counts, sizes, squared_differences(counts, counts)) == 0
    assert np.isnan(item_variance(counts[:, :1], counts[:, :1], sizes[:1], np.zeros((1, 1)))).all()


def test_the_prior_of_many_ratios_is_the_distribution_they_were_drawn_from() -> None:
    rng = RNG(3)
    ratios = 2.5 * 6 / rng.chisquare(6, 20_000) * rng.chisquare(2, 20_000) / 2
    centre, d0 = prior(ratios, np.full(20_000, 2.0))
    assert centre == pytest.approx(2.5, rel=0.05) and d0 == pytest.approx(6, rel=0.1)
    centre, d0 = prior(2.5 * rng.chisquare(2, 20_000) / 2, np.full(20_000, 2.0))
    assert centre == pytest.approx(2.5, rel=0.05) and d0 > 40


def test_few_ratios_are_not_pooled() -> None:
    factors, freedom = shrink(np.array([1.0, 2.0, 3.0, np.nan]), np.full(4, 2.0))
    assert np.isnan(factors).all() and np.isnan(freedom).all()
    assert np.isfinite(shrink(np.arange(1.0, 1 + FEWEST), np.full(FEWEST, 2.0))[0]).all()


@pytest.mark.parametrize("unsteady", [0.0, 3.0])
def test_the_larger_overdispersion_counts(
    unsteady: float,
) -> None:
    """The larger overdispersion of pair and strategies counts with the fewer degrees of freedom."""
    rng, R, S, I = RNG(6), 9, 3, 200
    noise = 0.03 * np.exp(unsteady * (np.arange(R) < 2))
    accuracy = rng.normal(0, 1, (R, S)) * noise[:, None]
    accuracy[1] = accuracy[0] + 0.1  # the difference is the same in all seeds
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
