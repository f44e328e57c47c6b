"""Which jobs come next, and which go together."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from sparsebench.plan.job import Job
from sparsebench.runner.underway import CellLocks

LOOK = 0.25
"""Seconds between two looks at cells that other runs are at."""
TOGETHER = 1000
"""Cells given to a worker on a GPU at once; it trains as many at a time as its memory holds."""


def most_together(device: str) -> int:
    """Return how many cells a worker is given at once, if they can be trained in one program."""
    return 1 if device == "cpu" else TOGETHER


def batches(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """Yield the jobs in their order: neighbours that may go together in lists of at most `most`, others alone."""
    batch: list[Job] = []
    for job in jobs:
        if batch and not (_alike(batch[-1], job) and len(batch) < most):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def _alike(one: Job, other: Job) -> bool:
    """Say whether two jobs may be given to a worker at once: never third-party code beside other."""
    return one.together and other.together and one.code == other.code


Seconds = Callable[[Job], float | None]
"""What a job is expected to take, or None if nobody knows."""


def unknown(job: Job) -> None:
    """Know of no job what it will take."""


class Queue:
    """Jobs in order, each handed out once those it waits for are done; some several at a time.

    Who asks is given data that it has already, if it can be, and else data that nobody else is at, with the same
    third-party code before other code, which needs a worker of its own. That is only a choice among jobs that are
    expected to take as long as the next one in order: longer ones never come later for it.

    Args:
        jobs: in the order in which they are begun.
        most: how many are handed out at once, see `batches`.
        seconds: what each is expected to take.
        locks: which of them other runs are at: those are waited for last, and left out once they are done.
    """

    def __init__(self, jobs: Sequence[Job], most: int, seconds: Seconds = unknown, locks: CellLocks | None = None):
        def length(job: Job) -> tuple[object, float | None]:
            return job.order, seconds(job)

        ordered = [job for _, equals in groupby(jobs, length) for job in _neighbours(list(equals))]
        parts = groupby(batches(ordered, most), lambda batch: length(batch[0]))
        self.equals = [_by_place(equals) for _, equals in parts]
        self.open = {job.cell.id for job in jobs}
        self.at: dict[object, _Place] = {}
        self.locks, self.elsewhere, self.closed = locks, list[Job](), False
        self.changed = threading.Condition()

    def take(self, who: object = None, wait: bool = True) -> list[Job] | None:
        """Return the next batch; None when there is none left, or, unless one is waited for, none that may start.

        Args:
            who: asks, and has the data of what it was given last; None has none.
            wait: whether one that waits for others is waited for.
        """
        with self.changed:
            while (self.equals or self.elsewhere) and not self.closed:
                if batch := self._next(who) or self._left_by_others():
                    if own := self._own(batch):
                        return own
                elif wait:
                    self.changed.wait(LOOK if self.elsewhere else None)
                else:
                    return None
            return None

    def _own(self, batch: list[Job]) -> list[Job]:
        """Return the jobs of a batch that no other run is at or has done."""
        if self.locks is None:
            return batch
        own = []
        for job in batch:
            if not self.locks.begin(job.cell.id):
                self.elsewhere.append(job)
            elif self.locks.is_done(job):
                self.locks.release(job.cell.id)
                self.done(job)
            else:
                own.append(job)
        return own

    def _left_by_others(self) -> list[Job]:
        """Take out one of the jobs that another run was at and is no more."""
        for job in self.elsewhere:
            if self.locks is not None and self.locks.begin(job.cell.id):
                self.elsewhere.remove(job)
                return [job]
        return []

    def _next(self, who: object) -> list[Job] | None:
        """Take out the next batch for somebody, if any may start."""
        current, others = self.at.get(who, _Place((), "")), {place for one, place in self.at.items() if one != who}
        for equals in self.equals:
            ready = ((place, at) for place, batches in equals.items() if (at := self._first(batches)) is not None)
            if current in equals and (at := self._first(equals[current])) is not None:
                place = current
            elif (choice := _best(ready, current, others)) is not None:
                place, at = choice
            else:
                continue
            batch = equals[place][at]
            del equals[place][at]
            if not equals[place]:
                del equals[place]
            if not equals:
                self.equals.remove(equals)
            if who is not None:
                self.at[who] = _place(batch[-1])
            return batch
        return None

    def _first(self, batches: Iterable[list[Job]]) -> int | None:
        """Return which of the batches is the first that waits for nothing, or None."""
        return next((at for at, batch in enumerate(batches) if not any(job.after in self.open for job in batch)), None)

    def done(self, job: Job) -> None:
        """Take note that a job has its record."""
        with self.changed:
            self.open.discard(job.cell.id)
            self.changed.notify_all()

    def close(self) -> None:
        """Hand out no more."""
        self.closed = True
        with self.changed:
            self.changed.notify_all()


def _neighbours(jobs: list[Job]) -> list[Job]:
    """Return the jobs with those that have the same data side by side, the first ones of all in their order.

    Those with third-party code come after others, and with the same code one after the other.
    """
    first: dict[object, int] = {}
    for job in jobs:
        first.setdefault(job.code, len(first))
        first.setdefault(job.cell.draw, len(first))
    return sorted(jobs, key=lambda job: (bool(job.strangers), first[job.code], first[job.cell.draw]))


class _Place(NamedTuple):
    """What a worker has that was given a job: third-party code, and data."""

    code: tuple[str, ...]
    draw: str


def _place(job: Job) -> _Place:
    return _Place(job.code, job.cell.draw)


def _best(ready: Iterator[tuple[_Place, int]], current: _Place, others: set[_Place]) -> tuple[_Place, int] | None:
    """Return the first place with the same code that nobody else is at, or that at least, or any; None of none."""
    first: dict[bool, tuple[_Place, int]] = {}
    for place, at in ready:
        same = place.code == current.code
        if same and place not in others:
            return place, at
        first.setdefault(same or place not in others, (place, at))
    return first.get(True) or first.get(False)


def _by_place(batches: Iterable[list[Job]]) -> OrderedDict[_Place, deque[list[Job]]]:
    """Return batches by what the first in each needs."""
    found: OrderedDict[_Place, deque[list[Job]]] = OrderedDict()  # a dict passes by all that was taken out, each time
    for batch in batches:
        found.setdefault(_place(batch[0]), deque()).append(batch)
    return found
