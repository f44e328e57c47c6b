import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from sparsebench.errors import UnsupportedError
from sparsebench.measure.selection import (
    expected_iou,
    iou,
    neighbour_agreement,
    quality,
    rank_correlation,
    token_spuriosity,
)


def by_pairs(scores, relevant):
    """Return the share of (relevant, irrelevant) pairs in the right order, ties one half; None without pairs."""
    pairs = [(p > q) + 0.5 * (p == q) for p in scores[relevant] for q in scores[~relevant]]
    return sum(pairs) / len(pairs) if pairs else None


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(2, 9))
@settings(deadline=None)
def test_auroc_is_the_share_of_pairs_in_the_right_order(seed, n, N):
    """AUROC is the mean share of pairs in the right order of the tokens that are there."""
    rng = np.random.default_rng(seed)
    scores, relevant = rng.integers(0, 4, (n, N)).astype(np.float32), rng.random((n, N)) < 0.4
    there = rng.random((n, N)) < 0.7
    each = [by_pairs(s[t], r[t]) for s, r, t in zip(scores, relevant, there, strict=True)]
    each = [a for a in each if a is not None]
    result = quality(there, np.where(there, scores, np.nan), relevant)[2]
    assert result == pytest.approx(np.mean(each) if each else math.nan, nan_ok=True)


NOTHING, ALL = np.zeros((1, 3), dtype=bool), np.ones((1, 3), dtype=bool)


@pytest.mark.parametrize(
    ("kept", "relevant", "precision", "recall"),
    [
        (np.array([[1, 1, 0, 0], [1, 0, 0, 0]]) > 0, np.array([[1, 0, 1, 1], [1, 0, 0, 0]]) > 0, 3 / 4, 2 / 3),
        (NOTHING, ALL, 0, 0), (ALL, NOTHING, 0, 0),
    ],
)  # fmt: skip
def test_precision_and_recall_are_means_over_samples(kept, relevant, precision, recall):
    assert quality(kept, kept * 1.0, relevant)[:2] == pytest.approx((precision, recall))


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


RNG = np.random.default_rng(0)


def kept(*rows: str) -> np.ndarray:
    return np.array([[letter == "x" for letter in row] for row in rows])


def test_iou_is_that_of_sets_of_patches_and_undefined_if_both_are_empty() -> None:
    a, b = RNG.random((50, 6)) < 0.3, RNG.random((50, 6)) < 0.3
    a[:2], b[1:3] = False, False
    expected = []
    for x, y in zip(a, b, strict=True):
        first, second = set(np.flatnonzero(x)), set(np.flatnonzero(y))
        expected.append(len(first & second) / len(first | second) if first | second else math.nan)
    assert iou(a, b).tolist() == pytest.approx(expected, nan_ok=True) and math.isnan(expected[1])


def test_expected_iou_is_the_mean_over_pairs_of_choices() -> None:
    """Expected IoU is the mean over all pairs of choices of each sample's numbers."""
    N, expected = 6, []
    choices = {k: [set(c) for c in itertools.combinations(range(N), k)] for k in range(N + 1)}
    numbers = list(itertools.product(range(N + 1), repeat=2))
    for k, m in numbers:
        pairs = [len(x & y) / len(x | y) for x in choices[k] for y in choices[m] if x | y]
        expected.append(math.fsum(pairs) / len(pairs) if pairs else math.nan)
    a, b = (
        kept(*rows)
        for rows in zip(*(("x" * k + "." * (N - k), "." * (N - m) + "x" * m) for k, m in numbers), strict=True)
    )
    assert expected_iou(a, b).tolist() == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_rank_correlation_is_scipys_over_the_tokens_that_both_scores_have() -> None:
    a, b = (RNG.integers(0, 6, (40, 15)).astype(np.float32) for _ in range(2))  # with ties
    a[RNG.random(a.shape) < 0.3], b[RNG.random(b.shape) < 0.3] = np.nan, np.nan
    a[0, 1] = -np.inf
    result = rank_correlation(a, b)
    for x, y, rho in zip(a, b, result, strict=True):
        there = ~(np.isnan(x) | np.isnan(y))
        assert rho == pytest.approx(spearmanr(x[there], y[there]).statistic, abs=1e-12)


def test_rank_correlation_is_undefined_for_equal_scores() -> None:
    """Rank correlation is undefined for equal scores and for a single token."""
    nan = np.nan
    a = np.array([[1, 1, 1.0], [1, 2, 3], [nan, 2, nan], [nan, nan, nan]])
    b = np.array([[1, 2, 3.0], [nan, 2, nan], [1, 2, 3], [1, 2, 3]])
    assert np.isnan(rank_correlation(a, b)).all()


def distances(grid: tuple[int, int], order: np.ndarray | None = None) -> np.ndarray:
    places = np.array([(r, c) for r in range(grid[0]) for c in range(grid[1])], dtype=float)
    places = places if order is None else places[order]
    return np.linalg.norm(places[:, None] - places, axis=-1)


@pytest.mark.parametrize("grid", [(4, 4), (3, 5), (1, 6), (8, 8)])
def test_agreement_is_full_only_in_the_right_order(grid):
    """Similarity that follows distance agrees fully only in the right order."""
    assert neighbour_agreement(np.exp(-distances(grid)), grid) == 1.0
    assert neighbour_agreement(np.exp(distances(grid)), grid) == 0.0
    order = np.random.default_rng(0).permutation(grid[0] * grid[1])
    permuted = np.exp(-distances(grid, order))
    assert neighbour_agreement(permuted, grid, order) == 1.0
    assert neighbour_agreement(permuted, grid) < 0.7


def test_neighbour_agreement_is_the_share_of_neighbours():
    """Neighbour agreement is the mean share of the neighbours of each patch."""
    similarity = np.zeros((4, 4))
    similarity[0, [1, 2]] = 1  # both neighbours of the corner
    similarity[1, [0, 2]] = 1  # one of two neighbours
    similarity[2, [1, 2]] = 1  # only the first of equal positions; the diagonal is not read
    similarity[3, [0, 1]] = 1  # one of two neighbours
    assert neighbour_agreement(similarity, (2, 2)) == (1 + 0.5 + 0.5 + 0.5) / 4
    with pytest.raises(UnsupportedError, match="one patch"):
        neighbour_agreement(np.zeros((1, 1)), (1, 1))
