"""Which jobs come next, and which go together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from sparsebench.sweep.job import Job

TOGETHER = 1000
"""Cells given to a worker on a GPU at once; it trains as many at a time as its memory holds."""


def most_together(device: str) -> int:
    """Return how many cells a worker is given at once, if they can be trained in one program."""
    return 1 if device == "cpu" else TOGETHER


def batches(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """Yield the jobs in their order: neighbours that may go together in lists of at most `most`, others alone."""
    batch: list[Job] = []
    for job in jobs:
        if batch and not (job.together and batch[-1].together and len(batch) < most):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


class Queue:
    """Jobs in order, each handed out once those it waits for are done; some several at a time."""

    def __init__(self, jobs: Sequence[Job], most: int):
        self.waiting = list(batches(jobs, most))
        self.open = {job.cell.id for job in jobs}
        self.changed = threading.Condition()

    def take(self, wait: bool = True) -> list[Job] | None:
        """Return the next batch; None when there is none left, or, unless one is waited for, none that may start."""
        with self.changed:
            while self.waiting:
                for position, batch in enumerate(self.waiting):
                    if not any(job.after in self.open for job in batch):
                        return self.waiting.pop(position)
                if not wait:
                    return None
                self.changed.wait()
            return None

    def done(self, job: Job) -> None:
        """Take note that a job has its record."""
        with self.changed:
            self.open.discard(job.cell.id)
            self.changed.notify_all()

    def close(self) -> None:
        """Hand out no more."""
        with self.changed:
            self.waiting.clear()
            self.changed.notify_all()
