import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from sparsebench.measure.selection import auroc, precision_recall, token_spuriosity


def by_pairs(scores, relevant):
    """Return the share of (relevant, irrelevant) pairs in the right order, ties one half; None without pairs."""
    pairs = [(p > q) + 0.5 * (p == q) for p in scores[relevant] for q in scores[~relevant]]
    return sum(pairs) / len(pairs) if pairs else None


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 9))
@settings(deadline=None)
def test_auroc_is_the_mean_share_of_pairs_in_the_right_order(seed, n, N):
    rng = np.random.default_rng(seed)
    scores, relevant = rng.integers(0, 4, (n, N)).astype(float), rng.random((n, N)) < 0.4
    each = [a for a in map(by_pairs, scores, relevant) if a is not None]
    assert auroc(scores, relevant) == pytest.approx(np.mean(each) if each else math.nan, nan_ok=True)


def test_auroc_of_one_sample_is_scikit_learns():
    rng = np.random.default_rng(0)
    scores, relevant = rng.normal(size=(1, 50)), rng.random((1, 50)) < 0.3
    assert auroc(scores, relevant) == pytest.approx(roc_auc_score(relevant[0], scores[0]))


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 9))
@settings(deadline=None)
def test_auroc_is_of_the_tokens_that_are_there(seed, n, N):
    rng = np.random.default_rng(seed)
    scores, relevant = rng.integers(0, 4, (n, N)).astype(np.float32), rng.random((n, N)) < 0.4
    there = rng.random((n, N)) < 0.7
    each = [by_pairs(s[t], r[t]) for s, r, t in zip(scores, relevant, there, strict=True)]
    each = [a for a in each if a is not None]
    found = auroc(np.where(there, scores, np.nan), relevant)
    assert found == pytest.approx(np.mean(each) if each else math.nan, nan_ok=True)


def test_samples_without_two_kinds_of_tokens_say_nothing():
    scores = np.array([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])
    relevant = np.array([[True, True], [True, False], [False, False]])
    assert auroc(scores, relevant) == 1
    assert math.isnan(auroc(scores[:1], relevant[:1]))


def test_precision_and_recall_are_means_over_samples():
    kept = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], dtype=bool)
    relevant = np.array([[1, 0, 1, 1], [1, 0, 0, 0]], dtype=bool)
    assert precision_recall(kept, relevant) == (pytest.approx((1 / 2 + 1) / 2), pytest.approx((1 / 3 + 1) / 2))


def test_nothing_kept_and_nothing_relevant_count_as_zero():
    nothing, all_ = np.zeros((1, 3), dtype=bool), np.ones((1, 3), dtype=bool)
    assert precision_recall(nothing, all_) == (0, 0)
    assert precision_recall(all_, nothing) == (0, 0)


def by_hand(z, inside):
    """Return A-TSI and M-TSI as sums over images, in plain Python."""
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for row, within in zip(z.tolist(), inside.tolist(), strict=True):
        parts = [[x for x, i in zip(row, within, strict=True) if i == side] for side in (False, True)]
        if not all(parts):
            continue
        for side, part in enumerate(parts):
            sums[0][side] += sum(part) / len(part)
            sums[1][side] += max(part)
    return [out / within if within > 0 else math.nan for out, within in sums]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 9))
@settings(deadline=None)
def test_both_indices_are_the_ratios_of_the_sums_over_images(seed, n, N):
    rng = np.random.default_rng(seed)
    z = rng.random((n, N)) * rng.integers(0, 2, (n, N))
    inside = rng.random((n, N)) < 0.5
    assert token_spuriosity(z, inside) == pytest.approx(by_hand(z, inside), nan_ok=True)


def test_an_image_in_which_nothing_inside_matters_does_not_make_it_infinite():
    z = np.array([[0.5, 0.0], [0.1, 0.3]])
    inside = np.array([[False, True], [False, True]])
    assert token_spuriosity(z, inside) == (pytest.approx(2), pytest.approx(2))


@pytest.mark.parametrize("inside", [[True, True], [False, False]])
def test_images_without_both_kinds_of_tokens_say_nothing(inside):
    z = np.array([[0.5, 0.5], [0.1, 0.3]])
    both = np.array([inside, [False, True]])
    assert token_spuriosity(z, both) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert all(map(math.isnan, token_spuriosity(z[:1], both[:1])))
    assert all(map(math.isnan, token_spuriosity(np.zeros((1, 2)), both[1:])))
