"""How much of what a network says hangs on tokens beside the object."""

from __future__ import annotations

import numpy as np


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
    both = inside.any(axis=1) & ~inside.all(axis=1)
    z, inside = influence[both].astype(float), inside[both]
    means = [(z * part).sum(axis=1) / part.sum(axis=1) for part in (~inside, inside)]
    largest = [np.where(part, z, 0.0).max(axis=1) for part in (~inside, inside)]
    return _ratio(*means), _ratio(*largest)


def _ratio(above: np.ndarray, below: np.ndarray) -> float:
    return float(above.sum() / below.sum()) if below.sum() > 0 else float("nan")
