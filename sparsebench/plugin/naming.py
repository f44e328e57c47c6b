"""What observers tell of a record, under names that any of their formats takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from sparsebench.records.cell import Part, canonical
from sparsebench.records.record import Record

STEPS, SERIES = "watched_steps", "watched_"


def slug(text: str, most: int = 80) -> str:
    """Return at most so many letters, digits, dots, dashes and underscores that resemble the text."""
    return re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII)[:most].strip(".") or "_"


def key(text: str) -> str:
    """Return the text if it is a slug, else its slug with a hash of it, so that no two texts have one key."""
    plain = slug(text)
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def experiment(record: Record) -> str:
    """Return task-model: what is compared with each other."""
    return f"{key(record.cell.task.name)}-{key(record.cell.model.name)}"


def title(record: Record) -> str:
    """Return what people call the cell within its experiment."""
    cell = record.cell
    where = "" if cell.where == "both" else f", {cell.where} only"
    return f"{record.label}, {cell.budget.label}{where}, {cell.n_train} samples, repetition {cell.repetition}"


def parameters(record: Record) -> dict[str, bool | int | float | str]:
    """Return the cell flat: strategy, strategy.power, budget.macs, ...; the cell it starts from by its id."""
    cell = record.cell
    flat: dict[str, Any] = {"label": record.label, "kind": record.kind, "status": record.status}
    for name in ("task", "model", "strategy"):
        part: Part = getattr(cell, name)
        flat |= {name: part.name} | {f"{name}.{parameter}": value for parameter, value in part.params.items()}
    flat |= {f"budget.{parameter}": value for parameter, value in cell.budget.model_dump(mode="json").items()}
    flat |= {"n_train": cell.n_train, "where": cell.where, "repetition": cell.repetition}
    flat["init"] = cell.init.id if cell.init else None
    return {key(name): _plain(value) for name, value in flat.items() if value is not None}


def _plain(value: Any) -> bool | int | float | str:
    """Return numbers as they are and all else as text."""
    return value if isinstance(value, bool | int | float | str) else canonical(value)


def metrics(record: Record) -> dict[str, float]:
    """Return the value of each metric that has one."""
    return {key(name): float(metric.value) for name, metric in record.metrics.items() if metric.value is not None}


def series(record: Record) -> Iterator[tuple[str, int, float]]:
    """Yield name, step and value of all that was watched while training."""
    steps = record.samples.get(STEPS, ())
    for name, values in record.samples.items():
        if name.startswith(SERIES) and name != STEPS:
            for step, value in zip(steps, values, strict=True):
                if step is not None and value is not None:
                    yield key(name), int(step), value
