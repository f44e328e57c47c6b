"""How long a run still takes: its cells without a record, those under way and those that wait."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparsebench.planning.expected import Expected, Like
from sparsebench.planning.job import Job
from sparsebench.records.record import Record

LONGER = 0.25
"""A cell under way still takes at least this share of its time so far, also where it was expected to be done by now."""


class Estimate(NamedTuple):
    """How long cells take.

    Attributes:
        seconds: None if nothing is known of any of them.
        over: whether nothing is known of some of them, so that it takes longer than that.
    """

    seconds: float | None
    over: bool


UNKNOWN = Estimate(None, over=True)


class _Report(NamedTuple):
    """That a share of a cell's training was done at a time in seconds."""

    now: float
    share: float


class Remaining:
    """The cells of a run without a record.

    They take as long as all of them on all workers, or as the longest row of cells of which each waits for the one
    before it, whichever is more.

    Args:
        jobs: of these cells.
        expected: what cells are expected to take; it learns from each record.
    """

    def __init__(self, jobs: Sequence[Job], expected: Expected):
        self.expected = expected
        self.jobs = {job.cell.id: job for job in jobs}
        self.running: dict[str, float] = {}
        self._reports: dict[str, tuple[_Report, _Report]] = {}
        self._waiting = Counter(map(expected.like, jobs))
        self._next: defaultdict[str, dict[str | Like, str]] = defaultdict(dict)
        starts = {job.after for job in jobs}
        for job in jobs:  # of those for which none waits, one of those that take as long stands for all
            self._next[job.after][job.cell.id if job.cell.id in starts else expected.like(job)] = job.cell.id

    def begin(self, cell_id: str, now: float, share: float = 0.0) -> None:
        """Take note of a cell that something begins for, at a time in seconds, or which share of its training is done.

        A share says more of how long the cell takes than what like cells took: others may be slower, or work beside it.
        """
        if cell_id in self.jobs and cell_id not in self.running:
            self.running[cell_id] = now
            self._waiting[self._like(cell_id)] -= 1
        if cell_id in self.running and 0 < share <= 1:
            report = _Report(now, share)
            first, last = self._reports.get(cell_id, (report, report))
            self._reports[cell_id] = (first if last.share <= share else report), report  # less where it begins again

    def done(self, record: Record) -> None:
        """Take note of a record."""
        if record.cell_id in self.jobs:
            if self.running.pop(record.cell_id, None) is None:
                self._waiting[self._like(record.cell_id)] -= 1
            del self.jobs[record.cell_id]
            self._reports.pop(record.cell_id, None)
        self.expected.add(record)

    def estimate(self, workers: int, now: float = 0.0) -> Estimate:
        """Return how long the cells take on so many workers from now on, a time in seconds."""
        waiting = {like: n for like, n in self._waiting.items() if n > 0}
        so_far = self._so_far(workers, now)
        likes = {*waiting, *map(self._like, so_far)}
        reported = self._time_left(now)
        seconds = {self._like(cell_id): so_far[cell_id] + left for cell_id, left in reported.items()}
        seconds |= {like: known for like in likes if (known := self.expected.seconds_of(like)) is not None}
        if likes and not seconds:
            return UNKNOWN
        over = len(seconds) < len(likes)
        left = {}
        for cell_id, gone in so_far.items():
            left[cell_id] = reported.get(cell_id, max(seconds.get(self._like(cell_id), 0.0) - gone, LONGER * gone))
        for like in likes - seconds.keys():  # at least as long as one of them is at work
            seconds[like] = max((gone for cell_id, gone in so_far.items() if self._like(cell_id) == like), default=0.0)
        total = sum(n * seconds[like] for like, n in waiting.items()) + sum(left.values())
        left |= {cell_id: seconds[self._like(cell_id)] for cell_id in self._next_of_all() - left.keys()}
        rows = (self._row(cell_id, left) for cell_id in left)
        return Estimate(max([total / max(1, workers), *rows, *(seconds[like] for like in waiting)]), over)

    def share(self, workers: int, now: float = 0.0) -> float:
        """Return how much of the cells under way is done, in cells; of cells of which nothing is known nothing."""
        left, done = self._time_left(now), 0.0
        for cell_id, gone in self._so_far(workers, now).items():
            seconds = self.expected.seconds_of(self._like(cell_id))
            if cell_id in left or seconds is not None:
                done += gone / max(1e-9, gone + left.get(cell_id, max((seconds or 0.0) - gone, LONGER * gone)))
        return done

    def _time_left(self, now: float) -> dict[str, float]:
        """Return the seconds left of each cell whose training has said twice how far it is."""
        left = {}
        for cell_id, (first, last) in self._reports.items():
            if last.share > first.share:
                each = (last.now - first.now) / (last.share - first.share)
                left[cell_id] = max(each * (1 - last.share) - (now - last.now), LONGER * (now - last.now))
        return left

    def _like(self, cell_id: str) -> Like:
        return self.expected.like(self.jobs[cell_id])

    def _so_far(self, workers: int, now: float) -> dict[str, float]:
        """Return how long each cell is at work; several that a worker trains in one program share its time."""
        share = min(1.0, max(1, workers) / max(1, len(self.running)))
        return {cell_id: max(0.0, now - since) * share for cell_id, since in self.running.items()}

    def _next_of_all(self) -> set[str]:
        """Return the cells without a record that stand in rows."""
        return {cell_id for row in self._next.values() for cell_id in row.values() if cell_id in self.jobs}

    def _row(self, cell_id: str, left: Mapping[str, float]) -> float:
        """Return what a cell and the longest row of those that wait for it take."""
        after = (self._row(each, left) for each in self._next.get(cell_id, {}).values() if each in left)
        return left[cell_id] + max(after, default=0.0)
