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
    _M("p_label", "fraction", "probability of the right class, mean over the test: of e to the minus loss of each "
       "item, where the loss is the cross-entropy", "reported", "mean", True),
    _M("accuracy_top5", "fraction", "the true class is among the five likeliest", "outcomes", "none", True),
    _M("accuracy" + GROUP, "fraction", "of one group of the test", "outcomes", "mean", True),
    _M("train_samples" + GROUP, "samples", "of one group of the training data", "reported", "none"),
    _M("average_test", "fraction", "test accuracy, groups weighted as in the test", "outcomes", "none", True),
    _M("average_train", "fraction", "test accuracy, groups weighted as in training", "outcomes", "none", True),
    _M("validation_accuracy", "fraction", "of the weights that are tested", "reported", "none", True),
    _M("validation_worst_group_accuracy", "fraction", "the same of the worst group", "reported", "none", True),
    _M("worst_group_accuracy", "fraction", "the smallest accuracy of a group", "outcomes", "mean", True),
    _M("spurious_gap", "fraction", "average minus worst-group accuracy", "outcomes", "mean", False),
    _M("success", "0 or 1", "whether the test met the task's criterion", "outcomes", "none", True),
    _M("success_loss", "0 or 1", "task `theory` with `criterion=error`: whether it met the paper's, which is of the "
       "loss", "reported", "none", True),
    _M("fitted", "0 or 1", "whether the training samples were fitted before the step limit", "reported", "none", True),
    _M("test_loss", "loss", "mean over the test", "reported", "none", False),
    _M("train_loss", "loss", "mean over the training samples, at the end", "reported", "none", False),
    _M("steps", "steps", "of training", "reported", "none"),
    _M("epochs", "epochs", "of training", "reported", "none"),
    _M("kept_epoch", "epochs", "after which the weights that are tested were taken, with early stopping", "reported",
       "none"),
    _M("iterations", "steps", "until the task's criterion was met, where training was watched", "reported", "none",
       False),
    _M("macs", "MACs", "of one test sample, mean; selection included", "trajectory", "none", False),
    _M("macs_dense", "MACs", "of the model without a strategy", "trajectory", "none"),
    _M("macs_ratio", "fraction", "realised, of the dense ones", "trajectory", "mean", False),
    _M("macs_ratio_planned", "fraction", "what the budget was solved to", "reported", "none"),
    _M("macs_p95", "MACs", "of one test sample, 95th percentile; where they differ", "reported", "none", False),
    _M("images_per_s", "images/s", "median of timed test batches", "reported", "median", True),
    _M("timed_batch", "images", "of each of those batches, but for a last one that is smaller", "reported", "none"),
    _M("parameters", "parameters", "of the network that is tested, those that the strategy learns included", "reported",
       "none", False),
    _M("selection_auroc", "fraction", "how well scores separate relevant tokens from the others", "reported", "mean",
       True),
    _M("selection_precision", "fraction", "of kept tokens, the relevant ones", "reported", "none", True),
    _M("selection_recall", "fraction", "of relevant tokens, the kept ones", "reported", "none", True),
    _M("a_tsi", "ratio", "influence of tokens outside the object over that of those inside, by means; where it is "
       "asked for", "reported", "none", False),
    _M("m_tsi", "ratio", "the same, by the largest influences", "reported", "none", False),
    _M("a_tsi_dense", "ratio", "`a_tsi` of the network with nothing acting", "reported", "none", False),
    _M("m_tsi_dense", "ratio", "`m_tsi` of the network with nothing acting", "reported", "none", False),
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
