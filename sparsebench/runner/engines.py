"""Which cells come next, and the engines that run them and yield their records: in this process or in workers of it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from sparsebench.errors import UserError
from sparsebench.plan.request import GIB, Job, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Head, Record
from sparsebench.runner.devices import first_of, places
from sparsebench.runner.process import START, Message, OnBegin, Worker, descendants, exit_text, memory_over, server

log = logging.getLogger(__name__)

LOOK = 0.25
"""Seconds between looks at a worker that says nothing, and at cells that other runs are at."""
PATIENCE = 5.0
"""Seconds that a worker may take to leave once it has closed its line."""
TRIES = 3
"""Workers in a row that may fail to start."""
TOGETHER = 1000
"""Cells given to a worker on a GPU at once; it trains as many at a time as its memory holds."""
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that others send, as the kernel does that lacks memory, and not the code of a cell."""
KILLED = "killed"
"""The kind of a failure by such a signal."""
LOCKS = ".cells.lock"
"""The file in a run's folder of whose bytes each is the lock of a cell."""


class CellLocks:
    """The cells that a run has begun, which other runs of its folder on this machine leave to it.

    A cell is a byte of a file, locked by its run: the system lets go of locks with a process, however it ends. Where
    the file cannot be written, or the file system has no locks, every run begins every cell.

    Args:
        out: the run's folder.
        heads: what the store had of every cell when the run was planned.
        on_done: called with the id of a cell that another run has done since.
    """

    def __init__(self, out: Path, heads: Mapping[str, Head], on_done: Callable[[str], None] = lambda cell_id: None):
        self.out, self.heads, self.on_done = out, heads, on_done
        self.now, self.sealed = heads, list[Path]()
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
        """Say whether another run has stored an answer to a cell, of the same revision, since this one was planned.

        The store is read anew where a living run names the cell, or others have sealed their records.
        """
        name = f'"cell_id":"{job.cell.id}"'.encode()
        others = [path for path in store.segments(self.out) if store.process_tag() not in path.name]
        sealed = store.sealed_files(self.out)  # after the others, of which one may be sealed now
        if sealed != self.sealed or any(_holds(path, name) for path in others):
            self.sealed, self.now = sealed, store.heads(self.out)
        head, old = self.now.get(job.cell.id), self.heads.get(job.cell.id)
        if head is None or not job.is_answered_by(head) or (old is not None and old.started == head.started):
            return False
        self.on_done(job.cell.id)
        return True

    def close(self) -> None:
        """Let others have all cells."""
        if self.file is not None:
            os.close(self.file)


def _holds(path: Path, content: bytes) -> bool:
    try:
        return content in path.read_bytes()
    except FileNotFoundError:  # it was sealed meanwhile
        return True


def _place(cell_id: str) -> int:
    return int.from_bytes(hashlib.sha256(cell_id.encode()).digest()[:7])


class Queue:
    """Jobs in order, each handed out once the one that it starts from is done; some several at a time.

    Args:
        jobs: in the order in which they are begun.
        most: how many are handed out at once, of those that can be trained together.
        locks: which of them other runs are at: those are waited for last, and left out once they are done.
        begin: told, maybe in other threads, of cells.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        most: int = 1,
        locks: CellLocks | None = None,
        begin: OnBegin = lambda cells, share: None,
    ):
        self.most, self.locks, self.begin = most, locks, begin
        self.left = {job.cell.id: job for job in jobs}
        self.open, self.elsewhere, self.closed = set(self.left), set[str](), False
        self.changed = threading.Condition()

    def take(self, wait: bool = True) -> list[Job] | None:
        """Return the next batch; None when there is none left, or, unless one is waited for, none that may start."""
        with self.changed:
            while self.left and not self.closed:
                if batch := self._next():
                    if jobs := self._claim(batch):
                        return jobs
                elif wait:
                    self.changed.wait(LOOK if self.elsewhere else None)
                    self.elsewhere.clear()
                else:
                    return None
            return None

    def _next(self) -> list[Job]:
        """Take out the next batch, if any may start."""
        left = self.left.items()
        ready = (job for id_, job in left if job.after not in self.open and id_ not in self.elsewhere)
        batch = list(islice(ready, 1))
        if batch and batch[0].together:
            batch += islice((job for job in ready if job.together and job.code == batch[0].code), self.most - 1)
        for job in batch:
            del self.left[job.cell.id]
        return batch

    def _claim(self, batch: list[Job]) -> list[Job]:
        """Return the jobs of a batch that no other run is at or has done; those that one is at are the last now."""
        if self.locks is None:
            return batch
        jobs = []
        for job in batch:
            if not self.locks.begin(job.cell.id):
                self.elsewhere.add(job.cell.id)
                self.left[job.cell.id] = job
            elif self.locks.is_done(job):
                self.locks.release(job.cell.id)
                self.done(job)
            else:
                jobs.append(job)
        return jobs

    def done(self, job: Job) -> None:
        """Take note that a job has its record."""
        with self.changed:
            self.open.discard(job.cell.id)
            self.changed.notify_all()

    def close(self) -> None:
        """Hand out no more."""
        self.closed = True
        with self.changed:
            self.changed.notify_all()


@contextmanager
def first_interrupt(on_first: Callable[[], None]) -> Iterator[None]:
    """For a while have the first SIGINT call a function, in its handler, and later ones do what they did before.

    Only where SIGINT raises KeyboardInterrupt so far: in the main thread, and if nobody else handles it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        on_first()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


