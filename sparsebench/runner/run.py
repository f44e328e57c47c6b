"""A run: an engine computes the missing cells of a request, and their records and manifests are stored."""

from __future__ import annotations

import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from sparsebench.errors import UserError, few, one_line
from sparsebench.plan import plan as planner
from sparsebench.plan.coverage import missing_cells
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import file_names, pictures_of
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files, Request, Setting, Suite
from sparsebench.plugin.content import texts_of
from sparsebench.plugin.observer import Observer, ObserverThread
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.manifests import OWN, FileEntry, StrategyEntry, SuiteEntry, setting_of
from sparsebench.records.record import Record
from sparsebench.runner import devices, progress
from sparsebench.runner.engines import TOGETHER, CellLocks, Engine, Queue, first_interrupt, in_process, in_workers
from sparsebench.runner.process import server
from sparsebench.runner.progress import SILENT, Callbacks
from sparsebench.strategy.base import default_reduction
from sparsebench.strategy.spec import fill, parse
from sparsebench.tasks.sources.cache import decode, telling
from sparsebench.tasks.sources.files import known_contents

log = logging.getLogger(__name__)

CUT_SHORT = ("crashed", "timeout", "oom")
"""Statuses of cells whose computation was ended. When they run again, they continue from their checkpoints."""
BAD = 5
"""Most names of unreadable pictures that are stored."""


def run(
    request: Request,
    files: Files,
    execution: Execution,
    registry: Registry,
    out: Path,
    callbacks: Callbacks = SILENT,
    prior: Callable[[Job], float] | None = None,
) -> Plan:
    """Run the cells of a request that a folder lacks, and return the plan.

    Args:
        request: the requested cells.
        files: the pictures and weights.
        execution: how cells are run.
        registry: the strategies, tasks, models and observers.
        out: the run's folder.
        callbacks: functions that are called during the run.
        prior: returns the expected seconds of a cell, used if the folder has no record of its kind.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable.
        KeyboardInterrupt: the run was stopped. Finished cells are stored.
    """
    begin(execution, out)
    with telling(callbacks.on_pictures):
        plan = plan_of(request, files, execution, registry, out, prior)
        carry_out(plan, execution, registry, out, callbacks)
    return plan


def begin(execution: Execution, out: Path) -> None:
    """Start to load worker processes in the background if the run's folder has no records, so that cells must run."""
    if execution.jobs != 0 and execution.dask is None and not store.segments(out) and not store.sealed_files(out):
        server().begin()


def plan_of(
    request: Request,
    files: Files,
    execution: Execution,
    registry: Registry,
    out: Path,
    prior: Callable[[Job], float] | None = None,
) -> Plan:
    """Return the plan of a run. Nothing is run or written.

    Raises:
        UserError: anything unknown, out of range or missing.
    """
    device = device_of(execution)
    request = replace(request, on_gpu=device != "cpu")
    in_shard = planner.shard(execution.shard or "0/1")
    plan = planner.plan(request, files, registry, out, execution.rerun, in_shard, prior)
    return replace(plan, device=device)


def device_of(execution: Execution) -> str:
    """Return the device of cells, on this machine or on the workers of a cluster.

    Raises:
        UserError: the device or a limit is invalid, or the option is not allowed with a cluster.
    """
    execution.limits()
    if execution.dask is None:
        return devices.resolve_device(execution.device)
    if execution.jobs is not None:
        raise UserError("--dask: the cluster determines the number of workers", next_step="leave --jobs out")
    if execution.device not in ("auto", "cpu", "cuda"):
        raise UserError("--device", got=f"'{execution.device}'", allowed="cpu or cuda with --dask")
    return "cpu" if execution.device == "auto" else execution.device


