"""What a cluster's machine does: cells in supervised worker processes there, asked for and answered in JSON.

Nothing here imports Dask but to ask whether an answer is still wanted.
"""

from __future__ import annotations

import base64
import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from sparsebench.contain.messages import load
from sparsebench.engine.messages import Question
from sparsebench.engine.processes import LOOK, Supervisor, log_of
from sparsebench.engine.setting import OnBegin, Setting
from sparsebench.engine.slots import slots
from sparsebench.errors import UserError
from sparsebench.planning.job import Job
from sparsebench.plugin.content import file_hash
from sparsebench.plugin.installed import entries
from sparsebench.records import environment, files
from sparsebench.records.origin import Origin
from sparsebench.records.record import Record
from sparsebench.version import __version__

GPU = "GPU"
"""What a Dask worker's resources call its GPUs: `dask worker --resources GPU=1`."""
IDLE = 30.0
"""Seconds after which a worker process that was given nothing more is ended."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Model):
    """A plugin file, as the run has it.

    Attributes:
        sha256: of the file and what it imports from beside it.
        name: of the file.
        files: what they hold, in base64, by name.
    """

    sha256: str
    name: str
    files: dict[str, str]


class Sent(_Model):
    """What all cells of a run have in common, for other machines.

    Attributes:
        setting: paths are those of the run's machine; image sets lie there on every machine.
        version: of sparsebench.
        proof: a file in the run's folder whose name nobody else knows: who sees it sees the folder.
        must_share: whether cells start from weights that lie in the folder.
        files: the plugin files by path.
    """

    setting: Setting
    version: str
    proof: str
    must_share: bool
    files: dict[str, Source]


class Answer(_Model):
    """What became of them.

    Attributes:
        refused: why this machine must not run them, or "".
        note: what the run should say once.
        environment: machine and libraries here.
    """

    records: tuple[Record, ...] = ()
    refused: str = ""
    note: str = ""
    environment: dict[str, str] = {}


def answer(setting: str, question: str) -> str:
    """Run cells and return their records; runs in a thread of a Dask worker, of which it needs nothing but its name.

    Each cell is in a worker process of its own kind, as in the local engine: what a strategy does costs its cell, and
    not the Dask worker. It is ended when nobody wants the answer any more: the run was stopped, or is gone.
    """
    from distributed import get_worker

    dask = get_worker()
    task = dask.get_current_task()

    def is_wanted() -> bool:
        state = dask.state.tasks.get(task)
        return state is not None and state.state == "executing"

    def begins(cells: Sequence[str], share: float = 0.0, /) -> None:
        if cells and not share:
            dask.log_event(topic(setting), {"task": task, "cells": list(cells)})

    dask.log_event(topic(setting), {"task": task, "cells": []})
    jobs = load(Question, question).jobs
    try:
        with _PLACING:
            gpus = int(dask.state.total_resources.get(GPU, 0))
            place = _place(setting, dask.local_directory, dask.state.nthreads, gpus)
        place.check(jobs)
        return place.answer(jobs, is_wanted, begins).model_dump_json()
    except UserError as error:
        return Answer(refused=f"worker {dask.address} on {socket.gethostname()}: {error}").model_dump_json()


def topic(setting: str) -> str:
    """Return the name under which workers tell a run which cells they begin."""
    return f"sparsebench-{hashlib.sha256(setting.encode()).hexdigest()[:16]}"


_PLACING = threading.Lock()


@lru_cache(maxsize=8)
def _place(setting: str, folder: str, threads: int, gpus: int) -> _Place:
    return _Place(load(Sent, setting), Path(folder), threads, gpus)


class _Idle(NamedTuple):
    """A supervisor that waits for more, until a timer ends it, and the data that its worker has."""

    supervisor: Supervisor
    timer: threading.Timer
    draw: str


class _Place:
    """One run on this machine: where its files are, and the worker processes that wait for more of its cells."""

    def __init__(self, sent: Sent, folder: Path, threads: int, gpus: int):
        if sent.version != __version__:
            raise UserError("another sparsebench", got=__version__, allowed=sent.version)
        setting, self.lock = sent.setting, threading.Lock()
        self.run, self.shared = setting.out, (setting.out / sent.proof).is_file()
        if sent.must_share and not self.shared:
            raise UserError(
                f"cells start from weights in {setting.out}, which this machine does not see",
                next_step="give an --out that all machines share",
            )
        for name, path in setting.locations.items():
            if not path.exists():
                raise UserError(f"the images '{name}' are not on this machine", got=str(path))
        self.out = setting.out if self.shared else folder / sent.proof
        self.setting = setting.model_copy(update={"out": self.out})
        self.files = {path: _at_hand(Path(path), source, folder) for path, source in sent.files.items()}
        self.free = slots(setting.device, threads if setting.device == "cpu" else gpus, gpus)
        self.idle: list[_Idle] = []

    def check(self, jobs: Sequence[Job]) -> None:
        """Raise UserError if a strategy is another one here."""
        for origin in {job.origin for job in jobs if job.failure is None}:
            if problem := _differs(origin):
                raise UserError(problem)

    def answer(self, jobs: Sequence[Job], is_wanted: Callable[[], bool], begins: OnBegin) -> Answer:
        """Return the records."""
        supervisor = self._take(jobs[0].cell.draw)
        supervisor.on_begin = begins
        with _ended_when(lambda: not is_wanted(), supervisor):
            try:
                records = tuple(record for _, record in supervisor.records([self._local(job) for job in jobs]))
            except BaseException:
                supervisor.kill()
                raise
            finally:
                self._put(supervisor, jobs[-1].cell.draw)
        note = "" if self.shared else f"{socket.gethostname()} does not see {self.run}: checkpoints stay there"
        return Answer(records=records, note=note, environment=environment.describe())

    def _local(self, job: Job) -> Job:
        return job.model_copy(update={"files": tuple(str(self.files[path]) for path in job.files)})

    def _take(self, draw: str) -> Supervisor:
        """Return a supervisor that waits, one whose worker has that data if there is one, or a new one."""
        with self.lock:
            if self.idle:
                has = next((i for i, waiting in enumerate(self.idle) if waiting.draw == draw), -1)
                waiting = self.idle.pop(has)
                waiting.timer.cancel()
                return waiting.supervisor
            slot = self.free.pop(0)
        log = log_of(self.out, f"{socket.gethostname()}-{os.getpid()}-{slot.number}")
        return Supervisor(self.setting, slot, log)

    def _put(self, supervisor: Supervisor, draw: str) -> None:
        """Let a supervisor wait for a while, unless it was killed."""
        if supervisor.stopped:
            supervisor.end()
            with self.lock:
                self.free.append(supervisor.slot)
            return
        timer = threading.Timer(IDLE, self._retire, (supervisor,))
        timer.daemon = True
        with self.lock:
            self.idle.append(_Idle(supervisor, timer, draw))
        timer.start()

    def _retire(self, supervisor: Supervisor) -> None:
        with self.lock:
            waiting = [idle.supervisor for idle in self.idle]
            if supervisor not in waiting:
                return
            self.idle.pop(waiting.index(supervisor))
            self.free.append(supervisor.slot)
        supervisor.end()


@contextmanager
def _ended_when(unwanted: Callable[[], bool], supervisor: Supervisor) -> Iterator[None]:
    """Kill what a supervisor runs as soon as it is unwanted."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK):
            if unwanted():
                supervisor.kill()
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _at_hand(path: Path, source: Source, folder: Path) -> Path:
    """Return where a plugin file lies on this machine: where it does for the run, or written anew."""
    if path.is_file():
        if file_hash(path) != source.sha256:
            raise UserError(f"plugin file {path} is another one here", next_step="bring it to what the run has")
        return path
    place = folder / source.sha256[:16]
    for name, text in source.files.items():
        files.write_whole(place / name, base64.b64decode(text))
    if file_hash(place / source.name) != source.sha256:
        raise UserError(f"plugin file {path.name} did not arrive as it was sent")
    return place / source.name


@cache
def _differs(origin: Origin) -> str:
    """Return how the installed plugin of that name differs here, without importing it, or ""."""
    if not origin.distribution:
        return ""
    try:
        version = metadata.version(origin.distribution)
    except metadata.PackageNotFoundError:
        return f"{origin.distribution} {origin.version} is not installed"
    if version != origin.version:
        return f"another {origin.distribution}: got {version}; allowed: {origin.version}"
    return "" if origin.plugin in entries() else f"{origin.distribution} {version} has no plugin '{origin.plugin}'"
