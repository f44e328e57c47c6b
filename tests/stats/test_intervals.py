import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sparsebench.stats import intervals
from sparsebench.stats.intervals import (
    Interval,
    Successes,
    bootstrap_means,
    half_success,
    mean_interval,
    percentiles,
    wilson,
)

INFINITY = float("inf")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_the_interval_is_students(values: list[float]) -> None:
    mean, low, high = mean_interval(values)
    assert mean == pytest.approx(np.mean(values))
    error = stats.sem(values)
    if error > 1e-9:
        expected = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert (low, high) == pytest.approx(expected)
    else:
        assert (low, high) == pytest.approx((mean, mean), abs=1e-6)


def test_one_value_has_no_interval() -> None:
    assert mean_interval([0.25]) == (0.25, None, None)


@pytest.mark.parametrize("n", [1, 5, 13, 143])
def test_wilsons_interval_is_that_of_scipy(n: int) -> None:
    for hits in range(n + 1):
        expected = stats.binomtest(hits, n).proportion_ci(method="wilson")
        low, high = wilson(np.float64(hits / n), np.float64(n))
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12) and low <= hits / n <= high


def n50(sizes: list[int], *rates: float) -> float:
    (value,) = half_success(np.array(sizes), np.array([rates]))
    return float(value)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        pytest.param((0.5, 0.6, 1), 10, id="never below one half"),
        pytest.param((1, 1, 1), 10, id="always one"),
        pytest.param((0, 0, 0), INFINITY, id="always zero"),
        pytest.param((0, 0, 0.49), INFINITY, id="never above"),
        pytest.param((1, 1, 0.4), INFINITY, id="below at the largest size"),
        pytest.param((0, 1, 1), 10 * 10**0.5, id="half way in the logarithm"),
        pytest.param((0, 0.5, 1), 100, id="exactly one half at a size"),
        pytest.param((0, 0.25, 0.75), 100 * 10**0.5, id="between the last two"),
        pytest.param((0.4, 0.9, 1), 10 * 10 ** (0.1 / 0.5), id="a fifth of the way"),
        pytest.param((1, 0, 1), 100 * 10**0.5, id="the last crossing counts"),
        pytest.param((0.5, 0.2, 0.8), 100 * 10**0.5, id="up, down and up"),
    ],
)
def test_the_sample_size_for_half_of_the_trials(rates: tuple[float, ...], expected: float) -> None:
    assert n50([10, 100, 1000], *rates) == pytest.approx(expected)


def sample_complexity(result: dict[int, dict[int, float]]) -> Interval:
    return intervals.sample_complexity(Successes.of_nested(result))


def ratio(a: dict[int, dict[int, float]], b: dict[int, dict[int, float]]) -> Interval:
    return intervals.n50_ratio(Successes.of_nested(a), Successes.of_nested(b))


def trials(*successes: str) -> dict[int, dict[int, float]]:
    """Return trials at sizes 4, 8, 16, ... from a string of 0 and 1 for each repetition."""
    return {k: {4 * 2**j: float(x) for j, x in enumerate(word)} for k, word in enumerate(successes)}


def test_the_sample_complexity_is_that_of_the_mean_success() -> None:
    value, low, high = sample_complexity(trials("011", "001", "001", "111"))
    # At 8, half of the trials succeed.
    assert value == pytest.approx(8)
    assert low is not None and high is not None and 4 <= low <= value <= high <= 16


@pytest.mark.parametrize(
    ("successes", "expected"),
    [
        # 1 of 27 samples has the best repetition three times, and 1 the worst; these are the extremes.
        (("011", "001", "111"), (32**0.5, 4, 128**0.5)),
        (("000", "001", "000"), (INFINITY, 128**0.5, INFINITY)),
        (("000", "000"), (INFINITY, INFINITY, INFINITY)),
        (("011",), (32**0.5, None, None)),
    ],
)
def test_the_interval_resamples_whole_repetitions(successes: tuple[str, ...], expected: Interval) -> None:
    assert sample_complexity(trials(*successes)) == pytest.approx(expected)


@pytest.mark.parametrize(
    "more", [{9: {4: 1.0, 8: 1.0}}, {0: {4: 0.0, 8: 0.0, 16: 1.0, 512: 1.0}}], ids=["lacks a size", "has one alone"]
)
def test_order_and_incomplete_sizes_do_not_matter(more: dict[int, dict[int, float]]) -> None:
    whole = trials("001", "011", "001", "001", "001")
    assert sample_complexity(dict(reversed((whole | more).items()))) == sample_complexity(whole)