def carry_out(
    plan: Plan,
    execution: Execution,
    registry: Registry,
    out: Path,
    callbacks: Callbacks = SILENT,
    engine: Engine | None = None,
) -> None:
    """Run the missing cells of a plan. Each record is on the disk before the next one is waited for.

    Pictures are decoded first, so that no cell searches folders. The first Ctrl-C starts no more cells and waits for
    the running ones; the second ends them. A checkpoint is removed once its cell has a record, unless the record says
    that the computation was ended.

    Args:
        plan: from `plan_of`.
        execution, registry, out, callbacks: see `run`.
        engine: runs the cells in place of the engine that `execution` asks for.

    Raises:
        UserError: the folder cannot be written, or the engine gave no record of a cell.
        KeyboardInterrupt: the run was stopped. Finished cells are stored.
    """
    setting = Setting(out, plan.device, plan.locations, execution)
    store.check_writable(out)
    store.seal(out)  # records of killed runs
    observers = Observers(registry, execution.observe, out)
    if pictures := pictures_of(plan.todo, registry, plan.locations):
        decode(pictures)
    with ExitStack() as connections:
        workers = devices.workers_for(plan, setting.device, execution.jobs, execution.exclusive)
        if execution.dask and plan.todo:
            (dask,) = metadata.entry_points(group="sparsebench.engines", name="dask")  # core must not import plugins
            cluster = connections.enter_context(dask.load()(execution.dask, setting.device))
            engine, workers = cluster.records, cluster.slots() or 1  # 0 if no worker is connected yet
        engine = engine or (partial(in_workers, workers) if workers else partial(in_process, registry))
        callbacks.on_plan(plan, workers)
        for folder, value in _manifests(plan, registry):
            store.keep(out / folder, value)
        for cell_id in (job.cell.id for job in plan.jobs if store.checkpoint_path(out, job.cell.id).exists()):
            head = plan.heads.get(cell_id)
            if execution.rerun == "always" or (head is not None and head.status not in CUT_SHORT):
                _remove_checkpoint(out, cell_id)  # the cell is done, or must start anew
        if plan.todo:
            _collect(plan, engine, setting, workers, callbacks, observers)
        else:
            progress.clear(out)


def _collect(
    plan: Plan, engine: Engine, setting: Setting, workers: int, callbacks: Callbacks, observers: Observers
) -> None:
    """Let an engine run the cells of a plan; store their records and pass them on. See `carry_out`."""
    out, expected = setting.out, plan.expected
    writer = store.Writer(out)
    store.keep(out / manifests.ENVIRONMENTS, devices.environment())
    locks = CellLocks(out, plan.heads, expected.drop)
    most = 1 if setting.device == "cpu" else TOGETHER
    queue = Queue(plan.todo, most, locks, expected.begin)
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        callbacks.on_stop()
        queue.close()

    records = engine(queue, setting)
    beat = progress.beat(out, expected, workers, callbacks.on_beat, plan.others, plan.heads)
    try:
        with closing(locks), first_interrupt(stop), beat, closing(records):
            for record in records:
                writer.append(record)
                locks.release(record.cell_id)
                expected.done(record)
                if record.status not in CUT_SHORT:
                    _remove_checkpoint(out, record.cell_id)
                observers.observe(record)
                callbacks.on_record(record)
    finally:
        writer.close()
    store.seal(out)
    if stopped.is_set():
        raise KeyboardInterrupt
    if lost := expected.left:
        raise UserError(
            f"the engine gave no record of {len(lost)} of {len(plan.todo)} cells, {min(lost)} among them",
            next_step="the records of the others are stored; the same command continues",
        )


def _remove_checkpoint(out: Path, cell_id: str) -> None:
    """Remove the checkpoint of a cell, and parts of checkpoints that killed processes left."""
    path = store.checkpoint_path(out, cell_id)
    for leftover in (path, *path.parent.glob(f".{path.name}.*.part")):
        with suppress(OSError):
            leftover.unlink()


def _manifests(plan: Plan, registry: Registry) -> Iterator[tuple[str, object]]:
    """Yield manifests for the records of a plan, each with its folder: suite, files, strategies and metrics.

    Strategies and tasks from files that only the workers load are left out.
    """
    if plan.request is not None and plan.suite is not None:
        suite = _suite_of(plan.suite, plan.request, registry, plan.whole)
        yield manifests.SUITES, suite.model_dump(mode="json")
    files = [FileEntry(name=name, file=file) for name, file in file_names(plan.locations).items()]
    for name in plan.locations:
        if (contents := known_contents(name)) is not None and contents.strays:
            files.append(FileEntry(name=name, left_out=contents.strays))
        if contents is not None and contents.left_out:
            n, names = len(contents.left_out), few(sorted(contents.left_out), BAD, 200)
            line = f"{n:,} of {len(contents.pictures) + n:,} pictures, which cannot be read: {names}"
            files.append(FileEntry(name=name, left_out=line))
    yield from ((manifests.FILES, entry.model_dump(mode="json")) for entry in files)
    for name, revision in sorted({(job.cell.strategy.name, job.origin.revision) for job in plan.jobs}):
        with suppress(UserError):
            strategy = registry.strategy(name)
            cls = strategy.cls
            file, source, data = texts_of(strategy.file, revision) if strategy.file else ("", {}, {})
            yield (
                manifests.STRATEGIES,
                StrategyEntry(
                    name=name,
                    revision=revision,
                    kind=cls.kind,
                    site=cls.site,
                    trained=cls.trained,
                    adaptive=cls.adaptive,
                    citation=cls.citation,
                    bibtex=cls.bibtex,
                    how=default_reduction(cls),
                    file=file,
                    source=source,
                    data=data,
                ).model_dump(mode="json"),
            )
    for name in sorted({job.cell.task.name for job in plan.jobs}):
        with suppress(UserError):
            yield from ((manifests.METRICS, asdict(kind)) for kind in registry.task(name).metrics)


