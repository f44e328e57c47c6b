"""The metrics of records, and those computed from the outcomes of test items: accuracy, loss, groups."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic.dataclasses import dataclass as checked

from sparsebench.stats.intervals import wilson

DecidedBy = Literal["outcomes", "trajectory", "reported"]
RESERVED = frozenset(
    {
        "accuracy_delta",
        "aligned_gap",
        "cell",
        "checksum",
        "failure",
        "init",
        "memory",
        "metrics",
        "notes",
        "samples",
        "schedule",
        "test_ranks",
        "trajectory",
        "aligned_gap_reduction",
        "badge",
        "budget",
        "cell_id",
        "checks",
        "checks_remark",
        "class_folders",
        "cost_model",
        "device",
        "distribution",
        "environment",
        "how",
        "iou_delta",
        "iou_random_delta",
        "images_to_fixed_target",
        "images_to_target",
        "images_to_target_rank",
        "inactive",
        "kept_accuracy",
        "kept_accuracy_rank",
        "kind",
        "linear_accuracy",
        "linear_delta",
        "linear_images_per_s",
        "linear_random_delta",
        "macs_at_2",
        "macs_ratio_asked",
        "model",
        "n_seeds",
        "n_train",
        "neighbour_delta",
        "neighbour_random_delta",
        "network",
        "pareto",
        "pareto_speed",
        "plugin",
        "random_delta",
        "rank",
        "reason",
        "repetition",
        "revision",
        "sample_complexity",
        "sample_complexity_loss",
        "sample_complexity_ratio",
        "variant",
        "seconds",
        "seed",
        "setting",
        "speed_up",
        "spurious_gap_reduction",
        "started",
        "status",
        "strategy",
        "task",
        "test_foregrounds",
        "test_groups",
        "test_items",
        "test_labels",
        "test_neighbours",
        "test_predictions",
        "track",
        "trained",
        "version",
        "versus_dense",
        "versus_random",
    }
)
"""Columns of records and boards that are not metrics; boards also have NAME_low and NAME_high of some."""


def value_of(name: str) -> str:
    """Return the column name without "_low" or "_high", the ends of its interval."""
    return re.sub("_(low|high)$", "", name)


def _free(name: str) -> str:
    if value_of(name) in RESERVED:
        raise ValueError(f"'{name}' is the name of a column that is not a metric; rename it")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*(: GROUP)?$"), AfterValidator(_free)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
OverSeeds = Literal["mean", "median", "none"]
Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]
"""An integer that fits into a column of 64 bits."""
Real = Annotated[float, Field(ge=-1e75, le=1e75)]
"""A number whose fourth power is finite, for variances of squares."""
TOP_5_FROM = 10
"""The smallest number of classes for which top-5 accuracy is computed; with fewer classes it means little."""
GROUP = ": GROUP"
"""The ending of the names of metrics of groups; records have the group's name instead of GROUP."""


@checked(frozen=True)
class MetricKind:
    """The definition of a metric.

    Attributes:
        name: its name in records.
        unit: "fraction", "MACs", "images/s", "loss", "steps", ...
        what: its meaning, in one line.
        decided_by: the part of a record from which it can be recomputed: "outcomes" (`success` also needs the test
            loss), "trajectory", or "reported" if it cannot be recomputed.
        over_seeds: how boards aggregate it over seeds; "none" if no board has it.
        more_is_better: None if neither more nor less is better.
        title: the heading of its column; by default the name with spaces.
    """

    name: Name
    unit: Text
    what: Text
    decided_by: DecidedBy = "reported"
    over_seeds: OverSeeds = "mean"
    more_is_better: bool | None = None
    title: str = ""

    @property
    def heading(self) -> str:
        """The heading of its column in tables."""
        return self.title or self.name.replace("_", " ")


