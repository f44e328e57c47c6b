"""What cells are expected to take, from what like cells took."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sparsebench.planning.job import Job
from sparsebench.records.record import Head, Record
from sparsebench.records.table import setting_of

TESTED = "tested_weights"
"""The note of a record whose cell trained nothing, as it tested a network that was trained for several."""


class Like(NamedTuple):
    """What cells that take as long have in common.

    Attributes:
        kind: the task and the model with all their parameters, and what is trained.
        n_train: training samples; 0 of a cell that tests a trained network, which takes as long after any training.
        prior: seconds, where nothing is known of the kind; None if there is no prior.
    """

    kind: str
    n_train: int
    prior: float | None = None


class Expected:
    """The history of a folder, to which records are added as they come.

    Cells of the same task and model, with all their parameters, are alike, whatever the strategy; among them those with
    as many training samples are asked first, and else those with the nearest number, in proportion to it. Tests of
    trained networks are a kind of their own.

    Args:
        records: what was run so far.
        prior: the seconds of a cell of whose kind nothing is known, if anything says so.
    """

    def __init__(self, records: Iterable[Head] = (), prior: Callable[[Job], float] | None = None):
        self._prior = prior
        self._seconds: defaultdict[str, dict[int, list[float]]] = defaultdict(dict)
        self._memory: defaultdict[str, int] = defaultdict(int)
        self._likes: dict[str, Like] = {}
        for record in records:
            self.add(record)

    def add(self, record: Head | Record) -> None:
        """Take note of a record."""
        if record.status == "ok" and record.seconds > 0:
            if isinstance(record, Record):
                setting, size = setting_of(record.cell), record.cell.n_train
            else:
                setting, size = record.setting, record.n_train
            kind, n_train = _like(setting, size, TESTED in record.notes)
            self._memory[kind] = max(self._memory[kind], record.memory)
            insort(self._seconds[kind].setdefault(n_train, []), record.seconds)

    def like(self, job: Job) -> Like:
        """Return what the job has in common with those that take as long."""
        if job.cell.id not in self._likes:
            prior = None if self._prior is None else self._prior(job)
            self._likes[job.cell.id] = Like(*_like(setting_of(job.cell), job.cell.n_train, bool(job.network)), prior)
        return self._likes[job.cell.id]

    def seconds_of(self, like: Like) -> float | None:
        """Return the seconds that such a cell is expected to take on one worker, or None if nothing is known."""
        known = self._seconds.get(like.kind)
        if known is None:
            return like.prior
        nearest = min(known, key=lambda n: abs(math.log(max(1, n) / max(1, like.n_train))))
        return _median(known[nearest]) * max(1, like.n_train) / max(1, nearest)

    def seconds(self, job: Job) -> float | None:
        """Return the seconds that a cell is expected to take on one worker, or None if nothing is known."""
        return self.seconds_of(self.like(job))

    def memory(self, job: Job) -> int | None:
        """Return the bytes that a cell's worker is expected to need, or None if nothing is known."""
        return self._memory.get(self.like(job).kind) or None

    def longest_first(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that others start from, then those of which nothing is known, then the longest.

        Of those of which nothing is known one of each kind and number of training samples comes first, so that all are
        soon known. Jobs that are expected to take as long stay in their order.
        """
        met: Counter[Like] = Counter()
        places: dict[str, tuple[tuple[bool, int], float, bool]] = {}
        for job in jobs:
            like, seconds = self.like(job), self.seconds(job)
            again = seconds is None and met[like] > 0
            places[job.cell.id] = job.order, float("-inf") if seconds is None else -seconds, again
            met[like] += 1
        return sorted(jobs, key=lambda job: places[job.cell.id])


def _like(setting: str, n_train: int, tests_network: bool) -> tuple[str, int]:
    """Return the kind of a cell and how many training samples it takes time for."""
    return f"{setting} {tests_network}", 0 if tests_network else n_train


def _median(ordered: Sequence[float]) -> float:
    """Return the median of numbers that rise."""
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
