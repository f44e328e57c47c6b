"""Every metric that a record can have, and what the outcomes of test items say: accuracy, loss, groups."""

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
RESERVED = frozenset({
    "accuracy_delta", "aligned_gap", "cell", "checksum", "failure", "init", "memory", "metrics", "notes", "samples",
    "test_ranks", "trajectory", "aligned_gap_reduction", "badge", "budget", "cell_id", "checks", "checks_remark",
    "class_folders", "cost_model", "device", "distribution", "environment", "how", "inactive", "kept_accuracy", "kind",
    "macs_at_2", "macs_ratio_asked", "model", "n_seeds", "n_train", "network", "pareto", "pareto_speed", "plugin",
    "random_inside_delta", "rank", "reason", "repetition", "revision", "sample_complexity", "sample_complexity_loss",
    "sample_complexity_ratio", "seconds", "seed", "setting", "speed_up", "spurious_gap_reduction", "started", "status",
    "strategy", "task", "test_foregrounds", "test_groups", "test_items", "test_labels", "test_predictions", "track",
    "trained", "version", "versus_dense", "versus_random_inside",
})  # fmt: skip
"""Columns of records and boards that are no metrics; boards have NAME_low and NAME_high of some as well."""


def value_of(name: str) -> str:
    """Return the column whose interval has an end in the column of that name; the name itself where it is no end."""
    return re.sub("_(low|high)$", "", name)


def _free(name: str) -> str:
    if value_of(name) in RESERVED:
        raise ValueError(f"'{name}' is the name of a column that is no metric's; rename it")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*(: GROUP)?$"), AfterValidator(_free)]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
OverSeeds = Literal["mean", "median", "none"]
Whole = Annotated[int, Field(gt=-(2**63), lt=2**63)]
"""A number that files with columns of 64 bits can hold."""
Real = Annotated[float, Field(ge=-1e75, le=1e75)]
"""A number whose fourth power is one too, as of variances of squares."""
TOP_5_FROM = 10
"""With fewer classes it says little that the label is among the five that the network finds likeliest."""
GROUP = ": GROUP"
"""What ends the name of a metric that each group has; records have the group's name there."""


