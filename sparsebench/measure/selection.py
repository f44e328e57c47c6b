"""How well a strategy found the tokens that matter."""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata


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
    ranks = rankdata(scores[usable], axis=1, nan_policy="omit")  # what is not there ranks last, as NaN
    p, q = positives[usable], negatives[usable]
    above = np.where(relevant[usable], ranks, 0.0).sum(axis=1) - p * (p + 1) / 2
    return float((above / (p * q)).mean())


def precision_recall(kept: np.ndarray, relevant: np.ndarray) -> tuple[float, float]:
    """Return the share of kept tokens that are relevant and of relevant ones kept, means over the (n, N) samples."""
    hits = (kept & relevant).sum(axis=1)
    return (
        float((hits / np.maximum(kept.sum(axis=1), 1)).mean()),
        float((hits / np.maximum(relevant.sum(axis=1), 1)).mean()),
    )