Engine = Callable[[Queue, Setting], Generator[Record, None, None]]
"""Runs cells, wherever that is, and yields the record of each job of a queue as it comes.

It tells the queue of each job that begins and of each that has its record. Once the queue is closed it yields the
records of those that are under way, and ends. The setting is what the jobs have in common. It raises UserError where
cells cannot be run.
"""


def in_process(registry: Registry, queue: Queue, setting: Setting) -> Generator[Record, None, None]:
    """Run one job after the other in this process, with strategies of the registry; see `Engine`."""
    from sparsebench.runner.prepare import Context
    from sparsebench.runner.run_cell import one_thread, run_cells

    setting = replace(setting, device=first_of(setting.device))
    with one_thread():
        context = Context(setting, begin=queue.begin)
        while batch := queue.take():
            for job, record in zip(batch, run_cells(batch, registry, context), strict=True):
                yield record
                queue.done(job)


def in_workers(workers: int, queue: Queue, setting: Setting) -> Generator[Record, None, None]:
    """Run jobs in so many worker processes, of one thread each; see `Engine`.

    A cell that goes over a limit, or whose worker dies, has a record that says `timeout`, `oom` or `crashed`. The next
    cell has a fresh worker then. Workers, and what they have started, end with this process, however it ends.
    """
    records: SimpleQueue[Record | None] = SimpleQueue()
    supervisors = [
        Supervisor(setting, str(number), place, queue.begin)
        for number, place in enumerate(places(setting.device, workers))
    ]
    with ThreadPoolExecutor(workers) as pool:
        served = [pool.submit(supervisor.serve, queue, records) for supervisor in supervisors]
        try:
            for _ in served:
                while (record := records.get()) is not None:
                    yield record
        finally:
            queue.close()
            for supervisor in supervisors:
                supervisor.kill()
    for future in served:
        future.result()  # raises what went wrong


