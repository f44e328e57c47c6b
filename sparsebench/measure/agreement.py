"""How far two choices of tokens, and the scores behind them, agree."""

from __future__ import annotations

import numpy as np
from scipy.stats import hypergeom, rankdata


def iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (n,), intersection over union (Jaccard) of the tokens kept by (n, N) booleans; NaN where none is."""
    return _ratio((a & b).sum(axis=1), (a | b).sum(axis=1))


def expected_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (n,), the mean IoU of two independent random choices, of as many of the N tokens as each of a and b keeps.

    The number x of tokens that both keep is hypergeometric; with k and m kept, the IoU is x / (k + m - x). NaN where
    none is kept.

    Args:
        a, b: (n, N) booleans.
    """
    N, sizes = a.shape[1], np.stack([a.sum(axis=1), b.sum(axis=1)], axis=1)
    pairs, which = np.unique(sizes, axis=0, return_inverse=True)
    means = np.array([_expected_overlap(N, int(k), int(m)) for k, m in pairs])
    return means[which.reshape(-1)]


def _expected_overlap(N: int, k: int, m: int) -> float:
    if k + m == 0:
        return float("nan")
    x = np.arange(max(0, k + m - N), min(k, m) + 1)
    return float((hypergeom.pmf(x, N, k, m) * x / (k + m - x)).sum())


def rank_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (n,), Spearman's rank correlation of two (n, N) scores over the tokens for which neither is NaN.

    Equal scores share their mean rank. NaN where there are fewer than two such tokens, or a score is the same for all.
    """
    valid = ~(np.isnan(a) | np.isnan(b))
    count = valid.sum(axis=1, keepdims=True)
    x, y = (_centred_ranks(scores, valid, count) for scores in (a, b))
    return _ratio((x * y).sum(axis=1), np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1)))


def _centred_ranks(scores: np.ndarray, valid: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return (n, N) ranks less their mean, 0 for what is not there."""
    ranks = rankdata(np.where(valid, scores, np.nan), axis=1, nan_policy="omit")
    return np.where(valid, ranks - (count + 1) / 2, 0.0)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
