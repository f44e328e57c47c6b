"""A record as one flat row: what boards and exports are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sparsebench.errors import UserError
from sparsebench.records.cell import NETWORK, canonical
from sparsebench.records.record import MOST_METRICS, Metric, Record
from sparsebench.text import plain

Row = dict[str, Any]

PREDICTIONS = "test_predictions"
OUTCOMES = ("test_items", "test_labels", PREDICTIONS)
"""Columns of the test's outcomes: how many, and the labels and predictions as a record packs them."""
GROUPS = "test_groups"
"""The column of the test items' groups, packed likewise."""
FOREGROUNDS = "test_foregrounds"
"""The column of the numbers of the foregrounds that they show, packed likewise; "" where that is not known."""


LONG, LONGEST = 1000, {"setting": None}
"""Characters of a text in a row; of a setting, which is JSON, all."""
SEGMENT, CHECKSUM = "segment", "checksum"
TAKEN = frozenset({SEGMENT, CHECKSUM, "checks", "checks_remark"})
"""Columns that a metric cannot have, besides those of `row_of`."""


WHERE = {"both": "", "train": ", in training only", "test": ", in the test only"}
"""What a budget's text says of where it holds; in the frozen track it is the test everywhere."""


def row_of(record: Record) -> Row:
    """Return what a record is about, without its metrics; its texts are plain, whoever wrote them."""
    cell, origin, outcomes = record.cell, record.origin, record.outcomes
    track = cell.track if cell.n_train else "frozen"  # without training samples weights are tested as they are
    # Networks of two trainings are two settings; their repetitions are not, nor are checkpoints of one architecture.
    model = cell.model.model_dump()
    if cell.network:
        model["params"] = {name: value for name, value in model["params"].items() if name not in NETWORK}
    trainings = [] if cell.track == "scratch" else cell.inits
    network = [[part.task.model_dump(), part.model.model_dump(), part.n_train] for part in trainings]
    packed = {
        "test_labels": outcomes.label if outcomes else "",
        PREDICTIONS: outcomes.predicted if outcomes else "",
        GROUPS: outcomes.group if outcomes else "",
        FOREGROUNDS: outcomes.foreground if outcomes else "",
    }
    about = {
        "cell_id": record.cell_id,
        "status": record.status,
        "reason": record.failure.reason if record.failure else "",
        "task": cell.task.name,
        "model": cell.model.name,
        "strategy": record.label,
        "kind": record.kind,
        "budget": cell.budget.label + ("" if track == "frozen" else WHERE[cell.where]),
        "n_train": cell.n_train,
        "track": track,
        "repetition": cell.repetition,
        "network": cell.network,
        "macs_ratio_asked": None if cell.where == "train" else cell.budget.macs,
        "setting": canonical([cell.task.model_dump(), model, *network]),
        "device": record.device,
        "started": record.started,
        "seconds": record.seconds,
        "plugin": origin.plugin,
        "distribution": origin.distribution,
        "version": origin.version,
        "revision": origin.revision,
        "environment": record.environment,
        "inactive": record.notes.get("inactive", ""),
        "cost_model": record.notes.get("cost_model", ""),
        "test_items": outcomes.n if outcomes else 0,
    }
    return {name: plain(x, LONGEST.get(name, LONG)) if type(x) is str else x for name, x in about.items()} | packed


def metrics_of(record: Record, about: Row) -> dict[str, Metric]:
    """Return a record's metrics by their names, made plain, without those that are called as what it is about."""
    named = {plain(name): metric for name, metric in record.metrics.items()}
    return {name: metric for name, metric in named.items() if name not in about and name not in TAKEN}


def checked_names(names: Iterable[str]) -> list[str]:
    """Return the different names of metrics, sorted; UserError if they are so many that a table of them is too wide."""
    different = sorted(set(names))
    if len(different) > MOST_METRICS:
        raise UserError(f"these records have {len(different)} different metrics", allowed=f"up to {MOST_METRICS}")
    return different


def flatten(record: Record) -> Row:
    """Return a record as one flat row: what it is about, then each metric's value under its name."""
    about = row_of(record)
    return about | {name: metric.value for name, metric in metrics_of(record, about).items()}
