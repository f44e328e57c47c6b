"""How well a strategy found the tokens that matter."""

from __future__ import annotations

import numpy as np


def auroc(scores: np.ndarray, relevant: np.ndarray) -> float:
    """Return the mean over samples of the AUROC of (n, N) scores against the (n, N) boolean mask.

    Ties count one half, so that constant scores give 0.5. A token whose score is NaN is not there. Samples whose
    tokens are all relevant, or none, say nothing and are left out; NaN if no sample is left.
    """
    valid = ~np.isnan(scores)
    relevant = relevant & valid
    positives = relevant.sum(axis=1)
    negatives = valid.sum(axis=1) - positives
    usable = (positives > 0) & (negatives > 0)
    if not usable.any():
        return float("nan")
    ranks = _ranks(scores[usable])
    p, q = positives[usable], negatives[usable]
    above = np.where(relevant[usable], ranks, 0.0).sum(axis=1) - p * (p + 1) / 2
    return float((above / (p * q)).mean())


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Return the ranks from 1 in each row of (n, N) scores, equal ones their mean; NaN ranks last, each on its own.

    Written out: scipy.stats has it, whose import takes a worker longer than a cell of the theory.
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


def precision_recall(kept: np.ndarray, relevant: np.ndarray) -> tuple[float, float]:
    """Return the share of kept tokens that are relevant and of relevant ones kept, means over the (n, N) samples."""
    hits = (kept & relevant).sum(axis=1)
    return (
        float((hits / np.maximum(kept.sum(axis=1), 1)).mean()),
        float((hits / np.maximum(relevant.sum(axis=1), 1)).mean()),
    )
