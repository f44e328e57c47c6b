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
from sparsebench.planning.expected import Expected
from sparsebench.planning.job import Job
from sparsebench.planning.remaining import UNKNOWN, Estimate, Remaining
from sparsebench.records import files
from sparsebench.records.record import Record

EVERY = 2.0
"""Seconds between two writings."""
SILENT = 60.0
"""Seconds after which a run that has written nothing is held for dead."""


class Cells(BaseModel):
    """Some cells of one strategy.

    Attributes:
        network: whether they test a network that is trained once for all of them.
        since: when they were begun, in seconds since 1970; 0 if they are not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    n: int
    network: bool = False
    since: float = 0.0


class Underway(BaseModel):
    """The file.

    Attributes:
        updated: when it was written, in seconds since 1970.
        left: cells without a record, those that are run included.
        running: cells that are run.
        done: how much of these is done, in cells.
        estimate: how long what is left takes, from the folder's records and since when cells are run.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    workers: int
    updated: float
    left: tuple[Cells, ...]
    running: tuple[Cells, ...]
    done: float = 0.0
    estimate: Estimate = UNKNOWN

    @property
    def alive(self) -> bool:
        """Whether it was written lately, and, on this machine, by a process that is still there."""
        there = self.host != socket.gethostname() or _is_there(self.pid)
        return there and time.time() - self.updated < SILENT


class Beat:
    """Keeps the file of a run up to date in a thread of its own, and removes it when the run is over.

    Args:
        out: the run's folder.
        jobs: what the run is to do.
        workers: its worker processes.
        expected: what cells are expected to take; it learns from the run's records.
    """

    def __init__(self, out: Path, jobs: Sequence[Job], workers: int, expected: Expected):
        self.workers, self.path = workers, path_of(out)
        self.out = out
        self.remaining = Remaining(jobs, expected)
        self.lock, self.over = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._write_on, daemon=True)

    def begin(self, cell_ids: Sequence[str], share: float = 0.0, /) -> None:
        """Take note of cells that something begins for, or of the share of its training that is done of one."""
        with self.lock:
            for cell_id in cell_ids:
                self.remaining.begin(cell_id, time.time(), share)

    def done(self, record: Record) -> None:
        """Take note of a record."""
        with self.lock:
            self.remaining.done(record)

    def __enter__(self) -> Beat:
        clear(self.out)
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
                files.write_whole(self.path, self._now().model_dump_json().encode())
            if self.over.wait(EVERY):
                return

    def _now(self) -> Underway:
        now = time.time()
        with self.lock:
            jobs, running = self.remaining.jobs, self.remaining.running
            counts = Counter((job.label, bool(job.network)) for job in jobs.values())
            at = [(jobs[cell_id].label, bool(jobs[cell_id].network), since) for cell_id, since in running.items()]
            estimate, done = self.remaining.estimate(self.workers, now), self.remaining.share(self.workers, now)
        return Underway(
            host=socket.gethostname(), pid=os.getpid(), workers=self.workers, updated=now, estimate=estimate, done=done,
            left=tuple(Cells(label=label, network=network, n=n) for (label, network), n in counts.items()),
            running=tuple(Cells(label=label, network=network, n=1, since=since) for label, network, since in at),
        )  # fmt: skip


def path_of(out: Path) -> Path:
    """Return where this process says how far it is with a run of a folder."""
    return out / "underway" / f"{socket.gethostname()}-{os.getpid()}.json"


def read(path: Path) -> Underway | None:
    """Return what a file says; None if it is not there or cannot be read."""
    with suppress(OSError, ValueError):
        return Underway.model_validate_json(path.read_bytes())
    return None


def underway(out: Path) -> list[Underway]:
    """Return what the runs of a folder say of themselves; one that was killed is silent and not alive."""
    return [state for _, state in _files(out / "underway")]


def clear(out: Path) -> None:
    """Remove what runs of a folder have left that were killed: who runs there now goes on with their cells."""
    for path, run in _files(out / "underway"):
        if not run.alive:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # others are under way, or there is none
        (out / "underway").rmdir()


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return pid > 0


def _files(folder: Path) -> list[tuple[Path, Underway]]:
    return [(path, run) for path in files.files_in(folder, ".json") if (run := read(path)) is not None]
