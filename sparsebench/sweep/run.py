"""A run: cells minus what the store has, through an engine, into the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sparsebench.errors import UserError
from sparsebench.models import weights
from sparsebench.observe.observers import Observers
from sparsebench.plugin.registry import Registry
from sparsebench.sweep import described, engine, environment, store
from sparsebench.sweep.beat import Beat, apart
from sparsebench.sweep.contenders import Request
from sparsebench.sweep.expand import ImageUse, expand, image_uses
from sparsebench.sweep.expected import Expected
from sparsebench.sweep.job import Job
from sparsebench.sweep.networks import Networks
from sparsebench.sweep.record import Head, Past, Record
from sparsebench.sweep.shard import Shard
from sparsebench.sweep.suite import Suite, load
from sparsebench.tasks import folder, sources
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.known import OFFICIAL

if TYPE_CHECKING:
    from sparsebench.sweep.engine.cluster import Cluster

Rerun = Literal["missing", "failed", "always"]
HISTORY = 10_000
"""Records that are looked at to tell how long cells will take: a large store is not read twice for that."""
RERUN: tuple[Rerun, ...] = ("missing", "failed", "always")
MOST_WORKERS = 16
CUT_SHORT = ("crashed", "timeout", "oom")
"""Statuses of cells that were ended before their time: what runs them again goes on from their checkpoints."""
LOCATED = {
    "images": sources.locate_images,
    "backgrounds": sources.locate_backgrounds,
    "pretrain_images": sources.locate_images,
}
"""The parameters of tasks that name pictures, and what finds those."""


@dataclass(frozen=True)
class Files:
    """Where pictures and trained weights come from, as a user says it; None leaves the suite's.

    Attributes:
        weights: a file that models begin with; `networks` a folder of networks that a suite's tracks begin with.
    """

    images: str | None = None
    backgrounds: str | None = None
    pretrain_images: str | None = None
    data_root: Path | None = None
    download: bool = False
    weights: Path | None = None
    networks: Path | None = None
    _known: dict[str, tuple[str, Path | None]] = field(default_factory=dict, init=False, compare=False)

    def locate(self, uses: Sequence[ImageUse] = ("images",)) -> tuple[dict[str, Any], dict[str, Path]]:
        """Return the names for the cells by field of the request, and the places by name.

        Files are read the first time only. A folder that is only tested on needs no part to train on, and that part
        is not in its name: so the images of a request have two names if tasks of both kinds are in it.
        """
        found: dict[str, tuple[str, Path | None]] = {}
        for use in uses:
            if self.images is not None:
                found[use] = self._once(use, self.images)
        for other in ("backgrounds", "pretrain_images"):
            if (spec := getattr(self, other)) is not None:
                found[other] = self._once(other, spec)
        if self.weights is not None:
            if "weights" not in self._known:
                self._known["weights"] = weights.locate(self.weights)
            found["weights"] = self._known["weights"]
        names = {parameter: name for parameter, (name, _) in found.items()}
        return names, {name: place for name, place in found.values() if place is not None}

    def _once(self, name: str, spec: str) -> tuple[str, Path | None]:
        """Return name and place of pictures, looked at the first time only."""
        if name not in self._known:
            own = name == "tested_images"
            self._known[name] = folder.locate(spec) if own else LOCATED[name](spec, self.data_root, self.download)
        return self._known[name]

    def places(self, jobs: Sequence[Job], named: Mapping[str, Path]) -> dict[str, Path]:
        """Return where all files of the jobs lie: those that the user named, and official sets that suites name.

        Raises:
            UserError: an official set is not there.
        """
        places = dict(named)
        named_in = ((key, job.cell.task.params.get(key)) for job in jobs for key in LOCATED)
        for parameter, name in sorted({(key, name) for key, name in named_in if isinstance(name, str)}):
            if name in OFFICIAL and name not in places:
                place = LOCATED[parameter](name, self.data_root, self.download)[1]
                assert place is not None
                places[name] = place
        if places:
            cache.check()
        return places


@dataclass(frozen=True)
class Plan:
    """What a run is about to do.

    Attributes:
        jobs: every cell of the request, or of its shard; `todo` those that have no answer yet, the longest first.
        whole: every cell of the request and those that they begin with, except networks found in another folder and
            what those began with.
        known: what the store has of every cell.
        expected: what the cells are expected to take.
        suite: the request's.
        anew: whether trainings that were cut short start again from their beginning.
    """

    jobs: list[Job]
    todo: list[Job]
    locations: Mapping[str, Path]
    whole: list[Job]
    known: Mapping[str, Head]
    expected: Expected
    suite: Suite
    anew: bool = False

    @property
    def apart(self) -> str:
        """How many of what is to do are trainings and how many tests, see `beat.apart`."""
        return apart(len(self.todo), sum(bool(job.network) for job in self.todo))


def plan(
    request: Request, files: Files, registry: Registry, out: Path, rerun: Rerun, shard: Shard | None = None
) -> Plan:
    """Return the plan of a request, or of a shard of it. Nothing is written and no network is built.

    A cell that others of a shard start from, directly or by way of another, is run by that shard too if the folder has
    no weights of it.
    """
    if rerun not in RERUN:
        raise UserError("rerun", got=f"'{rerun}'", allowed=RERUN)
    known = store.heads(out)
    networks = Networks(out, known, files.networks)
    whole, locations = jobs_of(request, files, registry)
    networks.check({job.cell.init.id for job in whole if job.cell.track != "scratch" and job.cell.init})
    asked = {job.cell.id for job in whole if job.asked}
    before = needed_by(asked, whole, lambda first: networks.elsewhere(first) is None)
    whole = [job for job in whole if job.cell.id in asked | before]
    jobs = whole if shard is None else [job for job in whole if shard.has(job.cell.id)]
    again = {job.cell.id for job in jobs if rerun == "always" or _is_missing(job, known, rerun)}
    needed = needed_by(again, whole, lambda first: not networks.has(first))
    mine = {job.cell.id for job in jobs} | needed
    todo = [job for job in whole if job.cell.id in again | needed]
    history = islice(store.scan_all(out, Past), HISTORY if todo else 0)
    expected = Expected(found.item for found in history)
    jobs = [job for job in whole if job.cell.id in mine]
    places = files.places(todo, locations) | networks.places({job.after for job in todo} - {""})
    ordered, suite = expected.longest_first(todo), load(request.suite)
    return Plan(jobs, ordered, places, whole, known, expected, suite, anew=rerun == "always")


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


def jobs_of(request: Request, files: Files, registry: Registry) -> tuple[list[Job], dict[str, Path]]:
    """Return every job of a request, and the places of the files that it names."""
    names, locations = files.locate(image_uses(request, registry))
    return expand(replace(request, **names), registry, locations), locations


def _is_missing(job: Job, known: Mapping[str, Head], rerun: Rerun) -> bool:
    """Say whether a cell has no answer: no record, or one by another version of the strategy's source."""
    record = known.get(job.cell.id)
    if record is None or record.origin.sha256 != job.origin.sha256:
        return True
    return rerun == "failed" and record.status not in ("ok", "unsupported")


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
    described.keep_strategies(out, registry, plan.jobs)
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
    gpus = 0 if device == "cpu" else _gpus()
    return engine.local(todo, workers, out, device, places, checkpoint, limits, stop, gpus, on_begin, seconds)


