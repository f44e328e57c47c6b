"""Which jobs come next, and which go together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import islice, takewhile

from sparsebench.plan.job import Job
from sparsebench.runner.underway import CellLocks

LOOK = 0.25
"""Seconds between two looks at cells that other runs are at."""
TOGETHER = 1000
"""Cells given to a worker on a GPU at once; it trains as many at a time as its memory holds."""
AHEAD = 64
"""Jobs among which one is chosen."""


class Queue:
    """Jobs in order, each handed out once the one that it starts from is done; some several at a time.

    Who asks is given a job with the data and third-party code of its last one, if it can be, and else one with data
    that nobody else is at, with the same code before other code, which needs a worker of its own. That is only a
    choice among the next jobs that are expected to take equally long: longer ones never come later for it.

    Args:
        jobs: in the order in which they are begun.
        most: how many are handed out at once, of those that can be trained together.
        seconds: what each is expected to take, or None if nobody knows.
        locks: which of them other runs are at: those are waited for last, and left out once they are done.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        most: int,
        seconds: Callable[[Job], float | None] = lambda job: None,
        locks: CellLocks | None = None,
    ):
        self.most, self.locks = most, locks
        self.length = {job.cell.id: (job.order, None if self._joins(job) else seconds(job)) for job in jobs}
        self.left, self.open = list(jobs), {job.cell.id for job in jobs}
        self.at: dict[object, Job] = {}
        self.elsewhere, self.closed = list[Job](), False
        self.changed = threading.Condition()

    def _joins(self, job: Job) -> bool:
        """Say whether a job can be handed out with others."""
        return job.together and self.most > 1

    def take(self, who: object = None, wait: bool = True) -> list[Job] | None:
        """Return the next batch; None when there is none left, or, unless one is waited for, none that may start.

        Args:
            who: asks, and has the data of what it was given last; None has none.
            wait: whether one that waits for others is waited for.
        """
        with self.changed:
            while (self.left or self.elsewhere) and not self.closed:
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
        ready = ((at, job) for at, job in enumerate(self.left) if job.after not in self.open)
        if (first := next(ready, None)) is None:
            return None
        length, last = self.length[first[1].cell.id], self.at.get(who)
        code, draw = ((), "") if last is None else (last.code, last.cell.draw)
        others = {job.cell.draw for one, job in self.at.items() if one != who} - {draw}

        def unlike(item: tuple[int, Job]) -> tuple[bool, bool, bool]:
            job = item[1]
            return job.code != code, job.cell.draw in others, job.cell.draw != draw

        equals = takewhile(lambda item: self.length[item[1].cell.id] == length, ready)
        at, job = min((first, *islice(equals, AHEAD)), key=unlike)
        batch = [(at, job)]
        if self._joins(job):
            alike = (at for at in enumerate(self.left) if self._joins(at[1]) and at[1].code == job.code)
            batch = list(islice((at for at in alike if at[1].after not in self.open), self.most))
        for at, _ in reversed(batch):
            del self.left[at]
        if who is not None:
            self.at[who] = job
        return [job for _, job in batch]

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
