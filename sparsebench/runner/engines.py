"""The queue of cells, and the engines that run them in this process or in worker processes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
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

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import GIB
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record, RecordSummary
from sparsebench.records.store import Store
from sparsebench.runner.devices import first_of, places
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.process import (
    START_SECONDS,
    Message,
    OnBegin,
    Worker,
    descendants,
    exit_text,
    memory_over,
    server,
    why_not,
)

log = logging.getLogger(__name__)

CHECK_INTERVAL = 0.25
"""Seconds between two checks of a worker that sends no message, and of cells that other runs compute."""
EXIT_SECONDS = 5.0
"""Seconds that a worker has to exit after it closed its line."""
START_ATTEMPTS = 3
"""Number of workers in a row that may fail to start."""
LARGEST_BATCH = 1000
"""Most cells in a batch for a worker on a GPU. The worker trains as many at a time as fit in memory."""
KILL_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)
)  # Windows lacks two of them
"""Signals that come from outside a cell's code, e.g. from the kernel if memory is short."""
KILLED = "killed"
"""The kind of a failure by one of these signals."""
LOCK_FILE = ".cells.lock"
"""The lock file in a run's folder. Each cell is locked by one byte of it."""


class CellLocks:
    """Locks of cells, so that two runs with the same folder on one machine do not compute the same cell.

    A run locks one byte of a file for each cell that it begins. The system releases the locks of a process, however it
    ends. If the file cannot be written, or the file system has no locks, each run computes all cells.

    Args:
        folder: the run's folder.
        summaries: the stored summaries by cell id when the run was planned.
        on_done: called with the id of a cell that another run has finished since then.
    """

    def __init__(
        self,
        folder: Path | Store,
        summaries: Mapping[str, RecordSummary],
        on_done: Callable[[str], None] = lambda cell_id: None,
    ):
        self.opened, self.summaries, self.on_done = Store.open(folder), summaries, on_done
        self.out = self.opened.path
        self.now, self.sealed = summaries, list[Path]()
        self.ends, self.stored = dict[Path, int](), set[str]()  # what was read of other runs' segments
        self.file: int | None = None
        with suppress(OSError):
            self.file = os.open(self.out / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)

    def begin(self, cell_id: str) -> bool:
        """Lock a cell; return False if another run computes it."""
        if self.file is None:
            return True
        try:
            files.lock_byte(self.file, _place(cell_id))
        except BlockingIOError:
            return False
        except OSError:  # the file system has no locks
            self.close()
        return True

    def release(self, cell_id: str) -> None:
        """Unlock a cell."""
        if self.file is not None:
            files.unlock_byte(self.file, _place(cell_id))

    def is_done(self, job: Job) -> bool:
        """Return whether another run has stored a record that answers a job since this run was planned.

        The store is read again if an unsealed file of another run names the cell, or if another run has sealed its
        records since the last call. Of an unsealed file only what is new since the last call is read.
        """
        for path in store.segments(self.out):
            if store.process_tag() not in path.name:
                self._read(path)
        sealed = store.sealed_files(self.out)  # listed after the segments, as one may be sealed meanwhile
        if sealed != self.sealed or job.cell.id in self.stored:
            self.opened.refresh()
            self.sealed, self.now = sealed, self.opened.summaries()
        summary, old = self.now.get(job.cell.id), self.summaries.get(job.cell.id)
        if summary is None or not job.is_answered_by(summary) or (old is not None and old.started == summary.started):
            return False
        self.on_done(job.cell.id)
        return True

    def _read(self, path: Path) -> None:
        """Note the cells of the new lines of a segment."""
        with suppress(FileNotFoundError), path.open("rb") as file:  # it may be sealed meanwhile
            file.seek(self.ends.get(path, 0))
            lines = file.read().rpartition(b"\n")[0]
            self.ends[path] = self.ends.get(path, 0) + len(lines)
            self.stored |= {name.decode() for name in re.findall(rb'"cell_id":"(\w+)"', lines)}

    def close(self) -> None:
        """Unlock all cells."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def _place(cell_id: str) -> int:
    return int.from_bytes(hashlib.sha256(cell_id.encode()).digest()[:7])


class Queue:
    """Jobs in order. A job is taken only after the job that it starts from, if any, is done.

    Args:
        jobs: the jobs in the order in which they begin.
        most: the largest batch of jobs that can be trained together. Other jobs are taken one by one.
        locks: locks of cells. Jobs that another run computes come last, and are left out once that run has stored them.
        begin: called with the cells that begin and with progress; maybe in other threads.
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
        """Return the next batch, or None if no job is left. Without `wait`, also None if no job may start yet."""
        with self.changed:
            while self.left and not self.closed:
                if batch := self._next():
                    if jobs := self._claim(batch):
                        return jobs
                elif wait:
                    self.changed.wait(CHECK_INTERVAL if self.elsewhere else None)
                    self.elsewhere.clear()
                else:
                    return None
            return None

    def _next(self) -> list[Job]:
        """Remove and return the next batch; it is empty if no job may start."""
        left = self.left.items()
        ready = (job for id_, job in left if job.after not in self.open and id_ not in self.elsewhere)
        batch = list(islice(ready, 1))
        if batch and batch[0].together:
            batch += islice((job for job in ready if job.together and job.code == batch[0].code), self.most - 1)
        for job in batch:
            del self.left[job.cell.id]
        return batch

    def _claim(self, batch: list[Job]) -> list[Job]:
        """Return the jobs of a batch that no other run computes or has done. Jobs that another run computes go last."""
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
        """Note that a job has its record."""
        with self.changed:
            self.open.discard(job.cell.id)
            self.changed.notify_all()

    def close(self) -> None:
        """Give out no more jobs."""
        self.closed = True
        with self.changed:
            self.changed.notify_all()