@checked(frozen=True)
class MetricKind:
    """What one metric is.

    Attributes:
        name: its name in records.
        unit: "fraction", "MACs", "images/s", "loss", "steps", ...
        what: what it means, in a line.
        decided_by: what of a record it can be computed from again: its outcomes (`success` with the test loss), its
            trajectory, or nothing.
        over_seeds: how boards take it together over seeds; "none" where no board has it.
        more_is_better: None where neither is.
        title: the heading of its column; the name with spaces unless given.
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
        """What tables call it."""
        return self.title or self.name.replace("_", " ")


_M = MetricKind
METRICS = (
    _M("accuracy", "fraction", "test accuracy", "outcomes", "mean", True),
    _M("p_label", "fraction", "mean probability of the correct class in the test: exp(-loss) of each item, if the loss "
       "is the cross-entropy", "reported", "mean", True),
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
    _M("success_loss", "0 or 1",
       "whether the test loss meets the paper's criterion, where `success` is by the test error", "reported", "none",
       True),
    _M("fitted", "0 or 1", "whether the training samples were fitted before the step limit", "reported", "none", True),
    _M("test_loss", "loss", "mean loss of the test items", "reported", "none", False),
    _M("train_loss", "loss", "mean loss of the training samples, at the end", "reported", "none", False),
    _M("steps", "steps", "number of training steps", "reported", "none"),
    _M("epochs", "epochs", "number of training epochs", "reported", "none"),
    _M("kept_epoch", "epochs", "with early stopping: the epoch of the tested weights", "reported",
       "none"),
    _M("iterations", "steps", "training steps until the task's criterion was met, if training was watched", "reported",
       "none", False),
    _M("macs", "MACs", "MACs of one test sample, mean, including the selection", "trajectory", "none", False),
    _M("macs_dense", "MACs", "MACs of the model without a strategy", "trajectory", "none"),
    _M("macs_ratio", "fraction", "realised MACs divided by dense MACs", "trajectory", "mean", False),
    _M("macs_ratio_planned", "fraction", "MACs of the planned token counts divided by dense MACs", "reported", "none"),
    _M("macs_p95", "MACs", "95th percentile of the MACs of test samples, if they differ", "reported", "none", False),
    _M("images_per_s", "images/s", "median speed of timed test batches", "reported", "median", True),
    _M("timed_batch", "images", "size of the timed test batches; the last may be smaller", "reported", "none"),
    _M("parameters", "parameters", "parameters of the tested network, including those of the strategy", "reported",
       "none", False),
    _M("selection_auroc", "fraction", "how well scores separate relevant tokens from the others", "reported", "mean",
       True),
    _M("selection_precision", "fraction", "share of the kept tokens that are relevant", "reported", "none", True),
    _M("selection_recall", "fraction", "share of the relevant tokens that are kept", "reported", "none", True),
    _M("a_tsi", "ratio", "mean influence of tokens outside the object divided by that of tokens inside, if the task "
       "measures it", "reported", "none", False),
    _M("m_tsi", "ratio", "as `a_tsi`, with the largest influences", "reported", "none", False),
    _M("a_tsi_dense", "ratio", "`a_tsi` of the dense network", "reported", "none", False),
    _M("m_tsi_dense", "ratio", "`m_tsi` of the dense network", "reported", "none", False),
)  # fmt: skip
"""The metrics of sparsebench; tasks and models may declare others."""
_BY_NAME = {kind.name: kind for kind in METRICS}


def kind_of(name: str) -> MetricKind:
    """Return what the metric of a name in a record is; of groups by what stands before the group's name.

    Raises:
        KeyError: none of sparsebench's.
    """
    of_group = name.partition(": ")[0] + GROUP
    return _BY_NAME[of_group if of_group in _BY_NAME and ": " in name else name]


def decider_of(name: str) -> DecidedBy | None:
    """Return what decides a metric, or None where it is none of sparsebench's."""
    try:
        return kind_of(name).decided_by
    except KeyError:
        return None


class Metric(BaseModel):
    """One measured number; None where there is nothing to measure.

    Attributes:
        unit: "fraction", "MACs", "images/s", "loss", "steps", ...
        n: the number of things it was measured on.
        low, high, method: an interval, and how it was made.
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
        """Return the metric of that name, NaN as None, in its unit: that of `kind_of` but for what others declare."""
        return cls(
            value=None if value is None or np.isnan(value) else float(value), unit=unit or kind_of(name).unit, n=n
        )


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
        return float(self.losses.mean(dtype=np.float64))

    @property
    def accuracy(self) -> float:
        """The share that is predicted rightly."""
        return float(self.correct.mean())

    @property
    def p_label(self) -> float:
        """The mean probability of the own class, where the losses are cross-entropies."""
        return float(np.exp(-self.losses.astype(np.float64)).mean())


def share(outcomes: np.ndarray) -> Metric:
    """Return the share of true outcomes, with its Wilson interval over the items."""
    n, hits = len(outcomes), int(outcomes.sum())
    if n == 0:
        return Metric(value=None, unit="fraction", n=0)
    low, high = map(float, wilson(np.array(hits / n), np.array(n)))
    return Metric(value=hits / n, unit="fraction", n=n, low=low, high=high, method="Wilson 95 %")


def scores(items: Items, classes: int, group_names: Sequence[str], train_sizes: Sequence[int]) -> dict[str, Metric]:
    """Return what is known from the outcomes alone, by name.

    Args:
        items: the outcomes.
        classes: how many there are.
        group_names: of the groups, in order of their numbers; one where the task has none.
        train_sizes: how many training samples each group has.
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