def test_the_interval_of_many_repetitions_equals_that_of_all_resamples() -> None:
    result = trials(*["0011", "0111", "0001", "0011", "0101", "0011", "1111", "0001"] * 5)
    wins = np.array([list(successes.values()) for successes in result.values()])
    rng = np.random.default_rng(5)
    rates = np.array([wins[rng.integers(0, 40, 40)].mean(axis=0) for _ in range(20000)])
    drawn = half_success(np.array([4, 8, 16, 32]), rates)
    tail = stats.norm.cdf(-stats.t.ppf(0.975, 39) * (40 / 39) ** 0.5)
    assert sample_complexity(result)[1:] == pytest.approx(tuple(np.quantile(drawn, [tail, 1 - tail])), rel=0.03)


def test_ratios_with_an_n50_that_is_not_reached() -> None:
    reached, never = trials("011", "001", "011"), trials("000", "000", "000")
    assert ratio(reached, reached) == (1, 1, 1)
    assert ratio(never, reached)[0] == INFINITY and ratio(reached, never)[0] == 0
    assert ratio(never, never) == (1, 1, 1)  # they do not differ


def test_the_ratio_is_of_the_repetitions_that_both_have_resampled_together() -> None:
    a, b = trials("0111", "0011", "0111", "0111"), trials("0011", "0001", "0011", "0011")
    value, low, high = ratio(a, b)  # N50 is half of that of b in each repetition
    assert (value, low, high) == pytest.approx((0.5, 0.5, 0.5))
    two = {seed: successes for seed, successes in b.items() if seed < 2}
    assert ratio(a, two) == ratio(trials("0111", "0011"), trials("0011", "0001"))
    assert np.isnan(ratio(a, {9: {4: 1.0}})[0])
    assert ratio(trials("011"), trials("001")) == (pytest.approx(0.5), None, None)  # one repetition has no interval


@pytest.mark.slow
@pytest.mark.parametrize("n", [10, 20, 60])
def test_intervals_of_n50_cover_it_about_as_often_as_they_say(n: int) -> None:
    rng, sizes = np.random.default_rng(n), np.array([4, 8, 16, 32, 64, 128, 256])
    rates = 1 / (1 + np.exp(-1.5 * (np.log2(sizes) - 4.5)))
    true, covered = half_success(sizes, rates[None])[0], 0
    for _ in range(600):
        wins = (rng.random((n, 7)) < rates).astype(float)
        _, low, high = intervals.sample_complexity(Successes(sizes, np.arange(n), wins))
        assert low is not None and high is not None
        covered += low <= true <= high
    assert 0.92 <= covered / 600 <= 0.995  # grids of few trials have few different values


def test_percentiles_are_values_that_occurred_and_ignore_nan() -> None:
    values, many, nan = np.arange(1.0, 101.0), 10**9, float("nan")
    assert percentiles(values, many) == percentiles(np.append(values, [nan] * 50), many) == (3, 98)
    assert percentiles(np.append(values[:90], [INFINITY] * 10), many) == (3, INFINITY)
    assert np.isnan([percentiles(np.full(5, nan), many), percentiles(values[:0], many), percentiles(values, 1)]).all()


def test_percentiles_of_few_repetitions_are_more_extreme() -> None:
    values = np.linspace(0, 1, 100001)
    for n in (5, 10, 50):
        tail = stats.norm.cdf(-stats.t.ppf(0.975, n - 1) * (n / (n - 1)) ** 0.5)
        assert tail < 0.025 and percentiles(values, n) == pytest.approx((tail, 1 - tail), abs=1e-4)


def test_bootstrap_means_are_of_rows_drawn_together() -> None:
    values = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    means = bootstrap_means(values)
    np.testing.assert_allclose(means[:, 1], 10 * means[:, 0])
    possible = {(a + b + c) / 3 for a in (1, 2, 4) for b in (1, 2, 4) for c in (1, 2, 4)}
    assert set(np.round(means[:, 0], 9)) == set(np.round(list(possible), 9))
    other = bootstrap_means(values, 1)
    assert (bootstrap_means(values) == means).all() and abs(np.corrcoef(means[:, 0], other[:, 0])[0, 1]) < 0.1
    assert np.isnan(bootstrap_means(values[:1])).all() and bootstrap_means(values[:0, 0]).shape == means[:, 0].shape


def test_without_one_whole_repetition_there_is_no_number() -> None:
    value, low, high = sample_complexity({0: {4: 0.0}, 1: {8: 1.0}})
    assert np.isnan(value) and low is None and high is None
