"""Which jobs come next, and which go together."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from sparsebench.plan.job import Job
from sparsebench.runner.underway import CellLocks

LOOK = 0.25
"""Seconds between two looks at cells that other runs are at."""
TOGETHER = 1000
"""Cells given to a worker on a GPU at once; it trains as many at a time as its memory holds."""
Seconds = Callable[[Job], float | None]
"""What a job is expected to take, or None if nobody knows."""


def unknown(job: Job) -> None:
    """Know of no job what it will take."""


class _Place(NamedTuple):
    """What a worker has that was given a job: third-party code, and data; "" for jobs that are trained together."""

    code: tuple[str, ...]
    draw: str


class Queue:
    """Jobs in order, each handed out once those it waits for are done; some several at a time.

    Who asks is given data that it has already, if it can be, and else data that nobody else is at, with the same
    third-party code before other code, which needs a worker of its own. That is only a choice among jobs that are
    expected to take as long as the next one in order: longer ones never come later for it.

    Args:
        jobs: in the order in which they are begun.
        most: how many are handed out at once, of those that can be trained together.
        seconds: what each is expected to take.
        locks: which of them other runs are at: those are waited for last, and left out once they are done.
    """

    def __init__(self, jobs: Sequence[Job], most: int, seconds: Seconds = unknown, locks: CellLocks | None = None):
        self.most = most
        self.equals: list[OrderedDict[_Place, deque[list[Job]]]] = []
        for _, equals in groupby(jobs, lambda job: (job.order, None if self._joins(job) else seconds(job))):
            places = OrderedDict[_Place, deque[list[Job]]]()  # a dict passes by all that was taken out, each time
            for job in sorted(equals, key=lambda job: bool(job.strangers)):
                batches = places.setdefault(self._place(job), deque())
                if batches and self._joins(job) and len(batches[-1]) < most:
                    batches[-1].append(job)
                else:
                    batches.append([job])
            self.equals.append(places)
        self.open = {job.cell.id for job in jobs}
        self.at: dict[object, _Place] = {}
        self.locks, self.elsewhere, self.closed = locks, list[Job](), False
        self.changed = threading.Condition()

    def _joins(self, job: Job) -> bool:
        """Say whether a job can be handed out with others."""
        return job.together and self.most > 1

    def _place(self, job: Job) -> _Place:
        return _Place(job.code, "" if self._joins(job) else job.cell.draw)

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
        for places in self.equals:
            if (place := self._choice(places, current, others)) is None:
                continue
            batches = places[place]
            at = self._first(batches)
            assert at is not None
            batch = batches[at]
            del batches[at]
            if not batches:
                del places[place]
            if not places:
                self.equals.remove(places)
            if who is not None:
                self.at[who] = place
            return batch
        return None

    def _choice(
        self, places: Mapping[_Place, Sequence[list[Job]]], current: _Place, others: Collection[_Place]
    ) -> _Place | None:
        """Return the current place, or the first with the same code that nobody else is at, or that at least, or any.

        None where no batch may start.
        """
        if current in places and self._first(places[current]) is not None:
            return current
        first: dict[bool, _Place] = {}
        for place, batches in places.items():
            if self._first(batches) is not None:
                same = place.code == current.code
                if same and place not in others:
                    return place
                first.setdefault(same or place not in others, place)
        return first.get(True) or first.get(False)

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
