"""How long cells take: what each costs is known before, and how fast that goes from the cells that are done."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from sparsebench.plan.job import Job
from sparsebench.records.record import Head, Record

LONGER = 0.25
"""A cell under way that says nothing still takes this share of the time since it was begun, however long that was."""


class Spent(NamedTuple):
    """The seconds that cells took, what they cost, and the bytes of the largest."""

    seconds: float = 0.0
    cost: float = 0.0
    memory: int = 0


class Expected:
    """The seconds that cells are expected to take: `Job.cost`, at the speed of the cells of their kind that are done.

    A kind is `Job.alike`. Where none of a kind is done, all that are done count.

    Args:
        jobs: of the cells, whose costs are known.
        records: what was run so far; those of other cells do not count.
        prior: says how many seconds a cell takes, where none of its kind is done.
    """

    def __init__(
        self, jobs: Collection[Job], records: Iterable[Head] = (), prior: Callable[[Job], float] | None = None
    ):
        self._jobs = {job.cell.id: job for job in jobs}
        self._spent: defaultdict[object, Spent] = defaultdict(Spent)  # None has what all kinds spent
        self._said: defaultdict[object, Spent] = defaultdict(Spent)
        if prior is not None:
            for job in jobs:
                seconds, cost, _ = self._said[job.alike]
                self._said[job.alike] = Spent(seconds + prior(job), cost + job.cost)
        for record in records:
            self.add(record)

    def add(self, record: Head | Record) -> None:
        """Take note of a record."""
        job = self._jobs.get(record.cell_id)
        if job is not None and record.status == "ok" and record.seconds > 0:
            for kind in (job.alike, None):
                seconds, cost, memory = self._spent[kind]
                self._spent[kind] = Spent(seconds + record.seconds, cost + job.cost, max(memory, record.memory))

    def say(self, job: Job, seconds: float) -> None:
        """Take note that a cell under way says that it will take so long; it counts until one of its kind is done."""
        self._said[job.alike] = self._said[None] = Spent(seconds, job.cost)

    def seconds(self, job: Job) -> float | None:
        """Return the seconds that a cell takes on one worker; None before any cell is done."""
        tables = (self._spent, self._said)
        spent = next((known[kind] for kind in (job.alike, None) for known in tables if kind in known), None)
        return None if spent is None else job.cost * spent.seconds / spent.cost

    def length(self, job: Job) -> float:
        """Return what is longer for longer cells: their seconds, or before any cell is done what they cost."""
        return self.seconds(job) or job.cost

    def memory(self, job: Job) -> int | None:
        """Return the bytes that a cell's worker needs; None if no cell of its kind is done."""
        return self._spent.get(job.alike, Spent()).memory or None

    def longest_first(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that others start from, then one of each kind of which none is done, then the longest.

        Jobs that cost the same stay in their order.
        """
        first = {job.alike: job.cell.id for job in reversed(jobs) if job.alike not in self._spent}
        alone = set(first.values())
        return sorted(jobs, key=lambda job: (job.order, job.cell.id not in alone, -self.length(job)))


class Remaining:
    """The cells of a run without a record.

    They take as long as all of them on all workers, or as the longest one, whichever is more.

    Args:
        jobs: of these cells.
        expected: what cells are expected to take; it learns from each record.

    Attributes:
        running: since when cells are under way, and which share of each is done.
        lock: for who reads several of these while other threads take notes.
    """

    def __init__(self, jobs: Sequence[Job], expected: Expected):
        self.expected, self.jobs = expected, {job.cell.id: job for job in jobs}
        self.lock = threading.RLock()
        self.running: dict[str, tuple[float, float]] = {}

    def begin(self, cell_ids: Sequence[str], share: float, now: float | None = None) -> None:
        """Take note of cells that are begun, or of the share of one that is done, at a time in seconds since 1970."""
        now = time.time() if now is None else now
        with self.lock:
            for job in (self.jobs[cell_id] for cell_id in cell_ids if cell_id in self.jobs):
                since, before = self.running.get(job.cell.id, (now, 0.0))
                since = since if share >= before else now  # it begins again where a worker died
                self.running[job.cell.id] = since, share
                if share > 0 and now > since:
                    self.expected.say(job, (now - since) / share)

    def done(self, record: Record) -> None:
        """Take note of a record."""
        with self.lock:
            self.drop(record.cell_id)
            self.expected.add(record)

    def drop(self, cell_id: str) -> None:
        """Take note that a cell is no more to do."""
        with self.lock:
            self.jobs.pop(cell_id, None)
            self.running.pop(cell_id, None)

    def seconds(self, workers: int, now: float = 0.0) -> float | None:
        """Return how long the cells take on so many workers from a time on; None before anything says how fast."""
        one_of = {(job.alike, job.cost): job for job in self.jobs.values()}
        each = {like: self.expected.seconds(job) for like, job in one_of.items()}
        left = {cell_id: each[job.alike, job.cost] for cell_id, job in self.jobs.items()}
        left |= {cell_id: self._left(cell_id, workers, now) for cell_id in self.running}
        known = [seconds for seconds in left.values() if seconds is not None]
        return max([sum(known) / max(1, workers), *known]) if len(known) == len(left) else None

    def share(self, workers: int, now: float = 0.0) -> float:
        """Return how much of the cells under way is done, in cells."""
        left = {cell_id: self._left(cell_id, workers, now) for cell_id in self.running}
        gone = {cell_id: now - since for cell_id, (since, _) in self.running.items()}
        return sum(gone[c] / (gone[c] + seconds) for c, seconds in left.items() if seconds)

    def _left(self, cell_id: str, workers: int, now: float) -> float | None:
        """Return the seconds left of a cell under way: what it says of itself counts more than what others took."""
        since, share = self.running[cell_id]
        gone, expected = now - since, self.expected.seconds(self.jobs[cell_id])
        together = min(1.0, max(1, workers) / len(self.running))  # cells that a worker trains in one program
        if share:
            return together * gone * (1 - share) / share
        return None if expected is None else max(expected - together * gone, together * LONGER * gone)
