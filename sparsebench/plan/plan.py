"""What a run is about to do: cells minus what the store has, in order, their files, and how long they take."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.errors import UserError, few, plain
from sparsebench.plan.expand import expand
from sparsebench.plan.locate import Networks, places_of
from sparsebench.plan.request import Files, Job, Request, Rerun, Suite, load
from sparsebench.plugin.content import CODE
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import ANSWERS, Head, Record
from sparsebench.tasks.sources.files import known_contents

log = logging.getLogger(__name__)

LONGER = 0.25
"""A cell under way that says nothing still takes this share of the time since it was begun, however long that was."""


class Expected:
    """What cells are expected to take, and which of them are left.

    A cell takes `Job.cost`, at the speed of the cells of its kind (`Job.alike`) that are done, or where none of them is
    done, of all that are. What is left takes as long as all of it on all workers, or as the longest cell, whichever is
    more.

    Args:
        jobs: of the cells, whose costs are known.
        records: what was run so far; those of other cells do not count.
        prior: says how many seconds a cell takes, where none of its kind is done.
        left: those of the jobs that are to be run; None for all.

    Attributes:
        left: those without a record, by the ids of their cells.
        running: since when cells are under way, in seconds since 1970, and which share of each is done.
        lock: for who reads several of these while other threads take notes.
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
        if prior is not None:
            for job in jobs:
                self._hint[job.alike] += prior(job), job.cost
        for record in records:
            self._learn(record)

    def _learn(self, record: Head | Record) -> None:
        job = self._jobs.get(record.cell_id)
        if job is not None and record.status == "ok" and record.seconds > 0:
            for kind in (job.alike, None):  # None is for all kinds
                self._spent[kind] += record.seconds, job.cost
            self._memory[job.alike] = max(self._memory.get(job.alike, 0), record.memory)

    def begin(self, cell_ids: Sequence[str], share: float, now: float | None = None) -> None:
        """Take note of cells that are begun, or of the share of one that is done, at a time in seconds since 1970.

        What a cell under way says counts until one of its kind is done.
        """
        now = time.time() if now is None else now
        with self.lock:
            for job in (self.left[cell_id] for cell_id in cell_ids if cell_id in self.left):
                since, before = self.running.get(job.cell.id, (now, 0.0))
                since = since if share >= before else now  # it begins again where a worker died
                self.running[job.cell.id] = since, share
                if share > 0 and now > since:
                    self._hint[job.alike] = self._hint[None] = np.array([(now - since) / share, job.cost])

    def done(self, record: Record) -> None:
        """Take note of a record."""
        with self.lock:
            self.drop(record.cell_id)
            self._learn(record)

    def drop(self, cell_id: str) -> None:
        """Take note that a cell is no more to do."""
        with self.lock:
            self.left.pop(cell_id, None)
            self.running.pop(cell_id, None)

    def seconds(self, job: Job) -> float | None:
        """Return the seconds that a cell takes on one worker; None before any cell is done."""
        tables = (self._spent, self._hint)
        spent = next((table[kind] for kind in (job.alike, None) for table in tables if kind in table), None)
        return None if spent is None else float(job.cost * spent[0] / spent[1])

    def length(self, job: Job) -> float:
        """Return what is longer for longer cells: their seconds, or before any cell is done what they cost."""
        return self.seconds(job) or job.cost

    def memory(self, job: Job) -> int | None:
        """Return the bytes that a cell's worker needs; None if no cell of its kind is done."""
        return self._memory.get(job.alike) or None

    def longest_first(self) -> list[Job]:
        """Return what is left: jobs that others start from, one of each kind of which none is done, then the longest.

        Of jobs that take as long those of one plugin come together, as other code needs another worker; else they stay
        in their order, in which those with the same data are neighbours.
        """
        jobs = list(self.left.values())
        first = {job.alike: job.cell.id for job in reversed(jobs) if job.alike not in self._spent}
        alone = set(first.values())
        return sorted(jobs, key=lambda job: (job.order, job.cell.id not in alone, -self.length(job), job.code))

    def time_left(self, workers: int, now: float = 0.0) -> float | None:
        """Return the seconds that what is left takes on so many workers; None before anything says how fast."""
        jobs = {(job.alike, job.cost): job for job in self.left.values()}
        lengths = {like: self.seconds(job) for like, job in jobs.items()}
        left = {cell_id: lengths[job.alike, job.cost] for cell_id, job in self.left.items()}
        left |= {cell_id: self._rest(cell_id, workers, now) for cell_id in self.running}
        times = [seconds for seconds in left.values() if seconds is not None]
        return max([sum(times) / max(1, workers), *times]) if len(times) == len(left) else None

    def _rest(self, cell_id: str, workers: int, now: float) -> float | None:
        """Return the seconds left of a cell under way: what it says of itself counts more than what others took."""
        since, share = self.running[cell_id]
        gone, expected = now - since, self.seconds(self.left[cell_id])
        together = min(1.0, max(1, workers) / len(self.running))  # cells that a worker trains in one program
        if share:
            return together * gone * (1 - share) / share
        return None if expected is None else max(expected - together * gone, together * LONGER * gone)


