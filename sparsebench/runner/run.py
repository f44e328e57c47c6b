"""A run: cells minus what the store has, through an engine, into the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.plan import locate as pictures
from sparsebench.plan import plan as planner
from sparsebench.plan.job import Job, Limits, Setting
from sparsebench.plan.plan import Plan, Shard
from sparsebench.plan.request import Files, How, Request
from sparsebench.plan.time_left import Remaining
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.record import Record
from sparsebench.runner import devices, environment, folder, underway
from sparsebench.runner.engines import Engine, InProcess, Processes, RemoteEngine, Stop
from sparsebench.runner.observers import Observers
from sparsebench.runner.process import kept_server
from sparsebench.runner.queue import TOGETHER, Queue
from sparsebench.tasks.sources.cache import telling


@dataclass(frozen=True)
class Callbacks:
    """Who is told of a run.

    Attributes:
        on_plan: called with the plan and the number of workers before the first cell starts.
        on_record: called with each stored record.
        on_beat: called about every second, in a thread, with how far the run is.
        on_stop: called, in a signal handler, at the first Ctrl-C.
        on_pictures: called with how far pictures are that are looked at before, see `sources.cache.Tell`.
    """

    on_plan: Callable[[Plan, int], None] = lambda plan, workers: None
    on_record: Callable[[Record], None] = lambda record: None
    on_beat: Callable[[underway.Underway], None] = lambda now: None
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
    if how.jobs != 0 and how.dask is None and not store.segments(out) and not store.sealed(out):
        with kept_server(devices.variables()) as server:  # a new folder has cells to run: load while they are planned
            server.begin()
    with telling(callbacks.on_pictures):
        plan = plan_of(request, files, how, registry, out, narrow, prior)
        carry_out(plan, how, registry, out, callbacks)
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
    device = device_of(how)
    Limits.parse(how.timeout, how.memory_limit, how.jobs != 0, how.exclusive)
    if not how.checkpoint >= 0:
        raise UserError("--checkpoint", got=how.checkpoint, allowed="seconds, or 0 for never")
    shard = None if how.shard is None else Shard.parse(how.shard)
    request = replace(request, on_gpu=device != "cpu")
    plan = planner.plan(request, files, registry, out, how.rerun, shard, prior)
    return plan if narrow is None else narrow(plan)


def device_of(how: How) -> str:
    """Return "cpu", "cuda:i" or "cuda": where cells run, of this machine's devices or of a cluster's workers.

    Raises:
        UserError: there is no such device, or it or a number of workers is asked for that a cluster cannot give.
    """
    if how.dask is None:
        return devices.resolve_device(how.device)
    if how.jobs is not None:
        raise UserError("--dask: the cluster says how many workers it has", next_step="leave --jobs out")
    if how.device not in ("auto", "cpu", "cuda"):
        raise UserError("--device", got=f"'{how.device}'", allowed="cpu or cuda with --dask")
    return "cpu" if how.device == "auto" else how.device


def _connect(address: str, device: str) -> AbstractContextManager[RemoteEngine]:
    """Return a connection to a Dask scheduler, by the entry point with which another package brings it."""
    entries = metadata.entry_points(group="sparsebench.engines", name="dask")
    if not entries:
        raise UserError("--dask is not installed", next_step="install sparsebench again")
    connected: AbstractContextManager[RemoteEngine] = next(iter(entries)).load()(address, device)
    return connected


def carry_out(plan: Plan, how: How, registry: Registry, out: Path, callbacks: Callbacks = SILENT) -> None:
    """Run what is to do of a plan, its pictures decoded first; see `run`."""
    limits = Limits.parse(how.timeout, how.memory_limit, how.jobs != 0, how.exclusive)
    store.check_writable(out)
    observers = Observers(registry)
    observers.attach(how.observe, out)
    pictures.decode(plan.todo, registry, plan.locations)
    device = device_of(how)
    setting = Setting(
        out=out, device=device, locations=dict(plan.locations), checkpoint=how.checkpoint, limits=limits,
        batch=how.batch,
    )  # fmt: skip
    with _connect(how.dask, device) if how.dask and plan.todo else nullcontext() as cluster:
        workers = (
            devices.workers_for(plan, device, how.jobs, how.exclusive) if cluster is None else cluster.slots() or 1
        )  # none may have come yet
        callbacks.on_plan(plan, workers)
        collect(plan, cluster or engine_of(plan, registry, device, workers), setting, workers, callbacks, observers)


def engine_of(plan: Plan, registry: Registry, device: str, workers: int) -> Engine:
    """Return the engine of so many worker processes on this machine, or of this process."""
    if workers == 0:
        return InProcess(registry)
    return Processes(workers, 0 if device == "cpu" else devices.gpus())


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
        UserError: the folder cannot be written or is gone, or the engine gave no record of a cell.
        KeyboardInterrupt: it was stopped; what is done is stored.
    """
    out, lost = setting.out, {job.cell.id for job in plan.todo}
    folder.keep(plan, out, observers.registry)
    folder.clear_checkpoints(plan, out)
    if not plan.todo:
        underway.clear(out)
        store.seal(out)
        return
    writer = store.Writer(out)
    store.keep(out / manifests.ENVIRONMENTS, environment.describe())
    remaining = Remaining(plan.todo, plan.expected)
    beat = underway.Beat(out, remaining, workers, callbacks.on_beat)
    locks = underway.CellLocks(out, plan.known, remaining.drop)
    most = 1 if setting.device == "cpu" else TOGETHER
    queue = Queue(plan.todo, most, plan.expected.length, locks)
    stop = Stop(callbacks.on_stop, queue.close)
    records = engine.records(queue, setting, remaining.begin)
    try:
        with locks, stop.on_interrupt(), beat, closing(records):
            for record in records:
                writer.append(record)
                locks.release(record.cell_id)
                lost.discard(record.cell_id)
                remaining.done(record)
                if record.status not in folder.CUT_SHORT:
                    folder.remove_checkpoint(out, record.cell_id)
                observers.observe(record)
                callbacks.on_record(record)
    finally:
        writer.close()
    store.seal(out)
    if stop.asked:
        raise KeyboardInterrupt
    if lost := lost - locks.done:
        raise UserError(
            f"the engine gave no record of {len(lost)} of {len(plan.todo)} cells, {min(lost)} among them",
            next_step="the records of the others are stored; the same command goes on",
        )
