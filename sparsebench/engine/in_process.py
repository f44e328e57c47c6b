"""Cells in this process: for debugging. Nothing here protects a run from its strategies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from pathlib import Path

from sparsebench.contain.exclusive import turn
from sparsebench.engine.limits import CHECKPOINT
from sparsebench.engine.queue import Queue, Seconds, most_together, unknown
from sparsebench.engine.slots import first_of
from sparsebench.engine.stop import Stop
from sparsebench.planning.job import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record
from sparsebench.tasks.base import Locations


def inline(
    jobs: Sequence[Job],
    registry: Registry,
    out: Path,
    device: str,
    locations: Locations,
    checkpoint: float = CHECKPOINT,
    stop: Stop | None = None,
    on_begin: Callable[[Sequence[str]], None] = lambda ids: None,
    seconds: Seconds = unknown,
    exclusive: bool = False,
) -> Generator[Record, None, None]:
    """Yield the record of each job, run one after the other in this process; see `local`."""
    from sparsebench.cells.prepare import Context
    from sparsebench.cells.run_cell import run_cells
    from sparsebench.engine.worker import one_thread

    device = first_of(device)
    queue, context = (
        Queue(jobs, most_together(device), seconds),
        Context(out, device, locations, checkpoint, exclusive=exclusive),
    )
    with one_thread():
        while (stop is None or not stop.asked) and (batch := queue.take("here", wait=False)):
            with turn(device) if exclusive else nullcontext():
                records = run_cells(batch, registry, context, lambda at: on_begin([job.cell.id for job in at]))
                for job, record in zip(batch, records, strict=True):
                    yield record
                    queue.done(job)
