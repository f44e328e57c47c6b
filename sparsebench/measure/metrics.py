"""Every metric that a record can have: its unit, what it is, what decides it, and how boards take seeds together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from sparsebench.errors import UserError

DecidedBy = Literal["outcomes", "trajectory", "reported"]
OverSeeds = Literal["mean", "median", "none"]
FORM = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
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

    Raises:
        UserError: no name, unit or meaning, or another word than those.
    """

    name: str
    unit: str
    what: str
    decided_by: DecidedBy = "reported"
    over_seeds: OverSeeds = "mean"
    more_is_better: bool | None = None
    title: str = ""

    def __post_init__(self) -> None:
        for field in ("name", "unit", "what"):
            value = getattr(self, field)
            if not (isinstance(value, str) and value.strip()):
                raise UserError(f"metric {self.name!r} has no {field}", next_step=f"give it one: {field}='...'")
        for field, words in (("decided_by", get_args(DecidedBy)), ("over_seeds", get_args(OverSeeds))):
            if getattr(self, field) not in words:
                raise UserError(f"{field} of metric {self.name!r}", got=getattr(self, field), allowed=words)
        if self.more_is_better not in (None, True, False) or not isinstance(self.title, str):
            raise UserError(f"metric {self.name!r}: more_is_better is True, False or None, and title a text")

    @property
    def heading(self) -> str:
        """What tables call it."""
        return self.title or self.name.replace("_", " ")


GROUP = ": GROUP"
"""What ends the name of a metric that each group has; records have the group's name there."""
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


def kind_of(name: str) -> MetricKind:
    """Return what the metric of a name in a record is; of groups by what stands before the group's name.

    Raises:
        KeyError: none of sparsebench's.
    """
    of_group = name.partition(": ")[0] + GROUP
    return _BY_NAME[of_group if of_group in _BY_NAME and ": " in name else name]


def unit_of(name: str) -> str:
    """Return the unit of a metric, see `kind_of`."""
    return kind_of(name).unit


def decided_by(name: str) -> DecidedBy | None:
    """Return what decides a metric, or None where it is none of sparsebench's."""
    try:
        return kind_of(name).decided_by
    except KeyError:
        return None


def check(kinds: Iterable[MetricKind]) -> None:
    """Check the metrics that a task declares.

    Raises:
        UserError: one is no MetricKind, has another form of name, or a name that is taken.
    """
    seen: set[str] = set()
    for kind in kinds:
        if not isinstance(kind, MetricKind):
            raise UserError("metrics of a task", got=kind, allowed="values of sparsebench.measure.metrics.MetricKind")
        if not FORM.fullmatch(kind.name):
            raise UserError("name of a metric", got=kind.name, allowed="small letters, digits and _")
        plain = re.sub("_(low|high)$", "", kind.name)
        if {kind.name, plain} & ({*_BY_NAME} | RESERVED) or kind.name in seen:
            raise UserError(f"the name of metric '{kind.name}' is taken", next_step="rename it")
        seen.add(kind.name)
