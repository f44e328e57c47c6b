"""Probes: how well classes are learned from the features of a frozen network, as those few images allow.

A linear probe is scikit-learn's logistic regression on features that are standardised by the training images. Below
five images of a class its C is `FEW_C`. Otherwise it is the one of `GRID` with the smallest log loss in five-fold
cross-validation, stratified by class. Nearest neighbours are those of Caron et al. 2021 (DINO): cosine similarity, and
votes weighted by exp(similarity / TEMPERATURE).
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

from sparsebench import seeds
from sparsebench.tasks.groups import LEAST_OF_CLASS, shares

FEW_C = 0.01
"""C of the logistic regression with fewer than `FOLDS` images of a class."""
GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""The values of C that cross-validation compares."""
FOLDS = 5
ITERATIONS = 5000
"""Most iterations of the solver."""
NEIGHBOURS, SHARE_OF_NEIGHBOURS = 20, 5
"""The most neighbours; and with few training images, one neighbour for this many of them."""
TEMPERATURE = 0.07
TOGETHER = 2**22
"""Most similarities that are computed together: 32 MiB."""


class LinearProbe(NamedTuple):
    """The result of a linear probe on n test images.

    Attributes:
        scores: (n, classes) logarithms of the class probabilities.
        C: the inverse strength of the regularisation.
    """

    scores: np.ndarray
    C: float


def rows_of_probe(labels: np.ndarray, n: int, *dimensions: object) -> np.ndarray:
    """Return the sorted (n,) places of the training images of a probe, with the shares of the classes.

    The images of a smaller n are among those of a larger one, except for what rounding changes.

    Args:
        labels: (P,) class numbers of the images to choose from.
        n: number of training images, at least two of each class.
        dimensions: seed the choice.
    """
    order = seeds.generator("probe", *dimensions).permutation(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    chosen = []
    for label, size in zip(classes, shares(counts, n, LEAST_OF_CLASS), strict=True):
        of_class = order[labels[order] == label]
        chosen.append(of_class[:size])
    return np.sort(np.concatenate(chosen))


@threadpool_limits.wrap(limits=1, user_api="blas")  # sums depend on how they are split over threads
def linear_probe(train: np.ndarray, labels: np.ndarray, test: np.ndarray, classes: int) -> LinearProbe:
    """Learn a linear probe, and return its scores of test images; see the module.

    Args:
        train: (N, C) features.
        labels: (N,) class numbers.
        test: (n, C) features.
        classes: number of classes; those without a training image get no probability.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(train.astype(np.float64))
    model = LogisticRegression(C=FEW_C, max_iter=ITERATIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        if np.unique(labels, return_counts=True)[1].min() < FOLDS:
            best = model.fit(scaler.transform(train.astype(np.float64)), labels)
        else:
            search = GridSearchCV(model, {"C": GRID}, cv=StratifiedKFold(FOLDS), scoring="neg_log_loss")
            best = search.fit(scaler.transform(train.astype(np.float64)), labels).best_estimator_
    scores = np.full((len(test), classes), -np.inf)
    scores[:, best.classes_] = best.predict_log_proba(scaler.transform(test.astype(np.float64)))
    return LinearProbe(scores, float(best.C))


@threadpool_limits.wrap(limits=1, user_api="blas")
def neighbours(train: np.ndarray, labels: np.ndarray, test: np.ndarray, classes: int) -> np.ndarray:
    """Return the (n,) classes that the nearest training images vote for; of equal votes the first class.

    Args:
        train, labels, test, classes: see `linear_probe`.
    """
    train, test = _unit(train), _unit(test)
    rows = max(1, TOGETHER // len(train))
    winners = [_winners(train, labels, test[i : i + rows], classes) for i in range(0, len(test), rows)]
    return np.concatenate(winners)


def _winners(train: np.ndarray, labels: np.ndarray, test: np.ndarray, classes: int) -> np.ndarray:
    """Return `neighbours` of features of length 1."""
    k = max(1, min(NEIGHBOURS, len(train) // SHARE_OF_NEIGHBOURS))
    similarity = test @ train.T
    nearest = np.argsort(-similarity, axis=1, kind="stable")[:, :k]
    weights = np.exp(np.take_along_axis(similarity, nearest, axis=1) / TEMPERATURE)
    votes = np.zeros((len(test), classes))
    for label in range(classes):
        votes[:, label] = (weights * (labels[nearest] == label)).sum(axis=1)
    return votes.argmax(axis=1)


def _unit(features: np.ndarray) -> np.ndarray:
    """Return features of length 1 in double precision; zeros stay."""
    real = features.astype(np.float64)
    length = np.linalg.norm(real, axis=1, keepdims=True)
    return real / np.where(length > 0, length, 1.0)
