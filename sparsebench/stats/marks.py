"""Marks of strategies against one reference, judged together: Dunnett's comparisons.

The critical value is that of the largest of all differences to the reference, which they have in common: a Gaussian
multiplier bootstrap (Chernozhukov, Chetverikov and Kato 2013), drawn from the covariance that items and seeds give,
each difference over an error with its own degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import stdtrit

from sparsebench.stats.intervals import LEVEL
from sparsebench.stats.paired import Pairs

DRAWS = 10_000
MANY = 1e6
"""Degrees of freedom as good as infinitely many."""
BETTER, WORSE, NOT_SIGNIFICANT = "better", "worse", "not significant"


def marks(pairs: Pairs, references: Mapping[int, int]) -> dict[int, str]:
    """Return whether rows are significantly better or worse than theirs, or neither; all are right in 95 % of boards.

    Args:
        pairs: of all rows.
        references: of some rows which other each is compared with; several where budgets have references of their own.
    """
    rows, others = (np.array(x, dtype=int) for x in (list(references), list(references.values())))
    p, mean = pairs.p_alone[rows, others], pairs.mean[rows, others]
    if not len(rows):
        return {}
    known = pairs.freedom[rows, others]
    freedom = np.where(known > 0, known, MANY)  # a single seed's has none, and no p
    with np.errstate(invalid="ignore"):
        sure = p <= critical_p(correlation(pairs.error**2, rows, others), freedom)
    words = np.where(sure, np.where(mean > 0, BETTER, WORSE), NOT_SIGNIFICANT)
    return dict(zip(rows.tolist(), words.tolist(), strict=True))


def correlation(variance: np.ndarray, rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return (J, J) correlations of J differences, rows minus others, from (R, R) variances of all differences.

    Where a variance is not known two differences count as independent, which makes marks more careful.
    """
    cross = variance[np.ix_(rows, others)]
    covariance = (cross + cross.T - variance[np.ix_(rows, rows)] - variance[np.ix_(others, others)]) / 2
    scale = np.sqrt(np.diag(covariance))
    with np.errstate(divide="ignore", invalid="ignore"):
        result = np.nan_to_num(covariance / np.outer(scale, scale), posinf=0.0, neginf=0.0)
    np.fill_diagonal(result, 1.0)
    # Variances that were pooled pair by pair need not be those of anything: the nearest that are.
    values, vectors = np.linalg.eigh(result)
    result = (vectors * np.maximum(values, 1e-8)) @ vectors.T
    scale = np.sqrt(np.diag(result))
    return np.asarray(result / np.outer(scale, scale))


def critical_p(correlations: np.ndarray, freedom: np.ndarray) -> float:
    """Return the p up to which one of J differences is significant; where none is real, one is in 1 of 20 boards.

    Args:
        correlations: (J, J) of the differences.
        freedom: (J,) degrees of freedom of their errors.
    """
    rng, J = np.random.default_rng(0), len(correlations)
    normal = rng.standard_normal((DRAWS, J)) @ np.linalg.cholesky(correlations).T
    ratios = np.abs(normal) / np.sqrt(rng.chisquare(freedom, (DRAWS, J)) / freedom)
    low, high, beyond = 0.0, 1 - LEVEL, 0
    for _ in range(30):  # only draws that the next p can still decide are looked at again
        middle = (low + high) / 2
        past = (ratios > stdtrit(freedom, 1 - middle / 2)).any(axis=1)
        if (beyond + past.sum()) / DRAWS > 1 - LEVEL:
            high, ratios = middle, ratios[past]
        else:
            low, ratios, beyond = middle, ratios[~past], beyond + past.sum()
    return low
