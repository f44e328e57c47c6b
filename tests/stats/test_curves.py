import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from sparsebench.stats.curves import area, crossing, kept_accuracy, least_macs, weights
from sparsebench.stats.paired import Results, compare

RNG = np.random.default_rng
SPENT = (0.31, 0.52, 0.85)


def contender(hits: np.ndarray, name: str = "items") -> Results:
    """Return a contender from (S, I) outcomes."""
    return Results(
        {s: float(row.mean()) for s, row in enumerate(hits)}, {s: (f"{name} {s}", row) for s, row in enumerate(hits)}
    )


def points(S: int = 3, I: int = 60, seed: int = 0) -> list[Results]:
    """Return contenders at the shares of SPENT, and dense; more MACs are better."""
    rng = RNG(seed)
    hard = rng.random((S, I))
    return [contender(hard + rng.normal(0, 0.03, (S, I)) < rate) for rate in (0.4, 0.6, 0.78, 0.78)]


def area_by_loops(x: list[float], y: list[float], lowest: float) -> float:
    """Return the mean height from `lowest` to 1 of the line through points, constant before the first point."""
    total, at, height = 0.0, lowest, y[0]
    for k in range(len(x) - 1):
        if x[k + 1] <= lowest:
            continue
        if x[k] <= lowest:
            height = y[k] + (y[k + 1] - y[k]) * (lowest - x[k]) / (x[k + 1] - x[k])
        else:
            total += (x[k] - at) * height
            at, height = x[k], y[k]
        total += (x[k + 1] - at) * (height + y[k + 1]) / 2
        at, height = x[k + 1], y[k + 1]
    return total / (1 - lowest)


@pytest.mark.parametrize("lowest", [0.3, 0.31, 0.4, 0.6, 0.9])
def test_the_area_is_that_of_each_items_own_line(lowest: float) -> None:
    some = points()
    result = area(some, SPENT, lowest)
    assert result is not None
    for s in range(3):
        lines = [area_by_loops([*SPENT, 1.0], [float(p.hits[s][1][i]) for p in some], lowest) for i in range(60)]
        np.testing.assert_allclose(result.hits[s][1], lines, atol=1e-12)
        assert result.means[s] == pytest.approx(sum(lines) / 60)
        assert result.hits[s][1].dtype == float and 0 <= result.hits[s][1].min() <= result.hits[s][1].max() <= 1


def test_weights_are_those_of_a_known_line() -> None:
    # From 0.5 to 1: constant up to the first point at 0.6, then linear to dense.
    np.testing.assert_allclose(weights([0.6], 0.5), [(0.1 + 0.2) / 0.5, 0.2 / 0.5])
    np.testing.assert_allclose(weights([0.5, 0.5], 0.5), [0.25, 0.25, 0.5])  # equal shares are averaged
    for spent in ([0.29], [0.29, 0.3, 0.31], [0.2, 0.9], [0.7, 0.95]):
        assert weights(spent, 0.3).sum() == pytest.approx(1)
    assert weights([0.1, 0.2], 0.4)[0] == 0  # points below do not count


def test_a_seed_without_all_points_and_other_items_are_left_out() -> None:
    *some, dense = points()
    less = replace(some[0], means={0: 0.5, 1: 0.5}, hits={0: some[0].hits[0], 1: ("other items", some[0].hits[1][1])})
    result = area([less, *some[1:], dense], SPENT, 0.3)
    assert result is not None and sorted(result.means) == [0, 1] and sorted(result.hits) == [0]
    assert area([replace(less, means={7: 0.5}), dense], [0.5], 0.3) is None


def test_kept_accuracy_is_the_area_over_dense_seed_by_seed() -> None:
    *some, dense = points()
    height = area([*some, dense], SPENT, 0.3)
    assert height is not None
    mean, low, high = kept_accuracy([height], dense)[0]
    ratios = [height.means[s] / dense.means[s] for s in range(3)]
    assert mean == pytest.approx(np.mean(ratios)) and low is not None and high is not None
    assert high - mean == pytest.approx(mean - low)
    errors = []
    for s in range(3):  # errors of a ratio of means, to first order
        z, d = height.hits[s][1], dense.hits[s][1]
        rest = [(z[i] - ratios[s] * d[i]) / dense.means[s] for i in range(60)]
        errors.append(sum(x**2 for x in rest) / 59 / 60)
    items = stats.t.ppf(0.975, 179) * math.sqrt(sum(errors)) / 3
    students = stats.t.ppf(0.975, 2) * np.std(ratios, ddof=1) / 3**0.5
    assert high - mean == pytest.approx(max(items, students), rel=1e-6)
    assert kept_accuracy([dense], dense) == [(1, 1, 1)]
    single = replace(height, means={0: height.means[0]})
    assert kept_accuracy([single], dense) == [(ratios[0], None, None)]


