"""A run: cells minus what the store has, through an engine, into the store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sparsebench.errors import UserError
from sparsebench.models import weights
from sparsebench.plugin.registry import Registry
from sparsebench.sweep import engine, environment, store
from sparsebench.sweep.cell import canonical
from sparsebench.sweep.expand import Request, expand, trains
from sparsebench.sweep.job import Job
from sparsebench.sweep.record import Record
from sparsebench.tasks import folder, sources

Rerun = Literal["missing", "failed", "always"]
RERUN: tuple[Rerun, ...] = ("missing", "failed", "always")
MOST_WORKERS = 16


@dataclass(frozen=True)
class Files:
    """Where pictures and trained weights come from, as a user says it; None leaves the suite's."""

    images: str | None = None
    backgrounds: str | None = None
    data_root: Path | None = None
    download: bool = False
    weights: Path | None = None

    def locate(self, trains: bool = True) -> tuple[dict[str, Any], dict[str, Path]]:
        """Return the names for the cells by parameter, and the places by name.

        Where nothing is trained, a folder of pictures needs no part for that.
        """
        found: dict[str, tuple[str, Path | None]] = {}
        if self.images is not None and trains:
            found["images"] = sources.locate_images(self.images, self.data_root, self.download)
        elif self.images is not None:
            found["images"] = folder.locate(self.images)
        if self.weights is not None:
            found["weights"] = weights.locate(self.weights)
        if self.backgrounds is not None:
            found["backgrounds"] = sources.locate_backgrounds(self.backgrounds)
        names = {key: name for key, (name, _) in found.items()}
        return names, {name: path for name, path in found.values() if path is not None}


@dataclass(frozen=True)
class Plan:
    """What a run is about to do.

    Attributes:
        jobs: every cell of the request; `todo` those that have no answer yet.
    """

    jobs: list[Job]
    todo: list[Job]
    locations: Mapping[str, Path]


def plan(request: Request, files: Files, registry: Registry, out: Path, rerun: Rerun) -> Plan:
    """Return the plan of a request. Nothing is written and no network is built."""
    if rerun not in RERUN:
        raise UserError("rerun", got=f"'{rerun}'", allowed=RERUN)
    names, locations = files.locate(trains(request, registry))
    jobs = expand(replace(request, **names), registry, locations)
    known = {} if rerun == "always" else store.read(out)
    todo = [job for job in jobs if _is_missing(job, known, rerun)]
    needed = {job.after for job in todo if job.after and not store.weights_path(out, job.after).exists()}
    again = {job.cell.id for job in todo}
    return Plan(jobs, [job for job in jobs if job.cell.id in again | needed], locations)


def _is_missing(job: Job, known: Mapping[str, Record], rerun: Rerun) -> bool:
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
) -> None:
    """Run what is to do; each record is stored, and on the disk, before the next is waited for.

    Args:
        plan: from `plan`.
        registry: whose observers see each record.
        out: the run's folder.
        device: from `resolve_device`.
        workers: from `workers_for`.
        on_record: called with each stored record.
    """
    if not plan.todo:
        return
    writer = store.Writer(out)
    described = environment.describe()
    store.write_whole(out / "environments" / f"{environment.digest(described)}.json", canonical(described).encode())
    try:
        for record in _records(plan.todo, registry, out, device, workers, plan.locations):
            writer.append(record)
            registry.observe(record)
            if on_record is not None:
                on_record(record)
    finally:
        writer.close()


def _records(
    jobs: Sequence[Job], registry: Registry, out: Path, device: str, workers: int, locations: Mapping[str, Path]
) -> Iterator[Record]:
    if workers == 0:
        return engine.inline(jobs, registry, out, device, locations)
    return engine.local(jobs, workers, out, device, locations)


def workers_for(plan: Plan, device: str, asked: int | None) -> int:
    """Return how many worker processes a run has: as asked, or one a core, or one for a GPU; 0 is this process."""
    if asked == 0:
        return 0
    most = min(_cores(), MOST_WORKERS) if device == "cpu" else 1
    return max(1, min(asked or most, len(plan.todo)))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resolve_device(device: str) -> str:
    """Return "cpu" or "cuda:i" for auto, cpu, cuda or cuda:i.

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
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if there else "cpu"
    if int(number or 0) >= there:
        raise UserError(
            f"--device {device}: torch sees {there} CUDA devices here", next_step="use --device cpu or auto"
        )
    return f"cuda:{number or 0}"


def _has_nvidia() -> bool:
    """Say whether an NVIDIA driver is loaded, without the seconds that importing torch takes."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")) or os.name == "nt"