_M = MetricKind
METRICS = (
    _M("accuracy", "fraction", "test accuracy", "outcomes", "mean", True),
    _M(
        "p_label",
        "fraction",
        "mean probability of the correct class in the test: exp(-loss) of each item, if the loss is the cross-entropy",
        "reported",
        "mean",
        True,
    ),
    _M(
        "neighbour_accuracy",
        "fraction",
        "on the track probe: test accuracy of the nearest neighbours among the training images",
        "reported",
        "none",
        True,
    ),
    _M(
        "iou",
        "fraction",
        "task patches: intersection over union of predicted and true patches, mean over the object classes of the test",
        "outcomes",
        "mean",
        True,
    ),
    _M(
        "iou_pixels",
        "fraction",
        "the same on pixels, with the scores of patches upsampled (bilinear)",
        "reported",
        "mean",
        True,
    ),
    _M("accuracy_relevant", "fraction", "task patches: accuracy on patches of objects", "outcomes", "mean", True),
    _M(
        "accuracy_irrelevant",
        "fraction",
        "task patches: accuracy on patches of the background",
        "outcomes",
        "mean",
        True,
    ),
    _M(
        "accuracy_boundary",
        "fraction",
        "task patches: accuracy on patches with pixels of several classes",
        "reported",
        "mean",
        True,
    ),
    _M("accuracy_top5", "fraction", "top-5 test accuracy", "outcomes", "none", True),
    _M("accuracy" + GROUP, "fraction", "test accuracy of one group", "outcomes", "mean", True),
    _M("train_samples" + GROUP, "samples", "number of training samples of one group", "reported", "none"),
    _M("average_test", "fraction", "test accuracy, with groups weighted as in the test", "outcomes", "none", True),
    _M("average_train", "fraction", "test accuracy, with groups weighted as in training", "outcomes", "none", True),
    _M("validation_accuracy", "fraction", "validation accuracy of the tested weights", "reported", "none", True),
    _M("validation_worst_group_accuracy", "fraction", "the same for the worst group", "reported", "none", True),
    _M("worst_group_accuracy", "fraction", "smallest test accuracy of a group", "outcomes", "mean", True),
    _M("spurious_gap", "fraction", "average accuracy minus worst-group accuracy", "outcomes", "mean", False),
    _M("success", "0 or 1", "whether the test result meets the task's criterion", "outcomes", "none", True),
    _M(
        "success_loss",
        "0 or 1",
        "whether the test loss meets the paper's criterion, where `success` is by the test error",
        "reported",
        "none",
        True,
    ),
    _M("fitted", "0 or 1", "whether the training samples were fitted before the step limit", "reported", "none", True),
    _M("test_loss", "loss", "mean loss of the test items", "reported", "none", False),
    _M("train_loss", "loss", "mean loss of the training samples, at the end", "reported", "none", False),
    _M("steps", "steps", "number of training steps", "reported", "none"),
    _M("epochs", "epochs", "number of training epochs", "reported", "none"),
    _M("kept_epoch", "epochs", "with early stopping: the epoch of the tested weights", "reported", "none"),
    _M(
        "iterations",
        "steps",
        "training steps until the task's criterion was met, if training was watched",
        "reported",
        "none",
        False,
    ),
    _M("macs", "MACs", "MACs of one test sample, mean, including the selection", "trajectory", "none", False),
    _M("macs_dense", "MACs", "MACs of the model without a strategy", "trajectory", "none"),
    _M("macs_ratio", "fraction", "realised MACs divided by dense MACs", "trajectory", "mean", False),
    _M("macs_ratio_planned", "fraction", "MACs of the planned token counts divided by dense MACs", "reported", "none"),
    _M("macs_p95", "MACs", "95th percentile of the MACs of test samples, if they differ", "reported", "none", False),
    _M("images_per_s", "images/s", "median speed of timed test batches", "reported", "median", True),
    _M("timed_batch", "images", "size of the timed test batches; the last may be smaller", "reported", "none"),
    _M(
        "parameters",
        "parameters",
        "parameters of the tested network, including those of the strategy",
        "reported",
        "none",
        False,
    ),
    _M(
        "selection_auroc",
        "fraction",
        "how well scores separate relevant tokens from the others",
        "reported",
        "mean",
        True,
    ),
    _M("selection_precision", "fraction", "share of the kept tokens that are relevant", "reported", "none", True),
    _M("selection_recall", "fraction", "share of the relevant tokens that are kept", "reported", "none", True),
    _M(
        "a_tsi",
        "ratio",
        "mean influence of tokens outside the object divided by that of tokens inside, if the task measures it",
        "reported",
        "none",
        False,
    ),
    _M("m_tsi", "ratio", "as `a_tsi`, with the largest influences", "reported", "none", False),
    _M("a_tsi_dense", "ratio", "`a_tsi` of the dense network", "reported", "none", False),
    _M("m_tsi_dense", "ratio", "`m_tsi` of the dense network", "reported", "none", False),
)
"""The metrics of sparsebench; tasks and models may declare others."""
_BY_NAME = {kind.name: kind for kind in METRICS}


def kind_of(name: str) -> MetricKind:
    """Return the definition of a metric by its name in a record, with or without a group.

    Raises:
        KeyError: it is not a metric of sparsebench.
    """
    of_group = name.partition(": ")[0] + GROUP
    return _BY_NAME[of_group if of_group in _BY_NAME and ": " in name else name]


def decider_of(name: str) -> DecidedBy | None:
    """Return `decided_by` of a metric, or None if it is not a metric of sparsebench."""
    try:
        return kind_of(name).decided_by
    except KeyError:
        return None


