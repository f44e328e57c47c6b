import itertools
import math

import numpy as np
import pytest
from scipy.stats import spearmanr

from sparsebench.measure.selection import expected_iou, iou, rank_correlation

RNG = np.random.default_rng(0)


def kept(*rows: str) -> np.ndarray:
    return np.array([[letter == "x" for letter in row] for row in rows])


def test_iou_is_what_sets_of_patches_have_in_common() -> None:
    a, b = RNG.random((50, 12)) < 0.4, RNG.random((50, 12)) < 0.6
    expected = []
    for one, other in zip(a, b, strict=True):
        first, second = set(np.flatnonzero(one)), set(np.flatnonzero(other))
        expected.append(len(first & second) / len(first | second))
    assert iou(a, b).tolist() == expected


def test_iou_is_0_where_one_keeps_nothing_and_undefined_where_both_do() -> None:
    found = iou(kept("xx.", "...", "..."), kept("...", ".x.", "..."))
    assert found[:2].tolist() == [0, 0] and math.isnan(found[2])


def test_expected_iou_is_the_mean_over_all_pairs_of_choices() -> None:
    N = 6
    choices = {k: [set(c) for c in itertools.combinations(range(N), k)] for k in range(N + 1)}
    for k, m in itertools.product(range(N + 1), repeat=2):
        a, b = kept("x" * k + "." * (N - k)), kept("." * (N - m) + "x" * m)
        pairs = [(x, y) for x in choices[k] for y in choices[m]]
        if k == m == 0:
            assert np.isnan(expected_iou(a, b)).all()
        else:
            mean = math.fsum(len(x & y) / len(x | y) for x, y in pairs) / len(pairs)
            assert expected_iou(a, b)[0] == pytest.approx(mean, abs=1e-12)


def test_expected_iou_is_that_of_each_samples_own_numbers() -> None:
    a, b = kept("x...", "xx..", "x...", "xxxx"), kept("..xx", "xxx.", "xx..", "xxxx")
    found = expected_iou(a, b)
    assert found.tolist() == [expected_iou(a[i : i + 1], b[i : i + 1])[0] for i in range(4)]
    assert found[0] == found[2] != found[1] and found[3] == 1


def test_random_choices_have_the_expected_iou() -> None:
    n, N = 4000, 196
    a, b = (RNG.random((n, N)).argsort(axis=1) < k for k in (98, 60))
    found = iou(a, b)
    assert abs(found.mean() - expected_iou(a, b).mean()) < 4 * found.std() / n**0.5


def test_rank_correlation_is_scipys_over_the_tokens_that_both_scores_have() -> None:
    a, b = (RNG.integers(0, 6, (40, 15)).astype(np.float32) for _ in range(2))  # with ties
    a[RNG.random(a.shape) < 0.3], b[RNG.random(b.shape) < 0.3] = np.nan, np.nan
    a[0, 1] = -np.inf
    found = rank_correlation(a, b)
    for x, y, rho in zip(a, b, found, strict=True):
        there = ~(np.isnan(x) | np.isnan(y))
        assert rho == pytest.approx(spearmanr(x[there], y[there]).statistic, abs=1e-12)


def test_rank_correlation_is_undefined_for_equal_scores_and_for_a_single_token() -> None:
    nan = np.nan
    a = np.array([[1, 1, 1.0], [1, 2, 3], [nan, 2, nan], [nan, nan, nan]])
    b = np.array([[1, 2, 3.0], [nan, 2, nan], [1, 2, 3], [1, 2, 3]])
    assert np.isnan(rank_correlation(a, b)).all()