def test_the_least_macs_are_where_the_line_first_falls_below() -> None:
    result = crossing(
        [0.4, 0.6, 0.8],
        np.array([
            [0.10, 0.60, 0.70, 0.70],  # below .68 between .6 and .8: 4/5 of the way
            [0.69, 0.60, 0.70, 0.70],  # the curve is followed from 1 down, although it rises again below
            [0.68, 0.68, 0.68, 0.70],  # a loss of exactly two points counts as kept, despite rounding
            [0.99, 0.99, 0.10, 0.70],  # already below at the largest budget
        ]),
    )  # fmt: skip
    np.testing.assert_allclose(result, [0.76, 0.76, 0.4, np.inf])


def test_the_interval_of_the_least_macs_draws_seeds_and_items() -> None:
    some, few = points(S=4, I=4000), points(S=4, I=1000)
    value, low, high = least_macs(some, SPENT)
    assert low is not None and high is not None and 0.8 < low < value < high < 0.85
    assert (value, low, high) == least_macs(some, SPENT)
    _, lower, higher = least_macs(few, SPENT)
    assert lower is not None and higher is not None and higher - lower > high - low
    assert least_macs([replace(point, means={0: point.means[0]}) for point in some], SPENT)[1:] == (None, None)
    without = [replace(point, hits={}) for point in some]  # then only seeds are resampled
    _, lower, higher = least_macs(without, SPENT)
    assert lower is not None and higher is not None and 0 < higher - lower < high - low
    steady = [Results(dict.fromkeys(range(3), y), {}) for y in (0.5, 0.6, 0.69, 0.7)]
    assert least_macs(steady, SPENT) == pytest.approx((0.52 + 0.33 * 8 / 9,) * 3)


def test_items_of_a_cluster_are_drawn_together() -> None:
    apart = points(S=3, I=2000)
    copies = [contender(np.array([np.repeat(point.hits[s][1], 4) for s in range(3)])) for point in apart]
    clusters = {s: np.repeat(np.arange(2000), 4) + 2000 * s for s in range(3)}
    known = least_macs([*copies[:-1], replace(copies[-1], clusters=clusters)], SPENT)
    assert known == pytest.approx(least_macs(apart, SPENT))
    widths = [high - low for _, low, high in (known, least_macs(copies, SPENT)) if low is not None and high is not None]
    assert widths[0] > 1.3 * widths[1]


def test_real_scores_are_judged_by_students_t_of_the_items() -> None:
    scores = RNG(0).random((2, 3, 50)) ** np.array([1, 2])[:, None, None]
    result = compare([contender(values) for values in scores])
    difference = scores[0] - scores[1]
    variance = sum(values.var(ddof=1) / 50 for values in difference) / 9
    p = 2 * stats.t.sf(abs(difference.mean()) / variance**0.5, 149)
    assert result.p_items[0, 1] == pytest.approx(p)
    hits = scores > 0.5
    as_booleans, as_reals = (compare([contender(values) for values in kind]) for kind in (hits, hits.astype(float)))
    np.testing.assert_allclose(as_booleans.error, as_reals.error, atol=1e-12)
    only = (hits[0] & ~hits[1]).sum(), (hits[1] & ~hits[0]).sum()
    assert as_booleans.p_items[0, 1] == pytest.approx(stats.binomtest(only[0], sum(only), 0.5).pvalue)


def test_booleans_do_not_depend_on_real_scores_beside_them() -> None:
    """The comparison of booleans does not depend on real scores beside them."""
    hits = RNG(1).random((2, 3, 50)) < 0.6
    alone, beside = (
        compare([contender(values) for values in hits]),
        compare([contender(hits[0]), contender(hits[1]), contender(hits[0] * 0.5)]),
    )
    assert beside.p_items[0, 1] == alone.p_items[0, 1] and beside.p_items[0, 2] < 1


def test_equal_scores_have_no_variance_whatever_the_rounding() -> None:
    hits = RNG(2).random((3, 3, 999)) < 0.7
    first = (0.1 * hits[0] + 0.2 * hits[1]) + 0.7 * hits[2]
    same = 0.1 * hits[0] + (0.2 * hits[1] + 0.7 * hits[2])
    assert (first != same).any()
    result = compare([contender(values) for values in (first, same, hits[0].astype(float), hits[1].astype(float))])
    assert result.error[0, 1] < 1e-15 and result.p[0, 1] == 1 and np.isnan(result.overdispersion[0, 1])
