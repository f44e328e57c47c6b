"""A run: cells minus what the store has, through an engine, into the store."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from sparsebench import engine
from sparsebench.engine import devices
from sparsebench.engine.options import Choice
from sparsebench.engine.underway import Beat
from sparsebench.errors import UserError
from sparsebench.observe.observers import Observers
from sparsebench.planning import planner
from sparsebench.planning.planner import Plan, keep_strategies
from sparsebench.planning.request import Files, How, Request
from sparsebench.planning.shard import Shard
from sparsebench.plugin.registry import Registry
from sparsebench.records import environment, store
from sparsebench.records.record import Head, Record

if TYPE_CHECKING:
    from sparsebench.engine.dask import Cluster

CUT_SHORT = ("crashed", "timeout", "oom")
"""Statuses of cells that were ended before their time: what runs them again goes on from their checkpoints."""


@dataclass(frozen=True)
class Callbacks:
    """Who is told of a run.

    Attributes:
        on_plan: called with the plan and the number of workers before the first cell starts.
        on_record: called with each stored record.
        on_stop: called, in a signal handler, at the first Ctrl-C.
    """

    on_plan: Callable[[Plan, int], None] = lambda plan, workers: None
    on_record: Callable[[Record], None] = lambda record: None
    on_stop: Callable[[], None] = lambda: None


SILENT = Callbacks()
Narrow = Callable[[Plan], Plan]


def run(
    request: Request,
    files: Files,
    how: How,
    registry: Registry,
    out: Path,
    callbacks: Callbacks = SILENT,
    narrow: Narrow | None = None,
) -> Plan:
    """Run what a folder lacks of a request, and return the plan.

    Args:
        request: which cells.
        files: the pictures and weights.
        how: how they are run.
        registry: from which strategies come.
        out: the run's folder.
        callbacks: who is told.
        narrow: takes what is not wanted out of the plan.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable.
        KeyboardInterrupt: it was stopped; what is done is stored.
    """
    choice = Choice.of(how)
    plan = plan_of(request, files, how, registry, out, narrow)
    carry_out(plan, how, choice, registry, out, callbacks)
    return plan


def plan_of(
    request: Request, files: Files, how: How, registry: Registry, out: Path, narrow: Narrow | None = None
) -> Plan:
    """Return what `run` would do; nothing is run and nothing written."""
    shard = None if how.shard is None else Shard.parse(how.shard)
    plan = planner.plan(request, files, registry, out, how.rerun, shard)
    return plan if narrow is None else narrow(plan)


def carry_out(
    plan: Plan, how: How, choice: Choice, registry: Registry, out: Path, callbacks: Callbacks = SILENT
) -> None:
    """Run what is to do of a plan; see `run`."""
    limits = engine.Limits.given(how.timeout, how.memory_limit, choice.in_processes, how.exclusive)
    store.check_writable(out)
    if plan.suite is not None:
        planner.keep_suite(out, plan.suite, plan.whole)
    observers = Observers(registry)
    observers.attach(how.observe, out)
    with choice.connected() if plan.todo else nullcontext() as cluster:
        workers = (
            devices.workers_for(plan, choice.device, choice.jobs, how.exclusive)
            if cluster is None
            else cluster.slots(how.exclusive) or choice.jobs or 1
        )  # none may have come yet
        callbacks.on_plan(plan, workers)
        execute(
            plan, registry, out, choice.device, workers, callbacks.on_record, how.checkpoint, limits,
            callbacks.on_stop, cluster, observers,
        )  # fmt: skip


def execute(
    plan: Plan,
    registry: Registry,
    out: Path,
    device: str,
    workers: int,
    on_record: Callable[[Record], None] | None = None,
    checkpoint: float = engine.CHECKPOINT,
    limits: engine.Limits | None = None,
    on_stop: Callable[[], None] | None = None,
    cluster: Cluster | None = None,
    observers: Observers | None = None,
) -> None:
    """Run what is to do; each record is stored, and on the disk, before the next is waited for.

    The first Ctrl-C lets the cells under way come to their end and starts no more, the second ends them.

    Args:
        plan: from `plan`.
        registry: from which strategies come.
        out: the run's folder.
        device: from `resolve_device`.
        workers: from `workers_for`.
        on_record: called with each stored record.
        checkpoint: seconds between checkpoints of a cell, 0 for none; they go when the cell's record is there, unless
            that says that it was ended before its time.
        limits: of each cell; worker processes only.
        on_stop: called, in a signal handler, at the first Ctrl-C.
        cluster: whose workers run the cells, in place of this machine's.
        observers: who sees each record; the registry's plugins that look at records unless given.

    Raises:
        UserError: the seconds are negative, or the folder cannot be written.
        KeyboardInterrupt: it was stopped; what is done is stored.
    """
    if not checkpoint >= 0:
        raise UserError("--checkpoint", got=checkpoint, allowed="seconds, or 0 for never")
    observers = observers or Observers(registry)
    keep_strategies(out, registry, plan.jobs)
    _clear_checkpoints(plan, out)
    if not plan.todo:
        return
    writer = store.Writer(out)
    store.keep(out / environment.FOLDER, environment.describe())
    stop = engine.Stop(on_stop)
    beat = Beat(out, plan.todo, workers)
    if cluster is not None:
        records = cluster.records(
            plan.todo, out, plan.locations, checkpoint, limits, stop, beat.begin, plan.expected.seconds
        )
    else:
        records = _records(plan, registry, out, device, workers, checkpoint, limits, stop, beat.begin)
    try:
        with stop.on_interrupt(), beat, closing(records):
            for record in records:
                record = _after(record, plan.known.get(record.cell_id))
                writer.append(record)
                beat.done(record)
                if record.status not in CUT_SHORT:
                    store.remove_checkpoint(out, record.cell_id)
                observers.observe(record)
                if on_record is not None:
                    on_record(record)
    finally:
        writer.close()
    if stop.asked:
        raise KeyboardInterrupt


def _after(record: Record, known: Head | None) -> Record:
    """Return a record that says that it started after the known one of its cell, even if the clock was set back."""
    if known is None or record.started > known.started:
        return record
    with suppress(ValueError, OverflowError):
        later = datetime.fromisoformat(known.started) + timedelta(microseconds=1)
        return record.model_copy(update={"started": later.isoformat()})
    return record


def _clear_checkpoints(plan: Plan, out: Path) -> None:
    """Remove checkpoints that nobody is to go on from: beside a finished record, and of all that is to start anew."""
    left = [job.cell.id for job in plan.jobs if store.checkpoint_path(out, job.cell.id).exists()]
    todo, known = {job.cell.id for job in plan.todo}, store.heads(out) if left else {}
    for cell_id in left:
        finished = cell_id in known and known[cell_id].status not in CUT_SHORT
        if plan.anew if cell_id in todo else finished:
            store.remove_checkpoint(out, cell_id)


def _records(
    plan: Plan,
    registry: Registry,
    out: Path,
    device: str,
    workers: int,
    checkpoint: float,
    limits: engine.Limits | None,
    stop: engine.Stop,
    on_begin: Callable[[Sequence[str]], None],
) -> Generator[Record, None, None]:
    todo, places, seconds = plan.todo, plan.locations, plan.expected.seconds
    if workers == 0:
        exclusive = limits is not None and limits.exclusive
        return engine.inline(todo, registry, out, device, places, checkpoint, stop, on_begin, seconds, exclusive)
    gpus = 0 if device == "cpu" else devices.gpus()
    return engine.local(todo, workers, out, device, places, checkpoint, limits, stop, gpus, on_begin, seconds)
