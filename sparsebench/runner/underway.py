"""What a run says of itself in its folder: to `sparsebench status` how far it is, to other runs what it has begun."""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.plan.job import Job
from sparsebench.plan.time_left import Remaining
from sparsebench.records import store
from sparsebench.records.record import Head, Record

EVERY = 1.0
"""Seconds between two writings."""
SILENT = 60.0
"""Seconds after which a run that has written nothing is held for dead."""


class Underway(BaseModel):
    """The file.

    Attributes:
        updated: when it was written, in seconds since 1970; `since` when the longest cell at work was begun.
        left, running: by strategy the number of cells without a record, those that are run included; of cells that run.
        done: how much of the cells that run is done, in cells.
        seconds: how long what is left takes; None while nothing says so.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    workers: int
    updated: float
    since: float
    left: dict[str, int]
    running: dict[str, int] = {}
    done: float = 0.0
    seconds: float | None = None

    @property
    def alive(self) -> bool:
        """Whether it was written lately, and, on this machine, by a process that is still there."""
        there = self.host != socket.gethostname() or _is_there(self.pid)
        return there and time.time() - self.updated < SILENT


class Beat:
    """Keeps the file of a run up to date in a thread of its own, and removes it when the run is over.

    Args:
        out: the run's folder.
        remaining: the cells that the run has still to do.
        workers: its worker processes.
        tell: called with what was written.
    """

    def __init__(
        self, out: Path, remaining: Remaining, workers: int, tell: Callable[[Underway], None] = lambda now: None
    ):
        self.out, self.remaining, self.workers, self.tell = out, remaining, workers, tell
        self.path = out / "underway" / f"{socket.gethostname()}-{os.getpid()}.json"
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._write_on, daemon=True)

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
            now = self._now()
            with suppress(UserError):  # the run itself will say that the folder cannot be written
                files.write_whole(self.path, now.model_dump_json().encode())
            self.tell(now)
            if self.over.wait(EVERY):
                return

    def _now(self) -> Underway:
        now = time.time()
        with self.remaining.lock:
            jobs, running = self.remaining.jobs, self.remaining.running
            return Underway(
                host=socket.gethostname(), pid=os.getpid(), workers=self.workers, updated=now,
                since=min((since for since, _ in running.values()), default=now),
                left=Counter(job.label for job in jobs.values()),
                running=Counter(jobs[cell_id].label for cell_id in running),
                done=self.remaining.share(self.workers, now), seconds=self.remaining.seconds(self.workers, now),
            )  # fmt: skip


LOCKS = ".cells.lock"
"""The file in a run's folder of whose bytes each is the lock of a cell."""


class CellLocks:
    """The cells that a run has begun, which other runs of its folder on this machine leave to it.

    A cell is a byte of a file, locked by its run: the system lets go of locks with a process, however it ends. Where
    the file cannot be written, or the file system has no locks, every run begins every cell.

    Args:
        out: the run's folder.
        known: what the store had of every cell when the run was planned.
        on_done: called with the id of a cell that another run has done since.
    """

    def __init__(self, out: Path, known: Mapping[str, Head], on_done: Callable[[str], None] = lambda cell_id: None):
        self.out, self.known, self.on_done = out, known, on_done
        self.done, self.new = set[str](), dict[str, Head | Record]()
        self.sealed: list[Path] | None = None
        self.read = Counter[Path]()
        self.file: int | None = None
        with suppress(OSError):
            self.file = os.open(out / LOCKS, os.O_RDWR | os.O_CREAT, 0o666)

    def begin(self, cell_id: str) -> bool:
        """Say whether no other run is at a cell; none is to begin it from now on."""
        if self.file is None:
            return True
        try:
            fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(cell_id))
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # the file system has no locks
            self.file = None
        return True

    def release(self, cell_id: str) -> None:
        """Let others have a cell."""
        if self.file is not None:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, _place(cell_id))

    def is_done(self, job: Job) -> bool:
        """Say whether another run has stored an answer to a cell, of the same revision, since this one was planned."""
        self._read_on()
        head, known = self.new.get(job.cell.id), self.known.get(job.cell.id)
        if head is None or head.status == "skipped" or head.origin.identity != job.origin.identity:
            return False
        if known is not None and known.started == head.started:
            return False
        self.done.add(job.cell.id)
        self.on_done(job.cell.id)
        return True

    def _read_on(self) -> None:
        """Read what others have stored since: all heads at first and once a run has sealed its records, and lines."""
        others = [path for path in store.segments(self.out) if store.by_this_process() not in path.name]
        if (sealed := store.sealed(self.out)) != self.sealed and (sealed or others):
            self.sealed = sealed
            self.new |= store.heads(self.out)
        for path in others:
            with suppress(FileNotFoundError), path.open("rb") as file:  # it was sealed meanwhile
                file.seek(self.read[path])
                for line in (line for line in file if line.endswith(b"\n")):
                    self.read[path] += len(line)
                    with suppress(ValueError):
                        record = store.parse(line)
                        self.new[record.cell_id] = record

    def __enter__(self) -> CellLocks:
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            os.close(self.file)


def _place(cell_id: str) -> int:
    return int.from_bytes(hashlib.sha256(cell_id.encode()).digest()[:7])


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
    found = []
    for path in files.files_in(folder, ".json"):
        with suppress(OSError, ValueError):  # it is gone, or torn
            found.append((path, Underway.model_validate_json(path.read_bytes())))
    return found