def workers_for(plan: Plan, device: str, asked: int | None, exclusive: bool = False) -> int:
    """Return how many worker processes a run has: as asked, or one a core, or one a GPU; 0 is this process.

    Raises:
        UserError: with `exclusive`, more than the one of this machine, or than one a GPU.
    """
    if asked == 0:
        return 0
    alone = _gpus() if device == "cuda" else 1
    most = min(_cores(), MOST_WORKERS) if device == "cpu" and not exclusive else alone
    if exclusive and asked is not None and asked > alone:
        one = "one cell at a time on each GPU" if device == "cuda" else "one cell at a time"
        raise UserError(f"--exclusive runs {one}", got=f"--jobs {asked}", allowed=f"0 to {alone}")
    return max(1, min(asked or most, len(plan.todo)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(device: str) -> str:
    """Return "cpu", "cuda:i" for one GPU or "cuda" for several, for auto, cpu, cuda or cuda:i.

    Raises:
        UserError: another word, or a CUDA device that is not there.
    """
    if device == "cpu":
        return device
    kind, _, number = device.partition(":")
    if device != "auto" and (kind != "cuda" or (number and not (number.isascii() and number.isdigit()))):
        raise UserError("--device", got=f"'{device}'", allowed="auto, cpu, cuda, cuda:0, ...")
    if device == "auto" and not _has_nvidia():
        return "cpu"
    there = _gpus()
    if device == "auto" and not there:
        return "cpu"
    if int(number or 0) >= there:
        raise UserError(
            f"--device {device}: torch sees {there} CUDA devices here", next_step="use --device cpu or auto"
        )
    return f"cuda:{number or 0}" if number or there == 1 else "cuda"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _has_nvidia() -> bool:
    """Say whether an NVIDIA driver is loaded, without the seconds that importing torch takes."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")) or os.name == "nt"
