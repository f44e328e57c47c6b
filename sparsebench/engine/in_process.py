"""Cells in this process: for debugging. Nothing here protects a run from its strategies."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from pathlib import Path

from sparsebench.contain.exclusive import turn
from sparsebench.engine.limits import CHECKPOINT, Limits
from sparsebench.engine.queue import Queue, Seconds, most_together, unknown
from sparsebench.engine.setting import OnBegin, Setting, nobody
from sparsebench.engine.slots import first_of
from sparsebench.engine.stop import Stop
from sparsebench.planning.job import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Record
from sparsebench.tasks.base import Locations


class InProcess:
    """The engine without worker processes.

    Args:
        registry: from which strategies come.
        seconds: what each job is expected to take; among equals those are next whose data is there.
    """

    def __init__(self, registry: Registry, seconds: Seconds = unknown):
        self.registry, self.seconds = registry, seconds

    def records(
        self, jobs: Sequence[Job], setting: Setting, stop: Stop, on_begin: OnBegin = nobody
    ) -> Generator[Record, None, None]:
        """Yield the record of each job, run one after the other in this process; see `Engine`."""
        from sparsebench.cells.prepare import Context
        from sparsebench.cells.run_cell import run_cells
        from sparsebench.engine.worker import one_thread

        device, exclusive = first_of(setting.device), setting.limits.exclusive
        queue = Queue(jobs, most_together(device), self.seconds)
        with one_thread():
            context = Context(
                setting.out, device, setting.locations, setting.checkpoint, exclusive=exclusive,
                on_share=lambda cell_id, share: on_begin([cell_id], share),
            )  # fmt: skip
            while not stop.asked and (batch := queue.take("here", wait=False)):
                with turn(device) if exclusive else nullcontext():
                    records = run_cells(batch, self.registry, context, lambda at: on_begin([job.cell.id for job in at]))
                    for job, record in zip(batch, records, strict=True):
                        yield record
                        queue.done(job)


def inline(
    jobs: Sequence[Job],
    registry: Registry,
    out: Path,
    device: str,
    locations: Locations,
    checkpoint: float = CHECKPOINT,
    stop: Stop | None = None,
    on_begin: OnBegin = nobody,
    seconds: Seconds = unknown,
    exclusive: bool = False,
) -> Generator[Record, None, None]:
    """Yield the record of each job, run in this process; see `InProcess`."""
    limits = Limits(exclusive=exclusive)
    setting = Setting(out=out, device=device, locations=dict(locations), checkpoint=checkpoint, limits=limits)
    return InProcess(registry, seconds).records(jobs, setting, stop or Stop(), on_begin)
