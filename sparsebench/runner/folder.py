"""What a run writes in its folder beside records: what is to know of them, and which checkpoints it clears away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sparsebench.errors import UserError, few
from sparsebench.plan.expand import unanswered
from sparsebench.plan.job import Job
from sparsebench.plan.locate import file_names
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Request
from sparsebench.plan.suite import Suite
from sparsebench.plugin.content import texts_of
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.manifests import OWN, Asked, Described, Given, setting_of
from sparsebench.strategy.base import how_of
from sparsebench.tasks.sources.files import known_contents

CUT_SHORT = ("crashed", "timeout", "oom")
"""Statuses of cells that were ended before their time: what runs them again goes on from their checkpoints."""
BAD = 5
"""Pictures that cannot be read of which the names are kept."""


def remove_checkpoint(out: Path, cell_id: str) -> None:
    """Remove the checkpoint of a cell, and what a process that was killed left of one."""
    path = store.checkpoint_path(out, cell_id)
    for leftover in (path, *path.parent.glob(f".{path.name}.*.part")):
        with suppress(OSError):
            leftover.unlink()


def clear_checkpoints(plan: Plan, out: Path) -> None:
    """Remove checkpoints that nobody is to go on from: beside a finished record, and of all that is to start anew."""
    left = [job.cell.id for job in plan.jobs if store.checkpoint_path(out, job.cell.id).exists()]
    todo, known = {job.cell.id for job in plan.todo}, plan.known
    for cell_id in left:
        finished = cell_id in known and known[cell_id].status not in CUT_SHORT
        if plan.anew if cell_id in todo else finished:
            remove_checkpoint(out, cell_id)


def keep(plan: Plan, out: Path, registry: Registry) -> None:
    """Write what is to know of the records of a plan's cells."""
    if plan.request is not None and plan.suite is not None:
        _keep_suite(out, plan.suite, plan.request, registry, plan.whole)
    _keep_files(out, plan)
    _keep_strategies(out, registry, plan.jobs)
    _keep_metrics(out, registry, plan.jobs)


def _keep_strategies(out: Path, registry: Registry, jobs: Iterable[Job]) -> None:
    """Write what the strategies of jobs are, unless it is there; of those that could not be loaded nothing."""
    revisions = {(job.cell.strategy.name, job.origin.revision) for job in jobs if job.failure is None}
    for name, revision in sorted(revisions):
        with suppress(UserError):  # in a file that the workers load
            found = registry.strategy(name)
            cls, (file, source) = found.cls, texts_of(found.file, revision) if found.file else ("", {})
            store.keep(out / manifests.STRATEGIES, Described(
                name=name, revision=revision, kind=cls.kind, site=cls.site, trained=cls.trained, adaptive=cls.adaptive,
                citation=cls.citation, bibtex=cls.bibtex, how=how_of(cls), file=file, source=source,
            ).model_dump(mode="json"))  # fmt: skip


def _keep_metrics(out: Path, registry: Registry, jobs: Iterable[Job]) -> None:
    """Write what the metrics are that the tasks of jobs declare, unless it is there."""
    for name in sorted({job.cell.task.name for job in jobs}):
        with suppress(UserError):  # in a file that the workers load
            for kind in registry.task(name).metrics:
                store.keep(out / manifests.METRICS, asdict(kind))


def _keep_files(out: Path, plan: Plan) -> None:
    """Write what files of trained weights are called, and what is left out of folders of pictures."""
    given = [Given(name=name, file=file) for name, file in file_names(plan.locations).items()]
    given += [Given(name=name, left_out=line) for name, line in (*plan.strays.items(), *_unread(plan.locations))]
    for one in given:
        store.keep(out / manifests.FILES, one.model_dump(mode="json"))


def _unread(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the names of pictures that were located, and in a line which of them are left out as they are none."""
    for name in names:
        if (found := known_contents(name)) is not None and found.left_out:
            n, shown = len(found.left_out), few(sorted(found.left_out), BAD, 200)
            yield name, f"{n:,} of {len(found.pictures) + n:,} pictures, which cannot be read: {shown}"


def _keep_suite(out: Path, suite: Suite, request: Request, registry: Registry, jobs: Iterable[Job]) -> None:
    """Write which suite was asked for, unless it is there: none where not all of it was.

    A repetition in which some strategies are not tested again, as they draw nothing, is asked of none.
    """
    cells = [job.cell for job in jobs if job.asked]
    of_strategy: dict[str, set[str]] = defaultdict(set)
    again = set()
    for cell in cells:
        of_strategy[cell.strategy.name].add(setting := setting_of(cell))
        again |= {setting} if cell.network and cell.repetition else set()
    every = set[str]().union(*of_strategy.values())
    settings = tuple(sorted(every - again | again.intersection(*of_strategy.values())))
    asked = Asked(
        name=suite.name, version=suite.version, settings=settings, main_task=suite.main_task or suite.task[0].name,
        sample_complexity=suite.sample_complexity,
    )  # fmt: skip
    otherwise = request.keep or request.macs or request.single or request.where != "both"
    if otherwise or unanswered(suite, cells, registry, any_budget=True):
        asked = asked.model_copy(update={"name": OWN, "version": 1})
    store.keep(out / manifests.SUITES, asked.model_dump(mode="json"))