@contextmanager
def first_interrupt(on_first: Callable[[], None]) -> Iterator[None]:
    """Let the first SIGINT in this context call `on_first` in the signal handler; later ones raise KeyboardInterrupt.

    This changes nothing in other threads than the main thread, or if SIGINT already has a handler of its own.
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


Engine = Callable[[Queue, RunEnvironment], Generator[Record, None, None]]
"""Runs the jobs of a queue and yields each record as soon as it is complete.

An engine calls `Queue.begin` for each job that begins and `Queue.done` for each job that has its record. Once the queue
is closed, the engine yields the records of the jobs that have begun, and ends. It raises UserError if cells cannot be
run.
"""


def in_process(registry: Registry, queue: Queue, environment: RunEnvironment) -> Generator[Record, None, None]:
    """Run one job after another in this process, with strategies of the registry; see `Engine`."""
    from sparsebench.runner.prepare import Context
    from sparsebench.runner.run_cell import one_thread, run_cells

    environment = replace(environment, device=first_of(environment.device))
    with one_thread():
        context = Context(environment, begin=queue.begin)
        while batch := queue.take():
            for job, record in zip(batch, run_cells(batch, registry, context), strict=True):
                yield record
                queue.done(job)


def in_workers(workers: int, queue: Queue, environment: RunEnvironment) -> Generator[Record, None, None]:
    """Run jobs in worker processes of one thread each; see `Engine`.

    A cell that exceeds a limit, or whose worker dies, gets a record of status `timeout`, `oom` or `crashed`, and the
    next cell a fresh worker. Workers and all their processes end with this process, however it ends.
    """
    records: SimpleQueue[Record | None] = SimpleQueue()
    supervisors = [
        Supervisor(environment, str(number), place, queue.begin)
        for number, place in enumerate(places(environment.device, workers))
    ]
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(supervisor.serve, queue, records) for supervisor in supervisors]
        try:
            for _ in futures:
                while (record := records.get()) is not None:
                    yield record
        finally:
            queue.close()
            for supervisor in supervisors:
                supervisor.kill()
    for future in futures:
        future.result()  # raises the error of its thread, if any


class Supervisor:
    """Runs cells in one worker at a time, and replaces workers that exceed a limit or cannot take another cell.

    A worker runs cells of the same third-party code only, so no strategy meets what another strategy has changed in its
    process. A cell with other code gets a new worker.

    Args:
        environment: the environment of the run.
        name: names the log file of the workers in the run's folder.
        place: environment variables of these workers only, see `places`; on a GPU they name the GPU.
        on_begin: called with the cells that begin and with progress.
    """

    def __init__(self, environment: RunEnvironment, name: str, place: Mapping[str, str], on_begin: OnBegin):
        self.environment = replace(environment, device="cuda:0" if place else "cpu")
        self.timeout, self.memory = environment.execution.limits()
        self.log, self.place, self.on_begin = environment.out / "logs" / f"worker-{name}.log", place, on_begin
        self.server = server()
        self.worker: Worker | None = None
        self.code: tuple[str, ...] = ()
        self.stopped = False
        self._note_cells(())

    def _note_cells(self, cells: Sequence[str]) -> None:
        self.cells, self.started, self.clock = cells, datetime.now(UTC), time.monotonic()

    def serve(self, queue: Queue, records: SimpleQueue[Record | None]) -> None:
        """Run the jobs of a queue; put their records, and None at the end. An error closes the queue."""
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
        """Yield each job with its record, until `kill` is called.

        If a worker fails, the cell that it was computing gets a record of the failure, and the next worker gets the
        rest of the batch. If the worker was computing several cells, the one at fault is unknown, so the next workers
        get one cell each. If a worker was killed from outside, its cell is tried once more first.
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
        """Yield a worker's records of jobs, removing these from `left`; return the failure of the worker, if any."""
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
        """Return the worker's next message or its failure, or None if it has sent nothing and exceeds no limit."""
        try:
            message = worker.answer(CHECK_INTERVAL, Message)
            if message is not None and message.record is not None and message.record.cell_id not in left:
                raise ValueError("it is about another cell")
        except EOFError:
            code = worker.end(EXIT_SECONDS)
            kind = KILLED if -code in KILL_SIGNALS else "crashed"
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
        """Return a worker that waits for cells with this code, or None if the run is stopped."""
        if self.worker is not None and self.code == code:
            return self.worker
        end_of_log = self.log.stat().st_size if self.log.exists() else 0
        for _ in range(START_ATTEMPTS):
            self.end()
            with suppress(EOFError, ValueError):
                self.worker, self.code = self.server.start("sparsebench.runner.run_cell", self.place, self.log), code
                if self.stopped:  # `kill` was called before this worker was known
                    self.worker.cut()
                self.worker.ask(self.environment)
                if self.worker.answer(START_SECONDS, Message) is not None:
                    return self.worker
            if self.stopped:
                return None
        raise UserError(
            f"{START_ATTEMPTS} workers in a row did not start: {why_not(self.log, end_of_log)}",
            next_step=f"see {self.log}, or use --jobs 0, which needs no worker processes",
        )

    def end(self) -> None:
        """End the worker, if there is one."""
        if self.worker is not None:
            self.worker.end()
            self.worker = None

    def kill(self) -> None:
        """End the worker and all its processes at once, and start no other. Any thread may call this."""
        self.stopped = True
        if (worker := self.worker) is not None:
            worker.cut()
