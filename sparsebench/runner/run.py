"""A run: cells minus what the store has, through an engine, into the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path

from sparsebench import runner, sources
from sparsebench.errors import UserError
from sparsebench.plan import locate as pictures
from sparsebench.plan import plan as planner
from sparsebench.plan.expand import unanswered
from sparsebench.plan.job import Job
from sparsebench.plan.locate import file_names
from sparsebench.plan.plan import Plan, Shard
from sparsebench.plan.request import Files, How, Request
from sparsebench.plan.suite import Suite
from sparsebench.plugin.content import texts_of
from sparsebench.plugin.registry import Registry
from sparsebench.records import manifests, store
from sparsebench.records.manifests import OWN, Asked, Described, Given, setting_of
from sparsebench.records.record import Failure, Head, Record
from sparsebench.runner import devices, environment, underway
from sparsebench.runner.engines import Engine, RemoteEngine, Setting, Stop
from sparsebench.runner.observers import Observers
from sparsebench.runner.queue import Queue, most_together
from sparsebench.strategy.base import how_of
from sparsebench.text import few

CUT_SHORT = ("crashed", "timeout", "oom")
"""Statuses of cells that were ended before their time: what runs them again goes on from their checkpoints."""
BAD = 5
"""Pictures that cannot be read of which the names are kept."""


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
    with sources.telling(callbacks.on_pictures):
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
    runner.Limits.parse(how.timeout, how.memory_limit, how.jobs != 0, how.exclusive)
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
    limits = runner.Limits.parse(how.timeout, how.memory_limit, how.jobs != 0, how.exclusive)
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
        return runner.InProcess(registry)
    return runner.Processes(workers, 0 if device == "cpu" else devices.gpus())


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
    keep(plan, out, observers.registry)
    _clear_checkpoints(plan, out)
    if not plan.todo:
        underway.clear(out)
        store.seal(out)
        return
    writer = store.Writer(out)
    store.keep(out / manifests.ENVIRONMENTS, environment.describe())
    stop, first_weights = Stop(callbacks.on_stop), FirstWeights(plan, setting.locations)
    beat = underway.Beat(out, plan.todo, workers, plan.expected, callbacks.on_beat)
    claims = underway.Claims(out, plan.known, beat.drop)
    queue = Queue(plan.todo, most_together(setting.device), plan.expected.length, claims)
    stop.tell(queue.close)
    records = engine.records(queue, setting, beat.begin)
    try:
        with claims, stop.on_interrupt(), beat, _closing(records):
            for record in records:
                record = _after(first_weights.check(record), plan.known.get(record.cell_id))
                writer.append(record)
                claims.release(record.cell_id)
                lost.discard(record.cell_id)
                beat.done(record)
                if record.status not in CUT_SHORT:
                    _remove_checkpoint(out, record.cell_id)
                observers.observe(record)
                callbacks.on_record(record)
    finally:
        writer.close()
    store.seal(out)
    if stop.asked:
        raise KeyboardInterrupt
    if lost := lost - claims.done:
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
    if known is None or record.started > known.started:
        return record
    with suppress(ValueError, OverflowError):
        later = datetime.fromisoformat(known.started) + timedelta(microseconds=1)
        return record.model_copy(update={"started": later.isoformat()})
    return record


def _remove_checkpoint(out: Path, cell_id: str) -> None:
    """Remove the checkpoint of a cell, and what a process that was killed left of one."""
    path = store.checkpoint_path(out, cell_id)
    for leftover in (path, *path.parent.glob(f".{path.name}.*.part")):
        with suppress(OSError):
            leftover.unlink()


def _clear_checkpoints(plan: Plan, out: Path) -> None:
    """Remove checkpoints that nobody is to go on from: beside a finished record, and of all that is to start anew."""
    left = [job.cell.id for job in plan.jobs if store.checkpoint_path(out, job.cell.id).exists()]
    todo, known = {job.cell.id for job in plan.todo}, store.heads(out) if left else {}
    for cell_id in left:
        finished = cell_id in known and known[cell_id].status not in CUT_SHORT
        if plan.anew if cell_id in todo else finished:
            _remove_checkpoint(out, cell_id)


def keep(plan: Plan, out: Path, registry: Registry) -> None:
    """Write what is to know of the records of a plan's cells."""
    if plan.request is not None and plan.suite is not None:
        _keep_suite(out, plan.suite, plan.request, registry, plan.whole)
    _keep_files(out, plan)
    _keep_strategies(out, registry, plan.jobs)
    _keep_metrics(out, registry, plan.jobs)


def _keep_strategies(out: Path, registry: Registry, jobs: Iterable[Job]) -> None:
    """Write what the strategies of jobs are, unless it is there; of those that could not be loaded nothing."""
    sources = {(job.cell.strategy.name, job.origin.revision) for job in jobs if job.failure is None}
    for name, revision in sorted(sources):
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
        if (found := sources.known_contents(name)) is not None and found.left_out:
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
