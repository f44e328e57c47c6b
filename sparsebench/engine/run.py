"""A run: cells minus what the store has, through an engine, into the store."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sparsebench import engine, sources
from sparsebench.engine import devices, underway
from sparsebench.engine.options import Choice
from sparsebench.engine.setting import Engine, Setting
from sparsebench.engine.stop import Stop
from sparsebench.errors import UserError
from sparsebench.observe.observers import Observers
from sparsebench.planning import files as pictures
from sparsebench.planning import planner
from sparsebench.planning.job import Job
from sparsebench.planning.planner import Plan, keep_files, keep_metrics, keep_strategies
from sparsebench.planning.request import Files, How, Request
from sparsebench.planning.shard import Shard
from sparsebench.plugin.registry import Registry
from sparsebench.records import environment, store
from sparsebench.records.record import Failure, Head, Record

CUT_SHORT = ("crashed", "timeout", "oom")
"""Statuses of cells that were ended before their time: what runs them again goes on from their checkpoints."""


@dataclass(frozen=True)
class Callbacks:
    """Who is told of a run.

    Attributes:
        on_plan: called with the plan and the number of workers before the first cell starts.
        on_record: called with each stored record.
        on_stop: called, in a signal handler, at the first Ctrl-C.
        on_pictures: called with how far pictures are that are looked at before, see `sources.cache.Tell`.
    """

    on_plan: Callable[[Plan, int], None] = lambda plan, workers: None
    on_record: Callable[[Record], None] = lambda record: None
    on_stop: Callable[[], None] = lambda: None
    on_pictures: Callable[[str, int, int], None] = lambda what, done, total: None


SILENT = Callbacks()
Narrow = Callable[[Plan], Plan]
Prior = Callable[[Job], float]


def run(
    request: Request,
    files: Files,
    how: How,
    registry: Registry,
    out: Path,
    callbacks: Callbacks = SILENT,
    narrow: Narrow | None = None,
    prior: Prior | None = None,
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
        prior: says how many seconds a cell takes of whose kind the folder has no record.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable.
        KeyboardInterrupt: it was stopped; what is done is stored.
    """
    choice = Choice.of(how)
    with sources.telling(callbacks.on_pictures):
        plan = plan_of(request, files, how, registry, out, narrow, prior)
        carry_out(plan, how, choice, registry, out, callbacks)
    return plan


def plan_of(
    request: Request,
    files: Files,
    how: How,
    registry: Registry,
    out: Path,
    narrow: Narrow | None = None,
    prior: Prior | None = None,
) -> Plan:
    """Return what `run` would do; nothing is run and nothing written.

    Raises:
        UserError: as `run` does before its first cell.
    """
    choice = Choice.of(how)
    engine.Limits.parse(how.timeout, how.memory_limit, choice.in_processes, how.exclusive)
    shard = None if how.shard is None else Shard.parse(how.shard)
    plan = planner.plan(request, files, registry, out, how.rerun, shard, prior)
    return plan if narrow is None else narrow(plan)


def carry_out(
    plan: Plan, how: How, choice: Choice, registry: Registry, out: Path, callbacks: Callbacks = SILENT
) -> None:
    """Run what is to do of a plan, its pictures decoded first; see `run`."""
    limits = engine.Limits.parse(how.timeout, how.memory_limit, choice.in_processes, how.exclusive)
    store.check_writable(out)
    if plan.request is not None:
        planner.keep_suite(out, plan.request, registry, plan.whole)
    planner.keep_strays(out, plan.strays)
    planner.keep_left_out(out, plan.locations)
    observers = Observers(registry)
    observers.attach(how.observe, out)
    pictures.decode(plan.todo, registry, plan.locations)
    seconds, device = plan.expected.seconds, choice.device
    setting = Setting(
        out=out, device=device, locations=dict(plan.locations), checkpoint=how.checkpoint, limits=limits
    )  # fmt: skip
    with choice.connect(seconds) if plan.todo else nullcontext() as cluster:
        workers = (
            devices.workers_for(plan, device, choice.jobs, how.exclusive)
            if cluster is None
            else cluster.slots(how.exclusive) or choice.jobs or 1
        )  # none may have come yet
        callbacks.on_plan(plan, workers)
        collect(plan, cluster or engine_of(plan, registry, device, workers), setting, workers, callbacks, observers)


def engine_of(plan: Plan, registry: Registry, device: str, workers: int) -> Engine:
    """Return the engine of so many worker processes on this machine, or of this process."""
    if workers == 0:
        return engine.InProcess(registry, plan.expected.seconds)
    return engine.Processes(workers, 0 if device == "cpu" else devices.gpus(), plan.expected.seconds)


