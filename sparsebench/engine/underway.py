"""What a run says of itself while it is under way: a small file in its folder, for `sparsebench status`."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError
from sparsebench.planning.job import Job
from sparsebench.records import store
from sparsebench.records.record import Record

EVERY = 2.0
"""Seconds between two writings."""
SILENT = 60.0
"""Seconds after which a run that has written nothing is held for dead."""


class Cells(BaseModel):
    """Some cells of one strategy, task and number of training samples.

    Attributes:
        tests_only: whether their strategy acts in the test only; such cells are reckoned apart.
        network: whether they test a network that is trained once for all of them.
        since: when they were begun, in seconds since 1970; 0 if they are not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    task: str
    n_train: int
    n: int
    tests_only: bool = False
    network: bool = False
    since: float = 0.0


class Underway(BaseModel):
    """The file.

    Attributes:
        updated: when it was written, in seconds since 1970.
        left: cells without a record, those that are run included.
        running: cells that are run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    workers: int
    updated: float
    left: tuple[Cells, ...]
    running: tuple[Cells, ...]

    @property
    def alive(self) -> bool:
        """Whether it was written lately."""
        return time.time() - self.updated < SILENT


class Beat:
    """Keeps the file of a run up to date in a thread of its own, and removes it when the run is over.

    Args:
        out: the run's folder.
        jobs: what the run is to do.
        workers: its worker processes.
    """

    def __init__(self, out: Path, jobs: Sequence[Job], workers: int):
        self.host, self.workers = socket.gethostname(), workers
        self.path = out / "underway" / f"{self.host}-{os.getpid()}.json"
        self.jobs = {job.cell.id: job for job in jobs}
        self.left = Counter(map(_kind, jobs))
        self.running: dict[str, float] = {}
        self.lock, self.over = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._write_on, daemon=True)

    def begin(self, cell_ids: Sequence[str]) -> None:
        """Take note of cells that something begins for."""
        with self.lock:
            for cell_id in cell_ids:
                self.running.setdefault(cell_id, time.time())

    def done(self, record: Record) -> None:
        """Take note of a record."""
        with self.lock:
            self.running.pop(record.cell_id, None)
            if (job := self.jobs.get(record.cell_id)) is not None:
                self.left[_kind(job)] -= 1

    def __enter__(self) -> Beat:
        for path, underway in _files(self.path.parent):
            if not underway.alive:
                path.unlink(missing_ok=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.over.set()
        self.thread.join()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
            self.path.parent.rmdir()

    def _write_on(self) -> None:
        while True:
            with suppress(UserError):  # the run itself will say that the folder cannot be written
                store.write_whole(self.path, self._now().model_dump_json().encode())
            if self.over.wait(EVERY):
                return

    def _now(self) -> Underway:
        with self.lock:
            kinds = [(kind, n) for kind, n in self.left.items() if n > 0]
            at = [(self.jobs[cell_id], since) for cell_id, since in self.running.items()]
        left = tuple(_cells(kind, n) for kind, n in kinds)
        running = tuple(_cells(_kind(job), 1, since) for job, since in at)
        now = time.time()
        return Underway(host=self.host, pid=os.getpid(), workers=self.workers, updated=now, left=left, running=running)


_Kind = tuple[str, str, int, bool, bool]
"""The fields of `Cells` by which cells are counted together."""


def _kind(job: Job) -> _Kind:
    return job.label, job.cell.task.name, job.cell.n_train, job.cell.tests_only, bool(job.network)


def _cells(kind: _Kind, n: int, since: float = 0.0) -> Cells:
    label, task, n_train, tests_only, network = kind
    return Cells(
        label=label, task=task, n_train=n_train, tests_only=tests_only, network=network, n=n, since=since
    )  # fmt: skip


def underway(out: Path) -> list[Underway]:
    """Return what the runs of a folder say of themselves; one that was killed is silent and not alive."""
    return [found for _, found in _files(out / "underway")]


def _files(folder: Path) -> list[tuple[Path, Underway]]:
    found = []
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            found.append((path, Underway.model_validate_json(path.read_bytes())))
    return found
