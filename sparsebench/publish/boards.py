"""Boards of one's own: records that contradict themselves or each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.publish import recount, rescore
from sparsebench.publish.folder import Unfit, plain
from sparsebench.publish.parts import shipped_model, shipped_task, truths
from sparsebench.records import store
from sparsebench.records.record import Record


def contradictions(folder: Path) -> Iterator[str]:
    """Yield what in the records of a board is not what their outcomes and token trajectories come to.

    What tasks and models that do not come with sparsebench cost is taken as it is reported.
    """
    networks, known = recount.Networks(), dict[tuple[str, str], str]()
    for record in store.read(folder).values():
        if record.status != "ok":
            continue
        where = f"cell {record.cell_id} ({plain(record.label, 60)} on {plain(record.cell.task.name, 40)})"
        try:
            for text in _of(record, networks, known):
                yield f"{where}: {text}"
        except (Unfit, UserError, ArithmeticError, ValueError, MemoryError) as error:
            yield f"{where}: {plain(error)}"


def _of(record: Record, networks: recount.Networks, known: dict[tuple[str, str], str]) -> Iterator[str]:
    """Yield what one record contradicts; what records must agree on is in `known` afterwards."""
    items = rescore.items_of(record)
    if items is None:
        return
    task, model = shipped_task(record.cell.task), shipped_model(record.cell.model)
    asked = getattr(task, "test", 0)
    if asked and len(items.labels) != asked:
        yield f"it has {len(items.labels)} test items, and its task {asked}"
    yield from rescore.differences(record, items, task)
    for truth, what in truths(record, items):
        if known.setdefault(truth, what) != what:
            yield f"its {truth[0]} are others than those of another cell"
    if task is not None and model is not None:
        yield from recount.differences(record, items.labels, task, model, networks)
