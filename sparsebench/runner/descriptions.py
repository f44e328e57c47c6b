"""What a run stores beside its records: descriptions of its suite, files, strategies and metrics; see `manifests`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict

from sparsebench.errors import UserError, few
from sparsebench.plan.coverage import missing_cells
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import file_names
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Request
from sparsebench.plan.suite import Suite
from sparsebench.plugin.content import texts_of
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests
from sparsebench.records.manifests import OWN, FileEntry, StrategyEntry, SuiteEntry, setting_of
from sparsebench.records.record import Cell
from sparsebench.strategy.base import default_reduction
from sparsebench.tasks.sources.files import known_contents

MOST_BAD_NAMES = 5
"""Most names of unreadable pictures that are stored."""


def descriptions(plan: Plan, registry: Registry) -> Iterator[tuple[str, object]]:
    """Yield the descriptions for the records of a plan, each with the name of its folder.

    Strategies and tasks from files that only the workers load are left out.
    """
    if plan.request is not None and plan.suite is not None:
        suite = _suite_entry(plan.suite, plan.request, registry, plan.whole)
        yield manifests.SUITES, suite.model_dump(mode="json")
    for file in _file_entries(plan):
        yield manifests.FILES, file.model_dump(mode="json")
    for name, revision in sorted({(job.cell.strategy.name, job.origin.revision) for job in plan.jobs}):
        with suppress(UserError):
            yield manifests.STRATEGIES, _strategy_entry(name, revision, registry).model_dump(mode="json")
    for name in sorted({job.cell.task.name for job in plan.jobs}):
        with suppress(UserError):
            for kind in registry.task(name).metrics:
                yield manifests.METRICS, asdict(kind)


def _file_entries(plan: Plan) -> Iterator[FileEntry]:
    """Yield the names of the user's files, and for each folder of pictures the files that were left out."""
    for name, file in file_names(plan.located).items():
        yield FileEntry(name=name, file=file)
    for name in plan.locations:
        contents = known_contents(name)
        if contents is None:
            continue
        if contents.strays:
            yield FileEntry(name=name, left_out=contents.strays)
        if contents.left_out:
            bad = len(contents.left_out)
            names = few(sorted(contents.left_out), MOST_BAD_NAMES, 200)
            line = f"{bad:,} of {len(contents.pictures) + bad:,} pictures, which cannot be read: {names}"
            yield FileEntry(name=name, left_out=line)


def _strategy_entry(name: str, revision: str, registry: Registry) -> StrategyEntry:
    """Return the description of a strategy, with the texts of its file if it is not installed.

    Raises:
        UserError: the strategy is unknown here, or its file has changed.
    """
    registered = registry.strategy(name)
    cls = registered.cls
    file, source, data = texts_of(registered.file, revision) if registered.file else ("", {}, {})
    return StrategyEntry(
        name=name,
        revision=revision,
        kind=cls.kind,
        site=cls.site,
        trained=cls.trained,
        adaptive=cls.adaptive,
        citation=cls.citation,
        bibtex=cls.bibtex,
        how=default_reduction(cls),
        variant=cls.differs if cls.variant else "",
        file=file,
        source=source,
        data=data,
    )


def _suite_entry(suite: Suite, request: Request, registry: Registry, jobs: Iterable[Job]) -> SuiteEntry:
    """Return the requested suite and its settings. The name is OWN unless the whole suite was requested."""
    cells = [job.cell for job in jobs if job.requested]
    whole = _is_whole(suite, request, cells, registry)
    return SuiteEntry(
        name=suite.name if whole else OWN,
        version=suite.version if whole else 1,
        settings=_settings_of_all(cells),
        main_task=suite.main_task or suite.task[0].name,
        sample_complexity=suite.sample_complexity,
        target=suite.target,
    )


def _settings_of_all(cells: Iterable[Cell]) -> tuple[str, ...]:
    """Return the settings in which every strategy is measured.

    Strategies without random draws test a network once only. A later repetition is a setting only if all strategies
    have it.
    """
    of_strategy: dict[str, set[str]] = defaultdict(set)
    again: set[str] = set()
    for cell in cells:
        setting = setting_of(cell)
        of_strategy[cell.strategy.name].add(setting)
        if cell.network and cell.repetition:
            again.add(setting)
    union = set[str]().union(*of_strategy.values())
    again_of_all = again.intersection(*of_strategy.values())
    return tuple(sorted((union - again) | again_of_all))


def _is_whole(suite: Suite, request: Request, cells: list[Cell], registry: Registry) -> bool:
    """Return whether a request has all cells that its suite has for each strategy; budgets of plugins may differ."""
    if request.keep or request.macs or request.single or request.where != "both":
        return False
    starts_elsewhere = any(cell.n_train and cell.model.params.get("weights") for cell in cells)
    if not request.changes_suite and not starts_elsewhere:
        return True
    if {entry.name for entry in suite.task} - {cell.task.name for cell in cells}:
        return False  # without expanding the suite
    return not missing_cells(suite, cells, registry, any_budget=True)
