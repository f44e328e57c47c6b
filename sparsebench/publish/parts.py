"""What records of one run must agree on, and which of their suites, tasks and models come with sparsebench."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import cast

import numpy as np

from sparsebench.budget import FULL
from sparsebench.errors import UserError
from sparsebench.measure.scores import Items
from sparsebench.models.base import Model
from sparsebench.models.shipped import SHIPPED as MODELS
from sparsebench.planning.expand import unanswered
from sparsebench.planning.suite import load, names
from sparsebench.plugin.registry import Registry
from sparsebench.publish import rescore
from sparsebench.publish.folder import plain
from sparsebench.records.cell import Cell, Part, canonical, digest, said_of
from sparsebench.records.manifests import Asked
from sparsebench.records.record import Record
from sparsebench.spec import fill
from sparsebench.tasks.base import Task
from sparsebench.tasks.shipped import SHIPPED as TASKS


def shipped_task(part: Part) -> Task | None:
    """Return the task of a cell, or None where it does not come with sparsebench; see `_make`."""
    return cast(Task | None, _make(Task, part.name, canonical(part.params), part.revision))


def shipped_model(part: Part) -> Model | None:
    """Return the model of a cell, or None where it does not come with sparsebench; see `_make`."""
    return cast(Model | None, _make(Model, part.name, canonical(part.params), part.revision))


@lru_cache(maxsize=256)
def _make(kind: type[Task] | type[Model], name: str, params: str, revision: str) -> Task | Model | None:
    """Return a task or model that comes with sparsebench, or None for another.

    Raises:
        UserError: it has no such parameters, or another revision here.
    """
    known: dict[str, type[Task] | type[Model]] = {cls.name: cls for cls in (TASKS if kind is Task else MODELS)}
    if name not in known:
        return None
    given, what = json.loads(params), f"{kind.__name__.lower()} '{name}'"
    if revision != (here := said_of(known[name].revision)):
        raise UserError(f"the revision of {what}", got=plain(revision or "1", 60), allowed=here or "1")
    made = fill(known[name], given, what)
    kept = made.model_dump(mode="json")
    if odd := sorted(key for key, value in given.items() if kept[key] != value):
        raise UserError(f"{what}: {odd[0]}", got=plain(given[odd[0]], 60))
    return made


def unanswered_of(suite: Asked, cells: Collection[Cell]) -> list[str]:
    """Return what a suite asks and cells of one strategy do not answer; nothing where the suite is not known here."""
    if suite.name not in names() or (known := load(suite.name)).version != suite.version:
        return []
    unbudgeted = all(cell.budget == FULL for cell in cells)
    return unanswered(known, cells, Registry(shipped_only=True), any_budget=unbudgeted)


def truths(record: Record, items: Items) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield what records must agree on, by what it is: the same task and repetition have the same test items."""
    cell = record.cell
    data = cell.task.model_dump(mode="json"), cell.repetition
    items_ = hashlib.sha256(np.stack([items.labels, items.groups]).tobytes()).hexdigest()
    yield ("test labels or groups", digest(data)), items_
    if items.foregrounds is not None:  # older records do not have them
        yield ("foregrounds", digest(data)), hashlib.sha256(items.foregrounds.tobytes()).hexdigest()
    sizes = {name: one.value for name, one in record.metrics.items() if name.startswith(rescore.TRAINED)}
    yield ("training groups", digest([*data, cell.n_train])), digest(sizes)