class Supervisor:
    """Gives cells to one worker after another, and ends those that go over a limit or are unfit.

    A strategy that does not come with sparsebench has workers of its own: what it changes of a process no other meets.
    Other code than the last needs another worker.

    Args:
        setting: what the cells have in common.
        name: of the file in the run's folder to which what the workers print is added.
        place: their own variables, see `places`; those of one on a GPU say which.
        on_begin: told of cells.
    """

    def __init__(self, setting: Setting, name: str, place: Mapping[str, str], on_begin: OnBegin):
        self.setting = replace(setting, device="cuda:0" if place else "cpu")
        self.timeout, self.memory = setting.execution.limits()
        self.log, self.place, self.on_begin = setting.out / "logs" / f"worker-{name}.log", place, on_begin
        self.server = server()
        self.worker: Worker | None = None
        self.code: tuple[str, ...] = ()
        self.stopped = False
        self._note_cells(())

    def _note_cells(self, cells: Sequence[str]) -> None:
        """Take note of the ids of cells that the worker is at from now on."""
        self.cells, self.started, self.clock = cells, datetime.now(UTC), time.monotonic()

    def serve(self, queue: Queue, records: SimpleQueue[Record | None]) -> None:
        """Work through a queue, which is closed where something goes wrong; at the end hand on None."""
        try:
            while not self.stopped and (batch := queue.take()) is not None:
                for job, record in self.records(batch):
                    records.put(record)
                    queue.done(job)
        except BaseException:
            queue.close()
            raise
        finally:
            self.end()
            records.put(None)

    def records(self, batch: list[Job]) -> Iterator[tuple[Job, Record]]:
        """Yield the record of each job, unless it is killed.

        If it does not go well with a worker, the cell that it was at has a record that says so, and what is left of
        the batch is given to the next one. If it was at several, nobody knows whose fault it is: each is given alone.
        If it was killed, whoever did so, the cell is first given once more.
        """
        left, alone, again = {job.cell.id: job for job in batch}, False, set[str]()
        while left and not self.stopped:
            jobs = list(left.values())[: 1 if alone else None]
            failure = yield from self._ask(jobs, left)
            if failure is None or self.stopped:
                continue
            current = [job for job in jobs if job.cell.id in left and (job.cell.id in self.cells or not self.cells)]
            alone = alone or len(current) > 1
            if len(current) != 1:
                continue
            (job,) = current
            if failure.kind == KILLED and job.cell.id not in again:
                log.warning("%s of %s: %s; it is tried once more", job.cell.id, job.label, failure.reason)
                again.add(job.cell.id)
                continue
            status: Any = "crashed" if failure.kind == KILLED else failure.kind
            failure = failure.model_copy(update={"kind": status})
            seconds = time.monotonic() - self.clock
            yield left.pop(job.cell.id), job.record_of_failure(status, failure, self.started.isoformat(), seconds)

    def _ask(self, jobs: list[Job], left: dict[str, Job]) -> Generator[tuple[Job, Record], None, Failure | None]:
        """Yield a worker's records of jobs, which are left no more; return how it came to an end with it, if it did."""
        if (worker := self._start(jobs[0].code)) is None:
            return None
        self._note_cells(())
        worker.ask(jobs)
        while any(job.cell.id in left for job in jobs):
            event = self._hear(worker, left)
            if event is None:
                continue
            if isinstance(event, Failure):
                self.end()
                return event
            if event.record is not None:
                yield left.pop(event.record.cell_id), event.record
            self.on_begin(event.at, event.share)
            if not event.share:
                self._note_cells(event.at)
            if event.unfit:
                self.end()
                return None
        return None

    def _hear(self, worker: Worker, left: dict[str, Job]) -> Message | Failure | None:
        """Return the worker's next message, or how it ends here, or None if there is nothing to say yet."""
        try:
            message = worker.answer(LOOK, Message)
            if message is not None and message.record is not None and message.record.cell_id not in left:
                raise ValueError("it is about another cell")
        except EOFError:
            code = worker.end(PATIENCE)
            kind = KILLED if -code in KILLS else "crashed"
            return Failure(reason=f"the worker {exit_text(code)}", kind=kind, traceback=worker.last_words())
        except ValueError as error:
            reason = f"the worker's answer cannot be read: {error}"
            return Failure(reason=reason, kind="crashed", traceback=worker.last_words())
        if message is not None:
            return message
        if 0 < self.timeout < (seconds := time.monotonic() - self.clock):
            reason = f"no result after {seconds:.1f} s, with --timeout {self.timeout:g}"
            return Failure(reason=reason, kind="timeout", traceback=worker.last_words())
        if self.memory and (size := memory_over([worker.pid, *descendants(worker.pid)], self.memory)):
            limit = f"over the --memory-limit of {self.memory / GIB:.2f} GiB"
            return Failure(reason=f"its processes held {size / GIB:.2f} GiB, {limit}", kind="oom")
        return None

    def _start(self, code: tuple[str, ...]) -> Worker | None:
        """Return a worker that waits for cells with that code, or None if the run is stopped."""
        if self.worker is not None and self.code == code:
            return self.worker
        for _ in range(TRIES):
            self.end()
            with suppress(EOFError, ValueError):
                self.worker, self.code = self.server.start("sparsebench.runner.run_cell", self.place, self.log), code
                if self.stopped:  # by `kill`, which has not seen it
                    self.worker.cut()
                self.worker.ask(self.setting)
                if self.worker.answer(START, Message) is not None:
                    return self.worker
            if self.stopped:
                return None
        raise UserError(f"{TRIES} workers in a row did not start; {self.log} says why")

    def end(self) -> None:
        """End the worker, if there is one."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None

    def kill(self) -> None:
        """End the worker and all it started, at once, and start none; another thread may say so."""
        self.stopped = True
        if (worker := self.worker) is not None:
            worker.cut()
