"""Straight lines through points, exponents of powers, and where a curve crosses a threshold."""

from __future__ import annotations

import numpy as np


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return slope, intercept and R2 of the least-squares line; R2 is 0 where y is constant."""
    slope, intercept = np.polyfit(x, y, 1)
    rest, spread = ((y - slope * x - intercept) ** 2).sum(), ((y - y.mean()) ** 2).sum()
    varies = spread > 1e-12 * (y**2).sum()
    return float(slope), float(intercept), float(1 - rest / spread) if varies else 0.0


def exponents(log_x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (R,) slopes of log y on log x over the finite ones of y (P, R); NaN where there are fewer than two."""
    known = np.isfinite(y)
    weights = known / np.maximum(known.sum(axis=0), 1)
    log_y = np.log(np.where(known, y, 1.0))
    dx = log_x[:, None] - (weights * log_x[:, None]).sum(axis=0)
    dy = log_y - np.take_along_axis(log_y, known.argmax(axis=0)[None], axis=0)  # of a constant exactly 0, as no mean is
    spread = (weights * dx**2).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return _round(np.where(known.sum(axis=0) >= 2, (weights * dx * dy).sum(axis=0) / spread, np.nan))


def slopes(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return (R,) least-squares slopes of each column of y (P, R) on x (P,)."""
    dx = x - x.mean()
    return _round((dx[:, None] * (y - y[0])).sum(axis=0) / (dx**2).sum())  # of a constant exactly 0, as with no mean


def _round(slopes: np.ndarray) -> np.ndarray:
    """Return slopes without their last digits, which are not 0 even where all that rises falls again."""
    return np.round(slopes, 9)


def crossing(x: np.ndarray, y: np.ndarray, threshold: float) -> float:
    """Return the x, rising in `x`, from which on y is below the threshold; interpolated in logarithms.

    The smallest x if it always is, infinite if it is not even at the largest, and NaN if the y where that ends is
    unknown.
    """
    above = np.flatnonzero(~(y < threshold))
    if not len(above):
        return float(x[0])
    last = above[-1]
    if np.isnan(y[last]):
        return float("nan")
    if last + 1 == len(x):
        return float("inf")
    with np.errstate(divide="ignore"):  # a y of 0 is as far below as can be
        log_x, log_y = np.log(x[last : last + 2]), np.log(y[last : last + 2])
    share = (log_y[0] - np.log(threshold)) / (log_y[0] - log_y[1])
    return float(np.exp(log_x[0] + share * (log_x[1] - log_x[0])))
