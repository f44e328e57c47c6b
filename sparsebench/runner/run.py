"""A run: an engine computes the missing cells of a request, and their records and manifests are stored."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from sparsebench.errors import UserError, one_line
from sparsebench.plan import plan as planner
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import pictures_of
from sparsebench.plan.plan import Plan
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.observer import Observer, ObserverThread
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.record import Record
from sparsebench.records.store import Store
from sparsebench.runner import devices, features, progress
from sparsebench.runner.descriptions import descriptions
from sparsebench.runner.engines import LARGEST_BATCH, CellLocks, Engine, Queue, first_interrupt, in_process, in_workers
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.process import server
from sparsebench.runner.progress import SILENT, Callbacks
from sparsebench.strategy.spec import fill, parse
from sparsebench.tasks.sources.cache import decode, telling

log = logging.getLogger(__name__)

CUT_SHORT = ("crashed", "timeout", "oom")
"""Statuses of cells whose computation was ended. When they run again, they continue from their checkpoints."""


def run_missing(
    request: Request,
    files: Files,
    execution: Execution,
    registry: Registry,
    folder: Path | Store,
    callbacks: Callbacks = SILENT,
    prior: Callable[[Job], float] | None = None,
) -> Plan:
    """Run the cells of a request that a folder lacks, and return the plan.

    Args:
        request: the requested cells.
        files: the pictures and weights.
        execution: how cells are run.
        registry: the strategies, tasks, models and observers.
        folder: the run's folder. An open store has the new records afterwards.
        callbacks: functions that are called during the run.
        prior: returns the expected seconds of a cell, used if the folder has no record of its kind.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable.
        KeyboardInterrupt: the run was stopped. Finished cells are stored.
    """
    opened = Store.open(folder)
    begin(execution, opened.path)
    with telling(callbacks.on_pictures):
        plan = plan_of(request, files, execution, registry, opened, prior)
        carry_out(plan, execution, registry, opened, callbacks)
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
    folder: Path | Store,
    prior: Callable[[Job], float] | None = None,
) -> Plan:
    """Return the plan of a run. Nothing is run or written.

    Raises:
        UserError: anything unknown, out of range or missing.
    """
    device = device_of(execution)
    request = replace(request, on_gpu=device != "cpu")
    in_shard = planner.shard(execution.shard or "0/1")
    plan = planner.plan(request, files, registry, folder, execution.rerun, in_shard, prior)
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
    folder: Path | Store,
    callbacks: Callbacks = SILENT,
    engine: Engine | None = None,
) -> None:
    """Run the missing cells of a plan. Each record is on the disk before the next one is waited for.

    Pictures are decoded first, so that no cell searches folders. The first Ctrl-C starts no more cells and waits for
    the running ones; the second ends them. A checkpoint is removed once its cell has a record, unless the record says
    that the computation was ended.

    Args:
        plan: from `plan_of`.
        execution, registry, folder, callbacks: see `run_missing`.
        engine: runs the cells in place of processes on this machine. With --dask, the cluster runs them anyway.

    Raises:
        UserError: the folder cannot be written, or the engine gave no record of a cell.
        KeyboardInterrupt: the run was stopped. Finished cells are stored.
    """
    opened = Store.open(folder)
    out = opened.path
    environment = RunEnvironment(out, plan.device, plan.locations, execution)
    store.check_writable(out)
    store.seal(out)  # records of killed runs
    opened.refresh()
    observers = Observers(registry, execution.observe, out)
    pictures = pictures_of(plan.todo, registry, plan.locations)
    if pictures:
        decode(pictures)
    with ExitStack() as connections:
        chosen_engine, workers = _engine_of(plan, execution, registry, engine, connections)
        callbacks.on_plan(plan, workers)
        for kind, value in descriptions(plan, registry):
            opened.keep(kind, value)
        _remove_old_checkpoints(plan, execution, out)
        if plan.todo:
            _collect(plan, chosen_engine, environment, workers, opened, callbacks, observers)
        else:
            progress.clear(opened)
    if not execution.keep_features:
        for name in {job.features for job in plan.jobs} - {""}:
            features.remove(out, name)
    opened.refresh()


def _engine_of(
    plan: Plan, execution: Execution, registry: Registry, engine: Engine | None, connections: ExitStack
) -> tuple[Engine, int]:
    """Return the engine of a run, and its number of workers; 0 if cells run in this process.

    The order is: the cluster of --dask, the given engine, worker processes, this process.

    Args:
        plan, execution, registry, engine: see `carry_out`.
        connections: closes the connection to a cluster.
    """
    if execution.dask and plan.todo:
        (dask,) = metadata.entry_points(group="sparsebench.engines", name="dask")  # core must not import plugins
        cluster = connections.enter_context(dask.load()(execution.dask, plan.device))
        return cluster.records, cluster.slots() or 1  # 0 if no worker is connected yet
    workers = devices.workers_for(plan, plan.device, execution.jobs, execution.exclusive)
    if engine is not None:
        return engine, workers
    if workers:
        return partial(in_workers, workers), workers
    return partial(in_process, registry), workers


def _collect(
    plan: Plan,
    engine: Engine,
    environment: RunEnvironment,
    workers: int,
    opened: Store,
    callbacks: Callbacks,
    observers: Observers,
) -> None:
    """Let an engine run the cells of a plan; store their records and pass them on. See `carry_out`."""
    out, forecast = environment.out, plan.forecast
    writer = store.Writer(out)
    opened.keep(manifests.ENVIRONMENTS, devices.machine())
    locks = CellLocks(opened, plan.summaries, forecast.drop)
    batch = 1 if environment.device == "cpu" else LARGEST_BATCH
    queue = Queue(plan.todo, batch, locks, forecast.on_progress)
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        callbacks.on_stop()
        queue.close()

    records = engine(queue, environment)
    beat = progress.beat(opened, forecast, workers, callbacks.on_beat, plan.others, plan.summaries)
    try:
        # At the end the engine is closed first, so no worker computes any more when the last status is written and when
        # the cells are unlocked.
        with closing(locks), first_interrupt(stop), beat, closing(records):
            for record in records:
                writer.append(record)
                locks.release(record.cell_id)
                forecast.done(record)
                if record.status not in CUT_SHORT:
                    _remove_checkpoint(out, record.cell_id)
                observers.observe(record)
                callbacks.on_record(record)
    finally:
        writer.close()
    store.seal(out)
    if stopped.is_set():
        raise KeyboardInterrupt
    without_record = forecast.left
    if without_record:
        number, first = len(without_record), min(without_record)
        raise UserError(
            f"the engine gave no record of {number} of {len(plan.todo)} cells, {first} among them",
            next_step="the records of the others are stored; the same command continues",
        )


def _remove_old_checkpoints(plan: Plan, execution: Execution, out: Path) -> None:
    """Remove the checkpoints of cells that are done, or that must start anew."""
    for job in plan.jobs:
        cell_id = job.cell.id
        if not store.checkpoint_path(out, cell_id).exists():
            continue
        summary = plan.summaries.get(cell_id)
        done = summary is not None and summary.status not in CUT_SHORT
        if done or execution.rerun == "always":
            _remove_checkpoint(out, cell_id)


def _remove_checkpoint(out: Path, cell_id: str) -> None:
    """Remove the checkpoint of a cell, and parts of checkpoints that killed processes left."""
    path = store.checkpoint_path(out, cell_id)
    for leftover in (path, *path.parent.glob(f".{path.name}.*.part")):
        with suppress(OSError):
            leftover.unlink()


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