class Metric(BaseModel):
    """One measured number.

    Attributes:
        value: the number, or None if there is nothing to measure.
        unit: "fraction", "MACs", "images/s", "loss", "steps", ...
        n: the number of items, samples or images it was measured on.
        low, high, method: an interval, or None, and how it was computed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    value: Real | None
    unit: str
    n: Whole
    low: Real | None = None
    high: Real | None = None
    method: str = ""

    @classmethod
    def of(cls, name: str, value: float | None, n: int, unit: str = "") -> Metric:
        """Return a metric with NaN as None; the unit is that of `kind_of` if it is not given."""
        return cls(
            value=None if value is None or np.isnan(value) else float(value), unit=unit or kind_of(name).unit, n=n
        )


@dataclass(frozen=True)
class Items:
    """The outcomes of n test items; arrays are (n,) unless noted.

    Attributes:
        predicted, labels, groups: numbers of classes and groups.
        ranks: how many classes have larger outputs than the label; 0 if the label is predicted.
        losses: losses in single precision.
        foregrounds: numbers of the foregrounds, or None; see `Split`.
        confidence: probability of the predicted class, if the loss is the cross-entropy, else None.
        kept: (n, N) booleans, which patches or input tokens are kept at the end; of merged ones the first is. All are
            True without a strategy. Records have neither `confidence` nor `kept`, so both are None after reading.
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
        """(n,) booleans, which items are predicted correctly."""
        return self.predicted == self.labels

    @property
    def loss(self) -> float:
        """The mean loss."""
        return float(self.losses.mean(dtype=np.float64))

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return float(self.correct.mean())

    @property
    def p_label(self) -> float:
        """The mean probability of the label, if the losses are cross-entropies."""
        return float(np.exp(-self.losses.astype(np.float64)).mean())


def share(outcomes: np.ndarray) -> Metric:
    """Return the share of the booleans that are True, with its Wilson interval over the items."""
    n, hits = len(outcomes), int(outcomes.sum())
    if n == 0:
        return Metric(value=None, unit="fraction", n=0)
    low, high = map(float, wilson(np.array(hits / n), np.array(n)))
    return Metric(value=hits / n, unit="fraction", n=n, low=low, high=high, method="Wilson 95 %")


def scores(items: Items, classes: int, group_names: Sequence[str], train_sizes: Sequence[int]) -> dict[str, Metric]:
    """Return the metrics that follow from the outcomes alone, by name.

    Args:
        items: the outcomes.
        classes: number of classes.
        group_names: names of the groups, in order of their numbers; one name if the task has no groups.
        train_sizes: number of training samples of each group.
    """
    n, correct = len(items.labels), items.correct
    metrics = {"accuracy": share(correct)}
    if classes >= TOP_5_FROM:
        metrics["accuracy_top5"] = share(items.ranks < 5)
    metrics["test_loss"] = Metric.of("test_loss", items.loss, n)
    if len(group_names) > 1:
        for number, (name, size) in enumerate(zip(group_names, train_sizes, strict=True)):
            metrics[f"accuracy: {name}"] = share(correct[items.groups == number])
            metrics[f"train_samples: {name}"] = Metric(value=size, unit="samples", n=sum(train_sizes))
        summary = group_summary(correct, items.groups, np.asarray(train_sizes))
        metrics |= {name: Metric.of(name, value, n) for name, value in summary.items()}
    return metrics


def group_accuracies(correct: np.ndarray, groups: np.ndarray, number: int) -> np.ndarray:
    """Return the (number,) accuracies of groups, from (n,) outcomes and groups; NaN for an empty group."""
    counts = np.bincount(groups, minlength=number)
    hits = np.bincount(groups, weights=correct, minlength=number)
    with np.errstate(invalid="ignore"):
        return hits / counts


def group_summary(correct: np.ndarray, groups: np.ndarray, train_sizes: np.ndarray) -> dict[str, float]:
    """Return both averages, the accuracy of the worst group, and the gap (Sagawa et al. 2020).

    `average_test` weights groups by their test items, `average_train` by their training samples `train_sizes`. The gap
    is `average_test` minus the accuracy of the worst group.
    """
    accuracies = group_accuracies(correct, groups, len(train_sizes))
    valid = ~np.isnan(accuracies)
    weights = train_sizes[valid]
    average = float(np.mean(correct))
    worst = float(accuracies[valid].min())
    return {
        "average_test": average,
        "average_train": float(np.average(accuracies[valid], weights=weights)) if weights.sum() else average,
        "worst_group_accuracy": worst,
        "spurious_gap": average - worst,
    }