def _suite_of(suite: Suite, request: Request, registry: Registry, jobs: Iterable[Job]) -> SuiteEntry:
    """Return the requested suite and its settings. The name is OWN unless the whole suite was requested.

    Strategies without random draws test a network once only. A later repetition is a setting only if all strategies
    have it.
    """
    cells = [job.cell for job in jobs if job.requested]
    of_strategy: dict[str, set[str]] = defaultdict(set)
    again = set()
    for cell in cells:
        of_strategy[cell.strategy.name].add(setting := setting_of(cell))
        again |= {setting} if cell.network and cell.repetition else set()
    union = set[str]().union(*of_strategy.values())
    settings = tuple(sorted(union - again | again.intersection(*of_strategy.values())))
    entry = SuiteEntry(
        name=suite.name,
        version=suite.version,
        settings=settings,
        main_task=suite.main_task or suite.task[0].name,
        sample_complexity=suite.sample_complexity,
    )
    if request.keep or request.macs or request.single or request.where != "both":
        return entry.model_copy(update={"name": OWN, "version": 1})
    starts_elsewhere = any(cell.n_train and cell.model.params.get("weights") for cell in cells)
    may_lack = request.changes_suite or starts_elsewhere
    if may_lack and missing_cells(suite, cells, registry, any_budget=True):
        return entry.model_copy(update={"name": OWN, "version": 1})
    return entry


class Observers:
    """The requested observers, and the plugins whose hook receives all records.

    Args:
        registry: the registered observers and hooks.
        texts: the requested observers, as NAME[:param=value] or FILE.py[:param=value].
        out: the run's folder.

    Attributes:
        failed: the names of observers that raised or hung, and are turned off.

    Raises:
        UserError: an observer or a parameter does not exist, or an observer cannot be opened.
    """

    def __init__(self, registry: Registry, texts: Sequence[str], out: Path):
        self.failed: list[str] = []
        self._seeing: list[tuple[str, Callable[[Record], object], ObserverThread]] = []
        for text in dict.fromkeys(texts):
            spec = parse(text)
            classes = registry.observers_for(spec.name)
            if spec.params and not classes:
                raise UserError(f"observer '{spec.name}' has no parameters", got=f"'{text}'")
            params, *others = spec.combinations()
            if others:
                raise UserError("--observe takes one value for each parameter", got=f"'{text}'")
            for cls in classes:
                thread = ObserverThread()
                self._seeing.append((f"observe:{cls.name}", _opened(cls, params, out, thread), thread))
        self._seeing += [(hook.plugin_name, hook.function, ObserverThread()) for hook in registry.record_hooks()]

    def observe(self, record: Record) -> None:
        """Show a record to each observer. Report and turn off observers that raise or hang."""
        for entry in list(self._seeing):
            name, see, thread = entry
            try:
                with redirect_stdout(sys.stderr):
                    thread.call(partial(see, record))
            except (Exception, SystemExit) as error:  # an observer must never cost a record
                self._seeing.remove(entry)
                self.failed.append(name)
                log.warning("observer '%s' failed and is turned off: %s", name, one_line(error))


def _opened(
    cls: type[Observer], params: Mapping[str, Any], out: Path, thread: ObserverThread
) -> Callable[[Record], object]:
    """Open an observer in its thread; return the function that it calls with each record."""
    observer = fill(cls, params, f"observer '{cls.name}'")
    try:
        see = thread.call(partial(observer.open, out))
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # third-party code may raise anything
        raise UserError(f"observer '{cls.name}' cannot be opened: {one_line(error)}") from error
    if not callable(see):
        raise UserError(f"`open` of observer '{cls.name}' must return a function", got=see)
    return see


def show_folder(texts: Sequence[str], folder: Path) -> tuple[int, list[str]]:
    """Show all records of a run's folder to observers; return the number of records, and the observers that failed.

    Raises:
        UserError: the folder has no records, or see `Observers`.
    """
    if not (records := store.read(folder)):
        raise UserError(f"no records in {folder}", next_step="run `sparsebench run --out` with this folder first")
    observers = Observers(Registry(), texts, folder)
    for _, record in sorted(records.items()):
        observers.observe(record)
    return len(records), observers.failed
