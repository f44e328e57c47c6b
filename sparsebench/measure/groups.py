"""Accuracy by group: worst group and gap (Sagawa et al. 2020)."""

from __future__ import annotations

import numpy as np


def group_accuracies(correct: np.ndarray, groups: np.ndarray, number: int) -> np.ndarray:
    """Return the (number,) accuracies of the groups of the (n,) outcomes; NaN for an empty group."""
    counts = np.bincount(groups, minlength=number)
    hits = np.bincount(groups, weights=correct, minlength=number)
    with np.errstate(invalid="ignore"):
        return hits / counts


def summary(correct: np.ndarray, groups: np.ndarray, train_sizes: np.ndarray) -> dict[str, float]:
    """Return both averages, the worst group and the gap.

    `average_test` weights groups as the test set has them, `average_train` as the training set does, of which
    `train_sizes` says how many samples each group has. The gap is `average_test` minus the worst group's accuracy.
    """
    accuracies = group_accuracies(correct, groups, len(train_sizes))
    valid = ~np.isnan(accuracies)
    weights = train_sizes[valid]
    average, worst = float(np.mean(correct)), float(accuracies[valid].min())
    return {
        "average_test": average,
        "average_train": float(np.average(accuracies[valid], weights=weights)) if weights.sum() else average,
        "worst_group_accuracy": worst,
        "spurious_gap": average - worst,
    }
