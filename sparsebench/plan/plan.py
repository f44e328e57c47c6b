"""The plan of a run: the missing cells in order, the places of their files, and the time that they take."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.errors import UserError, few, plain
from sparsebench.plan.expand import jobs_of, requested_tasks, variants_of
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import Located, Networks, locate, official_places
from sparsebench.plan.request import Files, Request, Rerun, Suite, load
from sparsebench.plugin.content import CODE
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import ANSWERS, Head, Record
from sparsebench.records.store import Store
from sparsebench.tasks.sources.files import known_contents

log = logging.getLogger(__name__)

LONGER = 0.25
"""A running cell without progress is assumed to take at least this share of its elapsed time longer."""


class Expected:
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
        records: Iterable[Head] = (),
        prior: Callable[[Job], float] | None = None,
        left: Collection[Job] | None = None,
    ):
        self._jobs = {job.cell.id: job for job in jobs}
        self._spent, self._hint = (defaultdict[object, Any](lambda: np.zeros(2)) for _ in range(2))  # seconds and costs
        self._memory: dict[object, int] = {}
        self.left = {job.cell.id: job for job in (jobs if left is None else left)}
        self.running: dict[str, tuple[float, float]] = {}
        self.lock = threading.RLock()
        self._prior = {} if prior is None else {job.cell.id: prior(job) for job in jobs}
        for record in records:
            self._learn(record)

    def _learn(self, record: Head | Record) -> None:
        job = self._jobs.get(record.cell_id)
        if job is not None and record.status == "ok" and record.seconds > 0:
            for kind in (job.alike, None):  # None is for all kinds
                self._spent[kind] += record.seconds, job.cost
            self._memory[job.alike] = max(self._memory.get(job.alike, 0), record.memory)

    def begin(self, cell_ids: Sequence[str], share: float, now: float | None = None) -> None:
        """Note that cells begin, or the share of a cell that is done, at time `now` in seconds since 1970.

        The share gives the speed of the cell's kind until a cell of this kind is done.
        """
        now = time.time() if now is None else now
        with self.lock:
            for job in (self.left[cell_id] for cell_id in cell_ids if cell_id in self.left):
                since, before = self.running.get(job.cell.id, (now, 0.0))
                since = since if share >= before else now  # a lower share means that the cell was started again
                self.running[job.cell.id] = since, share
                if share > 0 and now > since:
                    self._hint[job.alike] = self._hint[None] = np.array([(now - since) / share, job.cost])

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
        kinds = (job.alike,) if job.cell.id in self._prior else (job.alike, None)
        tables = (self._spent, self._hint)
        spent = next((table[kind] for kind in kinds for table in tables if kind in table), None)
        return self._prior.get(job.cell.id) if spent is None else float(job.cost * spent[0] / spent[1])

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
        untried = {job.alike: job.cell.id for job in reversed(jobs) if job.alike not in self._spent}
        first = set(untried.values())
        return sorted(
            jobs, key=lambda job: (job.order, job.cell.id not in first, -(self.seconds(job) or job.cost), job.code)
        )

    def time_left(self, workers: int, now: float = 0.0) -> float | None:
        """Return the expected seconds until all cells are done, or None before a speed is known for each."""
        jobs = {(job.alike, job.cost): job for job in self.left.values()}
        lengths = {like: self.seconds(job) for like, job in jobs.items()}
        left = {cell_id: lengths[job.alike, job.cost] for cell_id, job in self.left.items()}
        left |= {cell_id: self._rest(cell_id, workers, now) for cell_id in self.running}
        times = [seconds for seconds in left.values() if seconds is not None]
        return max([sum(times) / max(1, workers), *times]) if len(times) == len(left) else None

    def _rest(self, cell_id: str, workers: int, now: float) -> float | None:
        """Return the expected seconds left of a running cell: by its own progress, or else by the speed of others."""
        since, share = self.running[cell_id]
        elapsed, expected = now - since, self.seconds(self.left[cell_id])
        part = min(1.0, max(1, workers) / len(self.running))  # below 1 if a worker trains several cells in one program
        if share:
            return part * elapsed * (1 - share) / share
        return None if expected is None else max(expected - part * elapsed, part * LONGER * elapsed)


def shard(text: str) -> Callable[[str], bool]:
    """Return a function that tells whether a cell id is in a shard such as 0/4. Each id is in one of the shards.

    Raises:
        UserError: the text is not I/N with I < N.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip(), re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError("--shard", got=f"'{text}'", allowed="I/N with I from 0 to N - 1, as 0/4, 1/4, 2/4 and 3/4")
    index, number = int(match[1]), int(match[2])
    return lambda cell_id: int.from_bytes(hashlib.sha256(cell_id.encode()).digest()) % number == index


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        jobs: all jobs of the request or its shard, and the jobs that they need.
        todo: the jobs that are not answered by a record, in the order in which they begin.
        located: the user's files.
        locations: the places of these files, official sets and trained weights, by their names in cells.
        whole: all jobs of the request and the jobs that they start from. Networks found outside the run's folder, and
            the jobs that those start from, are left out.
        heads: the stored heads, by cell id.
        request: None if the jobs are only a part of the request.
        device: the device of the cells: "cpu", "cuda" or "cuda:i".
        changes: why cells with records are run again, one line each.
        others: the jobs of other shards that are not answered by a record.
    """

    jobs: list[Job]
    todo: list[Job]
    locations: Mapping[str, Path]
    whole: list[Job]
    heads: Mapping[str, Head]
    expected: Expected
    request: Request | None
    suite: Suite | None = None
    device: str = "cpu"
    changes: tuple[str, ...] = ()
    others: tuple[Job, ...] = ()
    located: Located = field(default_factory=Located)


def plan(
    request: Request,
    files: Files,
    registry: Registry,
    folder: Path | Store,
    rerun: Rerun,
    in_shard: Callable[[str], bool] = lambda cell_id: True,
    prior: Callable[[Job], float] | None = None,
) -> Plan:
    """Return the plan of a request, or of a `shard` of it. Nothing is written and no network is built.

    A shard also runs cells that its cells start from, directly or indirectly, if their weights are missing. For
    `prior` see `Expected`.
    """
    store = Store.open(folder)
    heads = store.heads()
    networks = Networks(store.path, heads, files.networks)
    suite = load(request.suite)
    tasks = requested_tasks(suite, request, registry, has_weights=bool(files.weights))
    located = locate(files, [task.cls for task in tasks])
    variants = variants_of(tasks, suite, request, located, registry)
    expanded = jobs_of(variants, registry)
    networks.check({job.cell.init.id for job in expanded if job.cell.track != "scratch" and job.cell.init})

    # Networks that exist elsewhere are not trained here, and neither is what they start from.
    requested = {job.cell.id for job in expanded if job.requested}
    starts = prerequisites(requested, expanded, lambda cell_id: networks.elsewhere(cell_id) is None)
    whole = [job for job in expanded if job.cell.id in requested | starts]

    def has_answer(job: Job) -> bool:
        head = heads.get(job.cell.id)
        if head is None or rerun == "always" or not job.is_answered_by(head):
            return False
        if request.single and job.requested and head.status == "ok":  # weights are needed too
            return networks.has(job.weights)
        return rerun == "missing" or head.status in ANSWERS

    # Cells of the shard, and cells of any shard that these start from and whose weights are missing.
    in_this_shard = {job.cell.id for job in whole if in_shard(job.cell.id)}
    missing = {job.cell.id for job in whole if job.cell.id in in_this_shard and not has_answer(job)}
    needed = prerequisites(missing, whole, lambda cell_id: not networks.has(cell_id))
    jobs = [job for job in whole if job.cell.id in in_this_shard | needed]
    todo = [job for job in whole if job.cell.id in missing | needed]
    in_other_shards = [job for job in whole if job.cell.id not in in_this_shard | needed]

    places = {name: place for variant in variants for name, place in variant.places.items()}
    places |= official_places(files, todo, places)
    places |= networks.places({job.after for job in todo} - {""})
    for name, place in located.places.items():
        contents = known_contents(name)
        if contents is not None and contents.strays:
            log.warning("%s: left out: %s", plain(place, None), contents.strays)
    expected = Expected(whole, heads.values(), prior, todo)
    return Plan(
        jobs=jobs,
        todo=expected.longest_first(),
        located=located,
        locations=places,
        whole=whole,
        heads=heads,
        expected=expected,
        request=request,
        suite=suite,
        changes=_changes(todo, heads),
        others=tuple(job for job in in_other_shards if not has_answer(job)),
    )


def prerequisites(cells: Iterable[str], jobs: Sequence[Job], lacks: Callable[[str], bool]) -> set[str]:
    """Return the ids of the cells that must run before given cells: those they start from whose weights are missing.

    Args:
        cells: the ids of the given cells.
        jobs: the jobs of all cells.
        lacks: tells whether the weights of a cell are missing; called once for each cell.
    """
    after, seen, needed = {job.cell.id: job.after for job in jobs}, {""}, set()
    queue = list(cells)
    while queue:
        if (first := after.get(queue.pop(), "")) not in seen:
            seen.add(first)
            if lacks(first):
                needed.add(first)
                queue.append(first)
    return needed


def _changes(todo: Iterable[Job], heads: Mapping[str, Head]) -> tuple[str, ...]:
    """Return a line for each changed revision, with the strategies and the number of cells to run again."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for job in todo:
        head, now = heads.get(job.cell.id), job.origin.identity
        if head is not None and head.status != "skipped" and (before := head.origin.identity) != now:
            why = f"its revision is {plain(now)}, and was {plain(before)}"
            if now.startswith(CODE) and before.startswith(CODE):
                files = [plain(origin.plugin.removeprefix("file:")) for origin in (job.origin, head.origin)]
                why = "its file changed" if files[0] == files[1] else f"its file is {files[0]}, and was {files[1]}"
            reasons[why][job.cell.strategy.name] += 1
    return tuple(
        f"run again: {names.total()} cells of strategy {few(sorted(names), width=60)}: {why}"
        for why, names in sorted(reasons.items())
    )
