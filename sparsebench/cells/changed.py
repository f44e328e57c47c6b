"""What a cell's record says of a process that the cell has changed."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebench.contain.health import names_of_changes
from sparsebench.records.record import Failure, Record

CHANGED = "changed"
"""The note of a record whose cell has changed functions, hooks or settings of its whole process."""
JUDGE = "sparsebench."


def mark(record: Record, changed: Sequence[str]) -> Record:
    """Return the record of a cell after which that was changed of its process.

    Its result counts, with a note: what patches a library may be the method itself, and no other cell meets it. It does
    not count where functions of sparsebench are replaced, which are what measures it.
    """
    if not changed:
        return record
    noted = record.model_copy(update={"notes": record.notes | {CHANGED: names_of_changes(changed)}})
    of_judge = [name for name in changed if name.startswith(JUDGE)]
    if record.status != "ok" or not of_judge:
        return noted
    failure = Failure(reason=f"it replaced what measures it: {names_of_changes(of_judge)}", kind="StrategyError")
    return Record(
        **{name: getattr(noted, name) for name in ("cell", "cell_id", "origin", "kind", "label", "started", "notes")},
        status="failed", failure=failure, seconds=noted.seconds, memory=noted.memory,
        environment=noted.environment, device=noted.device,
    )  # fmt: skip
