"""The plan of a run: the missing cells in order, the places of their files, and the time that they take."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from sparsebench.errors import UserError, few, plain
from sparsebench.plan.expand import jobs_of, variants_of
from sparsebench.plan.forecast import Forecast
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import Located, Networks, locate, locate_model, official_places
from sparsebench.plan.request import Files, Request, Rerun
from sparsebench.plan.requested import requested_tasks
from sparsebench.plan.suite import Suite, load
from sparsebench.plugin.content import CODE
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import ANSWERS, Origin, RecordSummary
from sparsebench.records.store import Store
from sparsebench.tasks.sources.files import known_contents

log = logging.getLogger(__name__)


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
        locations: the places of the user's files, official sets and trained weights, by their names in cells.
        whole: all jobs of all shards, without networks found elsewhere.
        summaries: the stored summaries, by cell id.
        forecast: the jobs of `todo`, and the time that they take.
        request: None if the jobs are only a part of the request.
        suite: the suite of the request; None if there is no request.
        device: the device of the cells: "cpu", "cuda" or "cuda:i".
        changes: why cells with records are run again, one line each.
        others: the jobs of other shards that are not answered by a record.
        located: the user's files.
    """

    jobs: list[Job]
    todo: list[Job]
    locations: Mapping[str, Path]
    whole: list[Job]
    summaries: Mapping[str, RecordSummary]
    forecast: Forecast
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
    `prior` see `Forecast`.
    """
    store = Store.open(folder)
    summaries = store.summaries()

    suite = load(request.suite)
    has_weights = bool(files.weights) or request.names_folder
    tasks = requested_tasks(suite, request, registry, has_weights=has_weights)
    located = locate(files, [task.cls for task in tasks])
    request, located = locate_model(request, located)
    variants = variants_of(tasks, suite, request, located, registry)

    networks = Networks(store.path, summaries, files.networks)
    whole = _without_other_networks(jobs_of(variants, registry), networks)
    unanswered = {job.cell.id for job in whole if not _has_answer(job, summaries, networks, request, rerun)}
    jobs, todo, others = _divide(whole, in_shard, unanswered, networks)

    locations = {name: place for variant in variants for name, place in variant.places.items()}
    locations |= official_places(files, todo, locations)
    locations |= networks.places({job.after for job in todo} - {""})
    _warn_of_strays(located)
    forecast = Forecast(whole, summaries.values(), prior, todo)
    return Plan(
        jobs=jobs,
        todo=forecast.longest_first(),
        located=located,
        locations=locations,
        whole=whole,
        summaries=summaries,
        forecast=forecast,
        request=request,
        suite=suite,
        changes=_changes(todo, summaries),
        others=others,
    )


def _without_other_networks(jobs: Sequence[Job], networks: Networks) -> list[Job]:
    """Return the jobs without trainings of networks that exist elsewhere, and without what only these start from.

    Elsewhere is outside the run's folder: in the folder of --networks, or in the package.

    Raises:
        UserError: the folder of --networks has none of the trainings.
    """
    # On the other tracks than scratch, cells start from networks that a suite trains.
    trainings = {job.cell.init.id for job in jobs if job.cell.track != "scratch" and job.cell.init}
    networks.check(trainings)
    requested = {job.cell.id for job in jobs if job.requested}
    starts = prerequisites(requested, jobs, lambda cell_id: networks.elsewhere(cell_id) is None)
    run_here = requested | starts
    return [job for job in jobs if job.cell.id in run_here]


def _divide(
    whole: Sequence[Job], in_shard: Callable[[str], bool], unanswered: Set[str], networks: Networks
) -> tuple[list[Job], list[Job], tuple[Job, ...]]:
    """Return the jobs of a shard, those of them to run, and the jobs of other shards that are not answered.

    Cells of any shard belong to it if its missing cells start from them and their weights are missing.
    """
    inside = {job.cell.id for job in whole if in_shard(job.cell.id)}
    missing = inside & unanswered
    needed = prerequisites(missing, whole, lambda cell_id: not networks.has(cell_id))
    of_shard = inside | needed
    to_run = missing | needed
    elsewhere = unanswered - of_shard
    return (
        [job for job in whole if job.cell.id in of_shard],
        [job for job in whole if job.cell.id in to_run],
        tuple(job for job in whole if job.cell.id in elsewhere),
    )


def _has_answer(
    job: Job, summaries: Mapping[str, RecordSummary], networks: Networks, request: Request, rerun: Rerun
) -> bool:
    """Return whether a stored record answers a job, so that it is not run again."""
    summary = summaries.get(job.cell.id)
    if summary is None or rerun == "always" or not job.is_answered_by(summary):
        return False
    if request.single and job.requested and summary.status == "ok":
        # Pictures are drawn from the trained network, so its weights are needed beside the record.
        return networks.has(job.weights)
    # "missing" accepts failures too; "failed" computes them again.
    return rerun == "missing" or summary.status in ANSWERS


def _warn_of_strays(located: Located) -> None:
    """Log which files of the user's folders of pictures are left out."""
    for name, place in located.places.items():
        contents = known_contents(name)
        if contents is not None and contents.strays:
            log.warning("%s: left out: %s", plain(place, None), contents.strays)


def prerequisites(cells: Iterable[str], jobs: Sequence[Job], lacks: Callable[[str], bool]) -> set[str]:
    """Return the ids of the cells that must run before given cells: those they start from whose weights are missing.

    Args:
        cells: the ids of the given cells.
        jobs: the jobs of all cells.
        lacks: tells whether the weights of a cell are missing; called once for each cell.
    """
    after = {job.cell.id: job.after for job in jobs}
    queue = list(cells)
    seen = {""}
    needed: set[str] = set()
    while queue:
        start = after.get(queue.pop(), "")
        if start in seen:
            continue
        seen.add(start)
        if lacks(start):
            needed.add(start)
            queue.append(start)
    return needed


def _changes(todo: Iterable[Job], summaries: Mapping[str, RecordSummary]) -> tuple[str, ...]:
    """Return a line for each changed revision, with the strategies and the number of cells to run again."""
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for job in todo:
        summary = summaries.get(job.cell.id)
        if summary is not None and summary.status != "skipped" and not job.is_answered_by(summary):
            reasons[_change(summary.origin, job.origin)][job.cell.strategy.name] += 1
    return tuple(
        f"run again: {names.total()} cells of strategy {few(sorted(names), width=60)}: {why}"
        for why, names in sorted(reasons.items())
    )


def _change(before: Origin, now: Origin) -> str:
    """Return what changed between two revisions of a strategy."""
    if not (now.identity.startswith(CODE) and before.identity.startswith(CODE)):
        return f"its revision is {plain(now.identity)}, and was {plain(before.identity)}"
    file, old_file = (plain(origin.plugin.removeprefix("file:")) for origin in (now, before))
    return "its file changed" if file == old_file else f"its file is {file}, and was {old_file}"
