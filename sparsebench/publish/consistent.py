"""What in a record follows from the rest of it: computed again, and compared with what stands there.

Accuracies follow from the outcomes of the test items, MACs from the token counts and the network's closed form. The
losses of single items are in no sealed record, so `test_loss` and `p_label` are taken as they stand. What belongs to a
task or model of a plugin is taken as it stands too: nothing of a plugin is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel, Step
from sparsebench.measure.metrics import decided_by
from sparsebench.measure.scores import TOP_5_FROM, Items, Score, scores
from sparsebench.models.shipped import SHIPPED as MODELS
from sparsebench.records import store
from sparsebench.records.cell import Part, canonical
from sparsebench.records.record import Metric, Record, unpack
from sparsebench.spec import fill
from sparsebench.tasks.base import Task
from sparsebench.tasks.shipped import SHIPPED as TASKS
from sparsebench.text import plain

TOLERANCE = 1e-12
"""Relative: another build may sum in another order, which differs by log2(n) 2^-53 (Higham 1993)."""
BY_GROUP, TRAINED, TOP_5 = "accuracy: ", "train_samples: ", "accuracy_top5"


def contradictions(folder: Path) -> Iterator[str]:
    """Yield what in the records of a run's folder does not follow from the rest of them, cell by cell."""
    for record in store.read(folder).values():
        for text in differences(record):
            yield f"{called(record)}: {text}"


def called(record: Record) -> str:
    """Return what messages call the cell of a record."""
    return f"cell {record.cell_id} ({plain(record.label, 60)} on {plain(record.cell.task.name, 40)})"


def items_of(record: Record) -> Items:
    """Return what came out for each test item of a record that is ok, with losses of 0.

    Raises:
        ValueError: there are no outcomes, or they are torn.
    """
    packed = record.outcomes
    if packed is None:
        raise ValueError("it has no outcomes")
    predicted, labels, groups = (unpack(text, packed.n) for text in (packed.predicted, packed.label, packed.group))
    shown = unpack(packed.foreground, packed.n) if packed.foreground else None
    losses = np.zeros(packed.n, np.float32)
    return Items(predicted, labels, groups, unpack(packed.rank, packed.n), losses, shown)


def differences(record: Record) -> Iterator[str]:
    """Yield what in a record does not follow from its outcomes and token counts; nothing of one that is not ok."""
    if record.status != "ok":
        return
    try:
        items = items_of(record)
        if ((items.ranks > 0) != (items.predicted != items.labels)).any():
            yield "a test item's rank and its predicted class disagree"
        task = _task(canonical(record.cell.task.model_dump(mode="json")))
        made = _scores(record, items)
        if task is not None and (loss := record.metrics.get("test_loss")) and loss.value is not None:
            successes = task.successes(loss.value, items.accuracy)
            made |= {name: Score.of(name, float(success), 1) for name, success in successes.items()}
        decided = {name for name in made.keys() | record.metrics.keys() if decided_by(name) == "outcomes"}
        if task is None:
            decided.discard("success")  # its criterion is not known
        for name in sorted(decided):
            yield from _difference(name, record.metrics.get(name), made.get(name))
        if task is not None:
            yield from _costs(record, items, task)
    except (ValueError, ArithmeticError, UserError) as error:  # numbers too large to count with, odd parameters
        yield plain(error)


def _scores(record: Record, items: Items) -> dict[str, Score]:
    """Return what outcomes decide, by name.

    The groups have names in a record, and numbers in its outcomes. As many items, and as many right ones, tell which is
    which: groups that are alike in both are alike in all that follows.
    """
    metrics = record.metrics
    names = [name.removeprefix(BY_GROUP) for name in metrics if name.startswith(BY_GROUP)]
    count = np.bincount(items.groups, minlength=len(names))
    if len(count) > max(1, len(names)):
        raise ValueError("a test item is in a group without a name")
    hits = np.bincount(items.groups, weights=items.correct, minlength=len(names))
    names.sort(key=lambda name: (metrics[BY_GROUP + name].n, metrics[BY_GROUP + name].value or 0.0))
    order = sorted(range(len(names)), key=lambda number: (count[number], hits[number]))
    named = [name for _, name in sorted(zip(order, names, strict=True))] or ["all"]
    known = (metrics.get(TRAINED + name) for name in named)
    sizes = [0 if one is None else int(one.value or 0) for one in known]
    made = scores(items, TOP_5_FROM if TOP_5 in metrics else 2, named, sizes)
    return {score.name: score for score in made if decided_by(score.name) == "outcomes"}


def _costs(record: Record, items: Items, task: Task) -> Iterator[str]:
    """Yield what the trajectory does not cost; nothing where only the built network knows."""
    parts = [canonical(part.model_dump(mode="json")) for part in (record.cell.task, record.cell.model)]
    try:
        costs = [_cost(*parts, classes) for classes in task.class_counts(items.labels)]
    except UserError:
        return
    steps = [Step(**step.model_dump()) for step in record.trajectory]
    found = []
    for cost in filter(None, costs):
        dense = cost.dense()
        if len(steps) != len(dense):
            yield f"its trajectory has {len(steps)} blocks, and the model {len(dense)}"
            return
        macs = {"macs": cost.macs(steps), "macs_dense": cost.macs(dense)}
        macs["macs_ratio"] = macs["macs"] / macs["macs_dense"]
        made = (Score.of(name, float(value), len(items.labels)) for name, value in macs.items())
        found.append([text for one in made for text in _difference(one.name, record.metrics.get(one.name), one)])
    yield from min(found, key=len, default=[])


def _difference(name: str, reported: Metric | None, made: Score | None) -> Iterator[str]:
    if reported is None or made is None:
        yield f"{plain(name, 60)} is {'missing' if reported is None else 'there, and does not follow from outcomes'}"
        return
    pairs = [(reported.value, made.value), (reported.low, made.low), (reported.high, made.high)]
    same = (reported.unit, reported.n) == (made.unit, made.n) and all(
        a is b if a is None or b is None else math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in pairs
    )
    if not same:
        yield f"{plain(name, 60)} is {_text(reported)}, and the rest of the record comes to {_text(made)}"


def _text(one: Metric | Score) -> str:
    interval = "" if one.low is None else f" [{one.low!r}, {one.high!r}]"
    return f"{one.value!r}{interval} {plain(one.unit, 20)} of {one.n}"


@lru_cache(maxsize=256)
def _task(part: str) -> Task | None:
    """Return the task of a cell's part in canonical JSON, or None where it does not come with this sparsebench."""
    named = Part.model_validate_json(part)
    cls = {cls.name: cls for cls in TASKS}.get(named.name)
    with suppress(UserError):  # it has parameters of an earlier version
        return None if cls is None else fill(cls, named.params, f"task '{named.name}'")
    return None


@lru_cache(maxsize=256)
def _cost(task: str, model: str, classes: int) -> CostModel | None:
    """Return the closed form of a network's MACs, or None where its task or model does not come with sparsebench."""
    named, drawn = Part.model_validate_json(model), _task(task)
    cls = {cls.name: cls for cls in MODELS}.get(named.name)
    if cls is None or drawn is None:
        return None
    return fill(cls, named.params, f"model '{named.name}'").cost(drawn, classes)
