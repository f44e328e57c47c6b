"""Measures of kept tokens: against relevant tokens, another selection, image neighbours, and influence on outputs."""

from __future__ import annotations

import numpy as np

from sparsebench.errors import UnsupportedError


def quality(kept: np.ndarray, scores: np.ndarray, relevant: np.ndarray) -> tuple[float, float, float]:
    """Return precision, recall and AUROC of the kept tokens, means over n samples.

    Args:
        kept: (n, N) booleans.
        scores: (n, N) scores.
        relevant: (n, N) booleans, which tokens are relevant.

    Returns:
        The share of the kept tokens that are relevant, the share of the relevant tokens that are kept, and the mean
        AUROC of the samples that have one, see `aurocs`.
    """
    hits = (kept & relevant).sum(axis=1)
    precision = float((hits / np.maximum(kept.sum(axis=1), 1)).mean())
    recall = float((hits / np.maximum(relevant.sum(axis=1), 1)).mean())
    values = aurocs(scores, relevant)
    valid = values[~np.isnan(values)]
    return precision, recall, float(valid.mean()) if len(valid) else np.nan


def aurocs(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """Return the (n,) AUROCs of (n, N) scores against the (n, N) boolean mask.

    Ties count one half, so constant scores give 0.5. Tokens with the score NaN are left out. The AUROC is NaN if all
    tokens of a sample are relevant, or none.
    """
    valid = ~np.isnan(scores)
    relevant = relevant & valid
    p = relevant.sum(axis=1)
    above = np.where(relevant, _ranks(scores), 0.0).sum(axis=1) - p * (p + 1) / 2
    return _ratio(above, p * (valid.sum(axis=1) - p))


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Return the ranks from 1 in each row of (n, N) scores. Ties have their mean rank; NaNs rank last, without ties.

    This is scipy.stats.rankdata, but the import of scipy.stats takes a worker process longer than a short cell.
    """
    order = scores.argsort(axis=1)
    ordered = np.take_along_axis(scores, order, axis=1)
    place = np.arange(scores.shape[1])
    begins = np.ones(scores.shape, dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ends = np.ones(scores.shape, dtype=bool)
    ends[:, :-1] = begins[:, 1:]
    first = np.maximum.accumulate(np.where(begins, place, 0), axis=1)
    last = np.minimum.accumulate(np.where(ends, place, place[-1])[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty(scores.shape)
    np.put_along_axis(ranks, order, (first + last) / 2 + 1, axis=1)
    return ranks


def iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the (n,) intersections over union of the kept tokens, (n, N) booleans; NaN if none is kept."""
    return _ratio((a & b).sum(axis=1), (a | b).sum(axis=1))


def expected_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the (n,) expected IoUs of independent random selections of the same numbers of tokens as in a and b.

    The number x of tokens in both is hypergeometric; with k and m kept tokens, the IoU is x / (k + m - x). NaN if none
    is kept.

    Args:
        a, b: (n, N) booleans.
    """
    from scipy.stats import hypergeom  # not at the top, because worker processes import this module

    N = a.shape[1]
    sizes = np.stack([a.sum(axis=1), b.sum(axis=1)], axis=1)
    pairs, inverse = np.unique(sizes, axis=0, return_inverse=True)
    means = np.full(len(pairs), np.nan)
    for i, (k, m) in enumerate(pairs.tolist()):
        if k + m:
            x = np.arange(max(0, k + m - N), min(k, m) + 1)
            means[i] = (hypergeom.pmf(x, N, k, m) * x / (k + m - x)).sum()
    return means[inverse.reshape(-1)]


def rank_correlation(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the (n,) Spearman correlations of two (n, N) scores, over the tokens for which neither is NaN.

    Ties have their mean rank. NaN for fewer than two such tokens, or if all scores in a or in b are equal.
    """
    valid = ~(np.isnan(a) | np.isnan(b))
    count = valid.sum(axis=1, keepdims=True)
    x, y = (_centred_ranks(scores, valid, count) for scores in (a, b))
    return _ratio((x * y).sum(axis=1), np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1)))


def _centred_ranks(scores: np.ndarray, valid: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return (n, N) ranks minus their mean, 0 for tokens that are not valid."""
    ranks = _ranks(np.where(valid, scores, np.nan))
    return np.where(valid, ranks - (count + 1) / 2, 0.0)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


def neighbour_agreement(similarity: np.ndarray, grid: tuple[int, int], order: np.ndarray | None = None) -> float:
    """Return the share of a patch's neighbours that are among its most similar patches, mean over patches.

    A patch has k = 2, 3 or 4 neighbours above, below, left and right of it (1 or 2 if the grid is a line). They are
    compared with the k other patches of the largest similarity; ties are decided by position. The chance level is
    k / (N - 1). This is the patch association of Jelassi, Sander and Li (NeurIPS 2022), with neighbours instead of the
    patches of the same set.

    Args:
        similarity: (N, N) row i has the similarities of position i to all positions; the diagonal is not read.
        grid: (rows, columns) of the N patches of an image.
        order: (N,) row-major place of the patch that each position shows; None for row-major order.

    Raises:
        UnsupportedError: there is only one patch.
    """
    rows, columns = grid
    N = rows * columns
    if N < 2:
        raise UnsupportedError("an image of one patch has no neighbours; make patches smaller")
    row, column = np.divmod(np.arange(N) if order is None else order, columns)
    near = abs(row[:, None] - row) + abs(column[:, None] - column) == 1
    others = np.where(np.eye(N, dtype=bool), -np.inf, similarity)
    ranked = np.argsort(-others, axis=1, kind="stable")
    k = near.sum(axis=1)
    hits = np.take_along_axis(near, ranked, axis=1) & (np.arange(N) < k[:, None])
    return float((hits.sum(axis=1) / k).mean())


def token_spuriosity(influence: np.ndarray, inside: np.ndarray) -> tuple[float, float]:
    """Return the token spuriosity indices A-TSI and M-TSI (arXiv 2509.04009).

    A-TSI divides the mean influence of the tokens outside the object by the mean influence of those inside, M-TSI the
    largest by the largest. The paper has a ratio for each image, which is infinite if no token inside has an influence.
    Here numerator and denominator are first summed over the images, which weights images by their influences.

    Args:
        influence: (n, N) z, the change of the predicted class's probability without each token, of correctly classified
            images only.
        inside: (n, N) booleans, which tokens show a part of the object.

    Returns:
        Both, over the images with tokens inside and outside; NaN without such images, or influence inside.
    """
    usable = inside.any(axis=1) & ~inside.all(axis=1)
    z = influence[usable].astype(float)
    inside = inside[usable]
    means = [(z * part).sum(axis=1) / part.sum(axis=1) for part in (~inside, inside)]
    largest = [np.where(part, z, 0.0).max(axis=1) for part in (~inside, inside)]
    a_tsi, m_tsi = _ratio(*np.array([means, largest]).sum(axis=2).T)
    return float(a_tsi), float(m_tsi)
