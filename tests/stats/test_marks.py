import numpy as np
import pytest
from scipy import stats

from sparsebench.stats.paired import Results, compare, correlation, critical_p, marks

RNG = np.random.default_rng


def contenders(hits: np.ndarray) -> list[Results]:
    return [
        Results(
            {s: float(x.mean()) for s, x in enumerate(rows)},
            {s: (f"items {s}", x) for s, x in enumerate(rows)},
        )
        for rows in hits
    ]


def test_correlations_of_differences_follow_from_variances() -> None:
    """Correlations of differences to one reference follow from variances."""
    covariance = np.cov(RNG(0).normal(0, 1, (6, 40)))
    variance = np.diag(covariance)[:, None] + np.diag(covariance) - 2 * covariance
    rows, others = np.array([1, 2, 3, 5]), np.array([0, 0, 4, 4])
    result = correlation(variance, rows, others)
    for j in range(4):
        for k in range(4):
            a, b, c, d = rows[j], others[j], rows[k], others[k]
            shared = covariance[a, c] - covariance[a, d] - covariance[b, c] + covariance[b, d]
            scale = (variance[a, b] * variance[c, d]) ** 0.5
            assert result[j, k] == pytest.approx(shared / scale, abs=1e-6)


def test_the_critical_value_is_dunnetts() -> None:
    """Dunnett 1964, table for many degrees of freedom, two-sided .95: 2 comparisons 2.21, 5 2.51, 9 2.69."""
    for J, value in ((1, 1.96), (2, 2.21), (5, 2.51), (9, 2.69)):
        p = critical_p(np.full((J, J), 0.5) + 0.5 * np.eye(J), np.full(J, 1e6))
        assert stats.norm.isf(p / 2) == pytest.approx(value, abs=0.04)
    assert critical_p(np.eye(20), np.full(20, 7.0)) == pytest.approx(1 - 0.95 ** (1 / 20), rel=0.1)  # Sidak's


def test_errors_of_few_degrees_of_freedom_make_the_critical_value_stricter() -> None:
    correlations = np.full((9, 9), 0.9) + 0.1 * np.eye(9)
    few, many = critical_p(correlations, np.full(9, 3.0)), critical_p(correlations, np.full(9, 1e6))
    assert 0.05 / 9 < few < 0.8 * many < 0.05


def test_differences_of_one_row_count_once() -> None:
    hits = RNG(0).random((9, 3, 200)) < 0.5
    hits[2:] = hits[1]
    pairs = compare(contenders(hits))
    copies = np.arange(1, 9)
    p = critical_p(correlation(pairs.error**2, copies, np.zeros(8, dtype=int)), np.full(8, 1e6))
    assert p == pytest.approx(0.05, abs=0.01)


def test_rows_are_marked_if_their_difference_is_significant() -> None:
    """Rows are marked if their difference is significant and reproducibly."""
    rates = [0.5, 0.5, 0.75, 0.25, 0.51]
    hits = np.stack([RNG(k).random((3, 400)) < rate for k, rate in enumerate(rates)])
    pairs = compare(contenders(hits))
    result, again = (marks(pairs, dict.fromkeys(range(1, 5), 0)) for _ in range(2))
    assert result == again == {1: "not significant", 2: "better", 3: "worse", 4: "not significant"}
    assert marks(pairs, {}) == {}


def test_a_difference_without_degrees_of_freedom_is_not_significant() -> None:
    pairs = compare(contenders(np.zeros((2, 1, 1), bool)))  # one item of one seed
    assert not pairs.freedom.any()
    assert marks(pairs, {1: 0}) == {1: "not significant"}


def test_rows_that_cannot_be_compared_are_not_marked() -> None:
    some = contenders(RNG(0).random((3, 3, 40)) < 0.5)
    other = Results({9: 0.9}, {})
    assert marks(compare([*some, other]), {1: 0, 2: 0, 3: 0})[3] == "not significant"


@pytest.mark.slow
def test_equal_strategies_are_rarely_marked() -> None:
    """Strategies equal to their reference are not marked in 95 of 100 boards."""
    marked = 0
    for seed in range(300):
        rng = RNG([seed, 1])
        hard = rng.normal(0, 1, (1, 3, 400)) + rng.normal(0, 0.5, (20, 3, 400)) + rng.normal(0, 0.1, (20, 3, 1))
        pairs = compare(contenders(rng.random((20, 3, 400)) < 1 / (1 + np.exp(-hard))))
        marked += set(marks(pairs, dict.fromkeys(range(1, 20), 0)).values()) != {"not significant"}
    assert marked <= stats.binom.ppf(0.975, 300, 0.05)
