"""The forecast of a run: the cells that are left, and the time and memory that they take."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

from sparsebench.plan.jobs import Job
from sparsebench.records.record import Record, RecordSummary

LEAST_REST = 0.25
"""A running cell without progress is assumed to take at least this share of its elapsed time longer."""
Kind = Hashable
"""The kind of a job (`Job.alike`), or ALL_KINDS."""
ALL_KINDS: Kind = None


@dataclass
class Work:
    """The seconds that jobs took, and the sum of their costs."""

    seconds: float = 0.0
    cost: float = 0.0

    def seconds_of(self, cost: float) -> float:
        """Return the seconds of a job of this cost at the same speed."""
        return cost * self.seconds / self.cost


class Forecast:
    """The cells that are left, and the expected time until they are done.

    The time of a cell is `Job.cost` divided by a speed: that of the finished cells of its kind (`Job.alike`), or of all
    finished cells if its kind has none. The time left is the time of all cells divided by the number of workers, and at
    least the time of the longest cell.

    Args:
        jobs: the jobs of the plan.
        records: earlier records. Those of other cells are ignored.
        prior: returns the expected seconds of a job, used until a cell of its kind is done or has progress.
        left: the jobs to run; None for all.

    Attributes:
        left: the jobs without a record, by cell id.
        running: for each running cell its begin, in seconds since 1970, and the share of it that is done.
        lock: must be held to read several attributes while other threads change them.
    """

    def __init__(
        self,
        jobs: Collection[Job],
        records: Iterable[RecordSummary] = (),
        prior: Callable[[Job], float] | None = None,
        left: Collection[Job] | None = None,
    ):
        self._jobs = {job.cell.id: job for job in jobs}
        self._finished: defaultdict[Kind, Work] = defaultdict(Work)
        self._in_progress: dict[Kind, Work] = {}
        self._memory: dict[Kind, int] = {}
        self.left = {job.cell.id: job for job in (jobs if left is None else left)}
        self.running: dict[str, tuple[float, float]] = {}
        self.lock = threading.RLock()
        self._prior = {} if prior is None else {job.cell.id: prior(job) for job in jobs}
        for record in records:
            self._learn(record)

    def _learn(self, record: RecordSummary | Record) -> None:
        job = self._jobs.get(record.cell_id)
        if job is not None and record.status == "ok" and record.seconds > 0:
            for kind in (job.alike, ALL_KINDS):
                self._finished[kind].seconds += record.seconds
                self._finished[kind].cost += job.cost
            self._memory[job.alike] = max(self._memory.get(job.alike, 0), record.memory)

    def on_progress(self, cell_ids: Sequence[str], share: float, now: float | None = None) -> None:
        """Note the share of cells that is done; 0 if they begin.

        The share gives the speed of the cell's kind until a cell of this kind is done.

        Args:
            cell_ids: the cells. Those that are not among `left` are ignored.
            share: the share, from 0 to 1.
            now: the time in seconds since 1970; None for the current time.
        """
        now = time.time() if now is None else now
        with self.lock:
            for cell_id in cell_ids:
                job = self.left.get(cell_id)
                if job is None:
                    continue
                since, before = self.running.get(cell_id, (now, 0.0))
                if share < before:  # the cell was started again
                    since = now
                self.running[cell_id] = since, share
                if share > 0 and now > since:
                    work = Work((now - since) / share, job.cost)
                    self._in_progress[job.alike] = self._in_progress[ALL_KINDS] = work

    def done(self, record: Record) -> None:
        """Note the record of a finished cell."""
        with self.lock:
            self.drop(record.cell_id)
            self._learn(record)

    def drop(self, cell_id: str) -> None:
        """Note that a cell is not to be run any more."""
        with self.lock:
            self.left.pop(cell_id, None)
            self.running.pop(cell_id, None)

    def seconds(self, job: Job) -> float | None:
        """Return the expected seconds of a cell on one worker, or None before any speed is known."""
        prior = self._prior.get(job.cell.id)
        kinds: list[Kind] = [job.alike]
        if prior is None:  # a prior is better than the speed of other kinds of jobs
            kinds.append(ALL_KINDS)
        for kind in kinds:
            for works in (self._finished, self._in_progress):
                if kind in works:
                    return works[kind].seconds_of(job.cost)
        return prior

    def memory(self, job: Job) -> int | None:
        """Return the expected bytes of memory of a cell's worker, or None if no cell of its kind is done."""
        return self._memory.get(job.alike) or None

    def longest_first(self) -> list[Job]:
        """Return the jobs that are left, in the order in which they begin.

        Jobs that others start from come first, then one job of each kind without a finished cell, then the longest
        jobs. Jobs of equal length are grouped by plugin, as other code needs another worker. Otherwise they stay in
        their order, in which jobs with the same data are neighbours.
        """
        jobs = list(self.left.values())
        first_of_kind: dict[Kind, str] = {}
        for job in jobs:
            if job.alike not in self._finished:
                first_of_kind.setdefault(job.alike, job.cell.id)

        def place(job: Job) -> tuple[object, ...]:
            is_first = first_of_kind.get(job.alike) == job.cell.id
            length = self.seconds(job) or job.cost
            return job.order, not is_first, -length, job.code

        return sorted(jobs, key=place)

    def time_left(self, workers: int, now: float) -> float | None:
        """Return the expected seconds until all cells are done, or None before a speed is known for each.

        Args:
            workers: number of workers.
            now: the time in seconds since 1970, for the progress of running cells.
        """
        lengths: dict[object, float | None] = {}  # jobs of one kind and cost have one length
        times: list[float] = []
        for cell_id, job in self.left.items():
            if cell_id in self.running:
                seconds = self._rest(cell_id, workers, now)
            else:
                like = job.alike, job.cost
                if like not in lengths:
                    lengths[like] = self.seconds(job)
                seconds = lengths[like]
            if seconds is None:
                return None
            times.append(seconds)
        return max([sum(times) / max(1, workers), *times])

    def _rest(self, cell_id: str, workers: int, now: float) -> float | None:
        """Return the expected seconds left of a running cell: by its own progress, or else by the speed of others."""
        since, share = self.running[cell_id]
        # If a worker trains several cells in one program, each cell has only a part of its time. The time left is
        # divided by the number of workers later, so it is counted in seconds of a worker.
        workers_per_cell = min(1.0, max(1, workers) / len(self.running))
        elapsed = workers_per_cell * (now - since)
        if share:
            return elapsed * (1 - share) / share
        whole = self.seconds(self.left[cell_id])
        return None if whole is None else max(whole - elapsed, LEAST_REST * elapsed)