def execute(
    plan: Plan,
    registry: Registry,
    out: Path,
    device: str,
    workers: int,
    on_record: Callable[[Record], None] = SILENT.on_record,
    on_stop: Callable[[], None] = SILENT.on_stop,
) -> None:
    """Run what is to do of a plan on this machine, with nothing but the defaults; see `collect`."""
    setting = Setting(out=out, device=device, locations=dict(plan.locations))
    callbacks = Callbacks(on_record=on_record, on_stop=on_stop)
    collect(plan, engine_of(plan, registry, device, workers), setting, workers, callbacks, Observers(registry))


def collect(
    plan: Plan, engine: Engine, setting: Setting, workers: int, callbacks: Callbacks, observers: Observers
) -> None:
    """Have an engine run what is to do; each record is stored, and on the disk, before the next is waited for.

    The first Ctrl-C lets the cells under way come to their end and starts no more, the second ends them.

    Args:
        plan: from `plan_of`.
        engine: which runs the cells.
        setting: what they have in common. Checkpoints go when the cell's record is there, unless that says that it was
            ended before its time.
        workers: how many cells it runs at a time, 0 for one in this process.
        callbacks: who is told.
        observers: who sees each record, with the registry from which strategies come.

    Raises:
        UserError: the seconds are negative, the folder cannot be written or is gone, or the engine gave no record of a
            cell.
        KeyboardInterrupt: it was stopped; what is done is stored.
    """
    out, lost = setting.out, {job.cell.id for job in plan.todo}
    if not setting.checkpoint >= 0:
        raise UserError("--checkpoint", got=setting.checkpoint, allowed="seconds, or 0 for never")
    keep_strategies(out, observers.registry, plan.jobs)
    keep_metrics(out, observers.registry, plan.jobs)
    keep_files(out, plan.locations)
    _clear_checkpoints(plan, out)
    if not plan.todo:
        underway.clear(out)
        store.seal(out)
        return
    writer = store.Writer(out)
    store.keep(out / environment.FOLDER, environment.describe())
    stop, first_weights = Stop(callbacks.on_stop), FirstWeights(plan, setting.locations)
    beat = underway.Beat(out, plan.todo, workers, plan.expected)
    records = engine.records(plan.todo, setting, stop, beat.begin)
    try:
        with stop.on_interrupt(), beat, _closing(records):
            for record in records:
                record = _after(first_weights.check(record), plan.known.get(record.cell_id))
                writer.append(record)
                lost.discard(record.cell_id)
                beat.done(record)
                if record.status not in CUT_SHORT:
                    store.remove_checkpoint(out, record.cell_id)
                observers.observe(record)
                callbacks.on_record(record)
    finally:
        writer.close()
    store.seal(out)
    if stop.asked:
        raise KeyboardInterrupt
    if lost:
        raise UserError(
            f"the engine gave no record of {len(lost)} of {len(plan.todo)} cells, {min(lost)} among them",
            next_step="the records of the others are stored; the same command goes on",
        )


class FirstWeights:
    """What cells of a plan that begin with weights in the run's folder should have begun with, by content."""

    def __init__(self, plan: Plan, elsewhere: Mapping[str, Path]):
        self.jobs = {job.cell.id: job for job in plan.todo}
        starts = {job.after for job in plan.todo} - {""} - elsewhere.keys()
        heads = {cell_id: plan.known[cell_id] for cell_id in starts if cell_id in plan.known}
        self.hashes = {cell_id: head.notes["weights"] for cell_id, head in heads.items() if "weights" in head.notes}

    def check(self, record: Record) -> Record:
        """Return the record, or, where its weights had been damaged, one that says that the cell was skipped."""
        if "weights" in record.notes:
            self.hashes[record.cell_id] = record.notes["weights"]
        job = self.jobs[record.cell_id]
        hash_ = record.notes.get("tested_weights" if job.network else "initial_weights")
        if hash_ in (None, self.hashes.get(job.after, hash_)):
            return record
        reason = f"the weights it began with are not those that {job.after} wrote: the same command makes them again"
        return job.record_of_failure("skipped", Failure(reason=reason, kind="NotReadyError"), record.started)


@contextmanager
def _closing(records: Iterator[Record]) -> Iterator[None]:
    """At the end, close what an engine yields from, where it is a generator."""
    try:
        yield
    finally:
        if isinstance(records, Generator):
            records.close()


def _after(record: Record, known: Head | None) -> Record:
    """Return a record that says that it started after the known one of its cell, even if the clock was set back."""
    if known is None or store.moment(record.started) > store.moment(known.started):
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
