"""Choices of tokens: against the relevant tokens, against another choice, and by what the network does with tokens."""

from __future__ import annotations

import numpy as np

from sparsebench.errors import UnsupportedError


def quality(kept: np.ndarray, scores: np.ndarray, relevant: np.ndarray) -> tuple[float, float, float]:
    """Return how well the tokens that matter were found, means over n samples.

    Args:
        kept, scores: (n, N) choices and scores.
        relevant: (n, N) booleans, which tokens matter.

    Returns:
        The share of kept tokens that are relevant, the share of relevant ones kept, and the AUROC, see `aurocs`, over
        those that have one.
    """
    hits = (kept & relevant).sum(axis=1)
    precision, recall = (float((hits / np.maximum(mask.sum(axis=1), 1)).mean()) for mask in (kept, relevant))
    values = aurocs(scores, relevant)
    valid = values[~np.isnan(values)]
    return precision, recall, float(valid.mean()) if len(valid) else np.nan


def aurocs(scores: np.ndarray, relevant: np.ndarray) -> np.ndarray:
    """Return (n,), each sample's AUROC of (n, N) scores against the (n, N) boolean mask.

    Ties count one half, so that constant scores give 0.5. A token whose score is NaN is not there. NaN of samples whose
    tokens are all relevant, or none, which say nothing.
    """
    valid = ~np.isnan(scores)
    relevant = relevant & valid
    p = relevant.sum(axis=1)
    above = np.where(relevant, _ranks(scores), 0.0).sum(axis=1) - p * (p + 1) / 2
    return _ratio(above, p * (valid.sum(axis=1) - p))


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Return the ranks from 1 in each row of (n, N) scores, equal ones their mean; NaN ranks last, each on its own.

    Written out: scipy.stats has it, whose import takes a worker longer than a short cell.
    """
    order = scores.argsort(axis=1)
    ordered, place = np.take_along_axis(scores, order, axis=1), np.arange(scores.shape[1])
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
    """Return (n,), intersection over union (Jaccard) of the tokens kept by (n, N) booleans; NaN where none is."""
    return _ratio((a & b).sum(axis=1), (a | b).sum(axis=1))


def expected_iou(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return (n,), the mean IoU of two independent random choices, of as many of the N tokens as each of a and b keeps.

    The number x of tokens that both keep is hypergeometric; with k and m kept, the IoU is x / (k + m - x). NaN where
    none is kept.

    Args:
        a, b: (n, N) booleans.
    """
    from scipy.stats import hypergeom  # here, as a worker imports this module

    N, sizes = a.shape[1], np.stack([a.sum(axis=1), b.sum(axis=1)], axis=1)
    pairs, inverse = np.unique(sizes, axis=0, return_inverse=True)
    means = np.full(len(pairs), np.nan)
    for i, (k, m) in enumerate(pairs.tolist()):
        if k + m:
            x = np.arange(max(0, k + m - N), min(k, m) + 1)
            means[i] = (hypergeom.pmf(x, N, k, m) * x / (k + m - x)).sum()
    return means[inverse.reshape(-1)]


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
    ranks = _ranks(np.where(valid, scores, np.nan))
    return np.where(valid, ranks - (count + 1) / 2, 0.0)


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)


def neighbour_agreement(similarity: np.ndarray, grid: tuple[int, int], order: np.ndarray | None = None) -> float:
    """Return the share of a patch's neighbours that are among its most similar patches, mean over patches.

    A patch has the k = 2, 3 or 4 neighbours above, below, left and right of it in the image (1 or 2 where the grid is
    a line), and is compared with as many positions: the other ones with the largest similarity in its row. Equal ones
    are decided by position. A similarity that says nothing has k / (N - 1). After the patch association of Jelassi,
    Sander and Li (NeurIPS 2022), with the neighbours of a patch in place of its set.

    Args:
        similarity: (N, N), row i of position i to each position; its diagonal is not read.
        grid: (rows, columns) of the image's patches, N of them.
        order: (N,) the place in plain order, row by row, of the patch that each position shows; None for plain order.

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

    A-TSI divides the mean influence of the tokens outside the object by that of those inside it, M-TSI the largest by
    the largest. The paper has a ratio an image, which is infinite where nothing inside matters. Here numerator and
    denominator are summed over the images first: the ratio of sums, in which an image weighs by its influences.

    Args:
        influence: (n, N) z, how far the probability of the predicted class moves without each token; of the images that
            are classified rightly, for the index counts no others.
        inside: (n, N) booleans, which tokens show some of the object.

    Returns:
        Both, over the images that have tokens of both kinds; NaN where there is none, or nothing inside matters.
    """
    usable = inside.any(axis=1) & ~inside.all(axis=1)
    z, inside = influence[usable].astype(float), inside[usable]
    means = [(z * part).sum(axis=1) / part.sum(axis=1) for part in (~inside, inside)]
    largest = [np.where(part, z, 0.0).max(axis=1) for part in (~inside, inside)]
    a_tsi, m_tsi = _ratio(*np.array([means, largest]).sum(axis=2).T)
    return float(a_tsi), float(m_tsi)
