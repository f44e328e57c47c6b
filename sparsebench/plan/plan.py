"""What a run is about to do: cells minus what the store has, in order, and the files that they need."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsebench.errors import UserError, few, plain
from sparsebench.plan.expand import expand
from sparsebench.plan.job import Job
from sparsebench.plan.locate import Networks, places_of, strays_of
from sparsebench.plan.request import Files, Request, Rerun
from sparsebench.plan.suite import Suite, load
from sparsebench.plan.time_left import Expected
from sparsebench.plugin.content import CODE
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.cell import canonical
from sparsebench.records.record import ANSWERS, Head


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
        known: what the store has of every cell.
        suite: of the request; None as `request`.
        expected: what the cells are expected to take.
        request: None where the jobs are only some of what it asks for.
        anew: whether trainings that were cut short start again from their beginning.
        strays: what lies in folders of pictures and is left out, in one line by their names.
        changed: why cells that have records are run again, in lines; see `changed`.
    """

    jobs: list[Job]
    todo: list[Job]
    locations: Mapping[str, Path]
    whole: list[Job]
    known: Mapping[str, Head]
    expected: Expected
    request: Request | None
    suite: Suite | None = None
    anew: bool = False
    strays: Mapping[str, str] = field(default_factory=dict)
    changed: tuple[str, ...] = ()


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
    known = store.heads(out)
    networks = Networks(out, known, files.networks)
    suite = load(request.suite)
    whole = expand(request, registry, files, suite)
    networks.check({job.cell.init.id for job in whole if job.cell.track != "scratch" and job.cell.init})
    asked = {job.cell.id for job in whole if job.asked}
    before = needed_by(asked, whole, lambda first: networks.elsewhere(first) is None)
    whole = [job for job in whole if job.cell.id in asked | before]
    jobs = [job for job in whole if in_shard(job.cell.id)]
    again = {job.cell.id for job in jobs if rerun == "always" or _is_missing(job, known, rerun)}
    needed = needed_by(again, whole, lambda first: not networks.has(first))
    ids = {job.cell.id for job in jobs} | needed
    todo = [job for job in whole if job.cell.id in again | needed]
    expected = Expected(whole, known.values(), prior)
    jobs = [job for job in whole if job.cell.id in ids]
    places = places_of(files, todo) | networks.places({job.after for job in todo} - {""})
    ordered = expected.longest_first(todo)
    why = changed(todo, known)
    return Plan(
        jobs, ordered, places, whole, known, expected, request, suite, rerun == "always", strays_of(files), why
    )  # fmt: skip


def needed_by(cells: Iterable[str], jobs: Sequence[Job], lacks: Callable[[str], bool]) -> set[str]:
    """Return the cells that must be run before others can: those they start from, as far as they lack weights.

    Args:
        cells: the ids of the others.
        jobs: of all these cells.
        lacks: says whether there are no weights of a cell; it is asked once of each.
    """
    after, seen, needed = {job.cell.id: job.after for job in jobs}, {""}, set()
    left = list(cells)
    while left:
        if (first := after.get(left.pop(), "")) not in seen:
            seen.add(first)
            if lacks(first):
                needed.add(first)
                left.append(first)
    return needed


def _is_missing(job: Job, known: Mapping[str, Head], rerun: Rerun) -> bool:
    """Say whether a cell has no answer: no record, one that was skipped, or one of another revision."""
    record = known.get(job.cell.id)
    if record is None or record.status == "skipped" or record.origin.identity != job.origin.identity:
        return True
    return rerun == "failed" and record.status not in ANSWERS


def changed(todo: Iterable[Job], known: Mapping[str, Head]) -> tuple[str, ...]:
    """Return which strategies, tasks and models have another revision than records of theirs, and of how many cells."""
    before: dict[tuple[str, str], set[str]] = defaultdict(set)
    for setting in {head.setting for head in known.values()} if todo else ():
        for kind, raw in zip(("task", "model"), json.loads(setting), strict=False):
            before[kind, _unrevised(raw)].add(raw.get("revision", ""))
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for job in todo:
        if (head := known.get(job.cell.id)) is not None:
            if head.status != "skipped" and head.origin.identity != job.origin.identity:
                why = _why(head.origin.identity, job.origin.identity)
                found["strategy", why][job.cell.strategy.name] += 1
            continue
        for kind, part in (("task", job.cell.task), ("model", job.cell.model)):
            if (earlier := before.get((kind, _unrevised(part.model_dump())))) and part.revision not in earlier:
                found[kind, _why(max(earlier) or "1", part.revision or "1")][part.name] += 1
    return tuple(
        f"run again: {names.total()} cells of {kind} {few(sorted(names), width=60)}: {why}"
        for (kind, why), names in sorted(found.items())
    )


def _unrevised(part: Mapping[str, Any]) -> str:
    return canonical([part["name"], part["params"]])


def _why(before: str, now: str) -> str:
    """Return in what two revisions differ, of which records have the first."""
    if now.startswith(CODE) and before.startswith(CODE):
        return "its file changed"
    return f"its revision is {plain(now)}, and was {plain(before)}"
