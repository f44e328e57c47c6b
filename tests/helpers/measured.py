"""Helpers for tests of records: small cells, and access to the values of a record."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparsebench.records.record import Record

TINY = str(Path(__file__).with_name("tiny.toml"))
"""A suite whose cells take a tenth of a second."""
TOKENS = str(Path(__file__).resolve().parents[1] / "plugins" / "brings_tokens.py")
"""A plugin file with a task and a model of tokens."""
COMPOSITE = "composite:epochs=1,test=40,pretrain_epochs=0"
VIT = "vit:dim=16,depth=3,heads=2"

Measure = Callable[..., Record]


def value(record: Record, metric: str) -> float:
    number = record.metrics[metric].value
    assert number is not None, metric
    return number


def reason(record: Record) -> str:
    assert record.failure is not None
    return record.failure.reason


def what_was_measured(record: Record) -> dict[str, Any]:
    """Return the record without the fields that depend on the run, such as times."""
    metrics = {name: metric for name, metric in record.metrics.items() if name not in ("images_per_s", "timed_batch")}
    return record.model_dump(exclude={"started", "seconds", "memory", "samples"}) | {"metrics": metrics}
