"""What test items' outcomes say: accuracy, loss, groups. A record's own outcomes give its metrics again to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsebench.measure.metrics import unit_of
from sparsebench.stats.intervals import wilson

TOP_5_FROM = 10
"""With fewer classes it says little that the label is among the five that the network finds likeliest."""
WILSON = "Wilson 95 %"


@dataclass(frozen=True)
class Items:
    """What came out for n test items, each (n,).

    Attributes:
        predicted, labels, groups: numbers of classes and of groups.
        ranks: how many classes come before the item's own; 0 where that is the predicted one.
        losses: in single precision.
        foregrounds: numbers of the pictures that they show, or None; see `Split`.
        confidence: the probability of the predicted class, where the loss is the cross-entropy.
        kept: (n, N) booleans, which patches or tokens of the input were still there at the end, a merged one as its
            group's first; all where nothing acts. Records hold neither: both are None when they are read again.
    """

    predicted: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    ranks: np.ndarray
    losses: np.ndarray
    foregrounds: np.ndarray | None = None
    confidence: np.ndarray | None = None
    kept: np.ndarray | None = None

    @property
    def correct(self) -> np.ndarray:
        """(n,) booleans."""
        return self.predicted == self.labels

    @property
    def loss(self) -> float:
        """The mean loss."""
        return mean_loss(self.losses)

    @property
    def accuracy(self) -> float:
        """The share that is predicted rightly."""
        return float(self.correct.mean())

    @property
    def p_label(self) -> Score:
        """The mean probability of the own class, where the losses are cross-entropies."""
        return Score.of("p_label", float(np.exp(-self.losses.astype(np.float64)).mean()), len(self.losses))


class Score(NamedTuple):
    """One of `metrics.METRICS`, None where there is nothing to measure, and its interval if it is a share."""

    name: str
    value: float | None
    unit: str
    n: int
    low: float | None = None
    high: float | None = None
    method: str = ""

    @classmethod
    def of(cls, name: str, value: float | None, n: int) -> Score:
        """Return a number without an interval, in the metric's unit."""
        return cls(name, value, unit_of(name), n)


def mean_loss(losses: np.ndarray) -> float:
    """Return the mean of (n,) losses."""
    return float(losses.mean(dtype=np.float64))


def share(name: str, outcomes: np.ndarray) -> Score:
    """Return the share of true outcomes, with its Wilson interval over the items."""
    n, hits = len(outcomes), int(outcomes.sum())
    if n == 0:
        return Score.of(name, None, 0)
    low, high = wilson(np.array(hits / n), np.array(n))
    return Score(name, hits / n, unit_of(name), n, float(low), float(high), WILSON)


def scores(items: Items, classes: int, group_names: Sequence[str], train_sizes: Sequence[int]) -> Iterator[Score]:
    """Yield what is known from the outcomes alone.

    Args:
        items: the outcomes.
        classes: how many there are.
        group_names: of the groups, in order of their numbers; one where the task has none.
        train_sizes: how many training samples each group has.
    """
    n, correct = len(items.labels), items.correct
    yield share("accuracy", correct)
    if classes >= TOP_5_FROM:
        yield share("accuracy_top5", items.ranks < 5)
    yield Score.of("test_loss", items.loss, n)
    if len(group_names) > 1:
        for number, name in enumerate(group_names):
            yield share(f"accuracy: {name}", correct[items.groups == number])
            yield Score.of(f"train_samples: {name}", float(train_sizes[number]), int(sum(train_sizes)))
        for name, value in group_summary(correct, items.groups, np.asarray(train_sizes)).items():
            yield Score.of(name, value, n)


def group_accuracies(correct: np.ndarray, groups: np.ndarray, number: int) -> np.ndarray:
    """Return the (number,) accuracies of the groups of the (n,) outcomes; NaN for an empty group."""
    counts = np.bincount(groups, minlength=number)
    hits = np.bincount(groups, weights=correct, minlength=number)
    with np.errstate(invalid="ignore"):
        return hits / counts


def group_summary(correct: np.ndarray, groups: np.ndarray, train_sizes: np.ndarray) -> dict[str, float]:
    """Return both averages, the worst group and the gap (Sagawa et al. 2020).

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