def shard(text: str) -> Callable[[str], bool]:
    """Return which cells, by their ids alone, are in a share such as 0/4: disjoint shares, which together are all.

    Raises:
        UserError: it is no such text, or there is no such share.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip(), re.ASCII)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError("--shard", got=f"'{text}'", allowed="I/N with I from 0 to N - 1, as 0/4, 1/4, 2/4 and 3/4")
    index, number = int(match[1]), int(match[2])
    return lambda cell_id: int.from_bytes(hashlib.sha256(cell_id.encode()).digest()) % number == index


@dataclass(frozen=True)
class Plan:
    """What a run is about to do.

    Attributes:
        jobs: every cell of the request, or of its shard; `todo` those that have no answer yet, the longest first.
        whole: every cell of the request and those that they begin with, except networks found in another folder and
            what those began with.
        heads: what the store has of every cell.
        suite: of the request; None as `request`.
        expected: what the cells are expected to take, and which are left.
        request: None where the jobs are only some of what it asks for.
        changes: why cells that have records are run again, in lines; see `_changes`.
    """

    jobs: list[Job]
    todo: list[Job]
    locations: Mapping[str, Path]
    whole: list[Job]
    heads: Mapping[str, Head]
    expected: Expected
    request: Request | None
    suite: Suite | None = None
    changes: tuple[str, ...] = ()


def plan(
    request: Request,
    files: Files,
    registry: Registry,
    out: Path,
    rerun: Rerun,
    in_shard: Callable[[str], bool] = lambda cell_id: True,
    prior: Callable[[Job], float] | None = None,
) -> Plan:
    """Return the plan of a request, or of a `shard` of it. Nothing is written and no network is built.

    `prior` says how many seconds a cell takes of whose kind the folder has no record.

    A cell that others of a shard start from, directly or by way of another, is run by that shard too if the folder has
    no weights of it.
    """
    heads = store.heads(out)
    networks = Networks(out, heads, files.networks)
    suite = load(request.suite)
    whole = expand(request, registry, files, suite)
    networks.check({job.cell.init.id for job in whole if job.cell.track != "scratch" and job.cell.init})
    targets = {job.cell.id for job in whole if job.requested}
    before = prerequisites(targets, whole, lambda first: networks.elsewhere(first) is None)
    whole = [job for job in whole if job.cell.id in targets | before]
    jobs = [job for job in whole if in_shard(job.cell.id)]

    def has_answer(job: Job) -> bool:
        head = heads.get(job.cell.id)
        if head is None or rerun == "always" or not job.is_answered_by(head):
            return False
        if request.single and job.requested and head.status == "ok":  # what is looked at has weights
            return networks.has(job.weights)
        return rerun == "missing" or head.status in ANSWERS

    again = {job.cell.id for job in jobs if not has_answer(job)}
    needed = prerequisites(again, whole, lambda first: not networks.has(first))
    ids = {job.cell.id for job in jobs} | needed
    todo = [job for job in whole if job.cell.id in again | needed]
    expected = Expected(whole, heads.values(), prior, todo)
    jobs = [job for job in whole if job.cell.id in ids]
    places = places_of(files, todo) | networks.places({job.after for job in todo} - {""})
    for name in files.pictures.values():
        if (contents := known_contents(name)) is not None and contents.strays:
            log.warning("%s: left out: %s", plain(files.places[name], None), contents.strays)
    return Plan(
        jobs, expected.longest_first(), places, whole, heads, expected, request, suite, _changes(todo, heads)
    )  # fmt: skip


def prerequisites(cells: Iterable[str], jobs: Sequence[Job], lacks: Callable[[str], bool]) -> set[str]:
    """Return the cells that must be run before others can: those they start from, as far as they lack weights.

    Args:
        cells: the ids of the others.
        jobs: of all these cells.
        lacks: says whether there are no weights of a cell; it is asked once of each.
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
    """Return, in lines, which strategies have another revision than their records, and of how many cells."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for job in todo:
        head, now = heads.get(job.cell.id), job.origin.identity
        if head is not None and head.status != "skipped" and (before := head.origin.identity) != now:
            file = now.startswith(CODE) and before.startswith(CODE)
            why = "its file changed" if file else f"its revision is {plain(now)}, and was {plain(before)}"
            reasons[why][job.cell.strategy.name] += 1
    return tuple(
        f"run again: {names.total()} cells of strategy {few(sorted(names), width=60)}: {why}"
        for why, names in sorted(reasons.items())
    )
