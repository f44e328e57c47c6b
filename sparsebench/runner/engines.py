"""The queue of cells, and the engines that run them in this process or in worker processes."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import GIB
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record, RecordSummary, Status
from sparsebench.records.store import Store
from sparsebench.runner.devices import first_of, places
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.process import (
    START_SECONDS,
    Message,
    OnProgress,
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
        self.store = Store.open(folder)
        self.out = self.store.path
        self.planned = summaries
        self.on_done = on_done
        # What was read since: the summaries, and the sealed files that they are from.
        self.latest = summaries
        self.sealed: list[Path] = []
        # What was read of other runs' segments: up to which byte, and the cells that they name.
        self.ends: dict[Path, int] = {}
        self.stored: set[str] = set()
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
            self.store.refresh()
            self.sealed, self.latest = sealed, self.store.summaries()
        latest = self.latest.get(job.cell.id)
        if latest is None or not job.is_answered_by(latest):
            return False
        planned = self.planned.get(job.cell.id)
        if planned is not None and planned.started == latest.started:  # the record that this run is to replace
            return False
        self.on_done(job.cell.id)
        return True

    def _read(self, path: Path) -> None:
        """Note the cells of the new lines of a segment."""
        begin = self.ends.get(path, 0)
        with suppress(FileNotFoundError), path.open("rb") as file:  # it may be sealed meanwhile
            file.seek(begin)
            lines = file.read().rpartition(b"\n")[0]
            self.ends[path] = begin + len(lines)
            self.stored |= {name.decode() for name in re.findall(rb'"cell_id":"(\w+)"', lines)}

    def close(self) -> None:
        """Unlock all cells."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def _place(cell_id: str) -> int:
    """Return the byte offset of a cell in the lock file, below 2^63, as systems require."""
    return int.from_bytes(hashlib.sha256(cell_id.encode()).digest()[:7])


class Queue:
    """Jobs in order. A job is taken only after the job that it starts from, if any, is done.

    Args:
        jobs: the jobs in the order in which they begin.
        largest_batch: the most jobs that are taken at once, if they can be trained together. Others are taken singly.
        locks: locks of cells. Jobs that another run computes come last, and are left out once that run has stored them.
        on_progress: called with the cells that begin and with progress; maybe in other threads.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        largest_batch: int = 1,
        locks: CellLocks | None = None,
        on_progress: OnProgress = lambda cells, share: None,
    ):
        self.largest_batch, self.locks, self.on_progress = largest_batch, locks, on_progress
        self.left = {job.cell.id: job for job in jobs}
        self.without_record = set(self.left)
        self.elsewhere: set[str] = set()
        self.closed = False
        self.changed = threading.Condition()

    def take(self, wait: bool = True) -> list[Job] | None:
        """Return the next batch, or None if no job is left. Without `wait`, also None if no job may start yet."""
        with self.changed:
            while self.left and not self.closed:
                batch = self._next()
                jobs = self._claim(batch)
                if jobs:
                    return jobs
                if batch:  # other runs compute it, or have done it
                    continue
                if not wait:
                    return None
                # `done` and `close` wake this thread. Nothing does when another run has done a cell, so it looks again.
                self.changed.wait(CHECK_INTERVAL if self.elsewhere else None)
                self.elsewhere.clear()
            return None

    def _next(self) -> list[Job]:
        """Remove and return the next batch; it is empty if no job may start."""
        ready = (
            job
            for cell_id, job in self.left.items()
            if job.after not in self.without_record and cell_id not in self.elsewhere
        )
        first = next(ready, None)
        if first is None:
            return []
        batch = [first]
        if first.features:  # probes on the same features: one worker computes them once
            batch += (job for job in ready if job.features == first.features)
        elif first.together:
            alike = (job for job in ready if job.together and job.code == first.code)
            batch += islice(alike, self.largest_batch - 1)
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
            self.without_record.discard(job.cell.id)
            self.changed.notify_all()

    def close(self) -> None:
        """Give out no more jobs."""
        self.closed = True  # without the lock: `take` may hold it for long, and looks at this after each batch
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

An engine calls `Queue.on_progress` for each job that begins and `Queue.done` for each job that has its record. Once the
queue is closed, the engine yields the records of the jobs that have begun, and ends. It raises UserError if cells
cannot be run.
"""


def in_process(registry: Registry, queue: Queue, environment: RunEnvironment) -> Generator[Record, None, None]:
    """Run one job after another in this process, with strategies of the registry; see `Engine`."""
    from sparsebench.runner.prepare import Context
    from sparsebench.runner.run_cell import deterministic, run_cells

    environment = replace(environment, device=first_of(environment.device))
    with deterministic():
        context = Context(environment, on_progress=queue.on_progress)
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
        Supervisor(environment, str(number), place, queue.on_progress)
        for number, place in enumerate(places(environment.device, workers))
    ]
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(supervisor.serve, queue, records) for supervisor in supervisors]
        try:
            for _ in futures:  # each thread ends with None
                while (record := records.get()) is not None:
                    yield record
        finally:
            queue.close()
            for supervisor in supervisors:
                supervisor.kill()
    for future in futures:
        future.result()  # raises the error of its thread, if any


@dataclass(frozen=True)
class WorkerEnd:
    """Why a worker ended, or is ended, before it has sent all its records.

    Attributes:
        status: the status of the record of the cell that it was computing.
        reason: one line.
        last_words: the end of its output.
        from_outside: whether it was killed from outside the cell's code, see KILL_SIGNALS.
    """

    status: Status
    reason: str
    last_words: str = ""
    from_outside: bool = False


class Supervisor:
    """Runs cells in one worker at a time, and replaces workers that exceed a limit or cannot take another cell.

    A worker runs cells of the same third-party code only, so no strategy meets what another strategy has changed in its
    process. A cell with other code gets a new worker.

    Args:
        environment: the environment of the run.
        name: names the log file of the workers in the run's folder.
        place: environment variables of these workers only, see `places`; on a GPU they name the GPU.
        on_progress: called with the cells that begin and with progress.
    """

    def __init__(self, environment: RunEnvironment, name: str, place: Mapping[str, str], on_progress: OnProgress):
        self.environment = replace(environment, device="cuda:0" if place else "cpu")
        self.timeout, self.memory = environment.execution.limits()
        self.log = environment.out / "logs" / f"worker-{name}.log"
        self.place = place
        self.on_progress = on_progress
        self.server = server()
        self.worker: Worker | None = None
        self.code: tuple[str, ...] = ()
        self.stopped = False
        self._note_cells(())

    def _note_cells(self, cells: Sequence[str]) -> None:
        """Note the cells that the worker begins now."""
        self.cells = cells
        self.started = datetime.now(UTC)
        self.clock = time.monotonic()

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
        left = {job.cell.id: job for job in batch}
        one_by_one = False
        tried_again: set[str] = set()
        while left and not self.stopped:
            jobs = list(left.values())
            if one_by_one:
                jobs = jobs[:1]
            end: WorkerEnd | None = None
            for event in self._ask(jobs):
                if isinstance(event, WorkerEnd):
                    end = event
                else:
                    yield left.pop(event.cell_id), event
            if end is None or self.stopped:
                continue

            computing = self._computing(jobs, left)
            if not computing:
                # The worker ended between two cells: none is at fault, and the next worker gets the rest.
                continue
            if len(computing) > 1:
                # Any of these cells may be at fault.
                one_by_one = True
                continue
            (job,) = computing
            if end.from_outside and job.cell.id not in tried_again:
                log.warning("%s of %s: %s; it is tried once more", job.cell.id, job.label, end.reason)
                tried_again.add(job.cell.id)
                continue
            failure = Failure(reason=end.reason, kind=end.status, traceback=end.last_words)
            seconds = time.monotonic() - self.clock
            record = job.record_of_failure(end.status, failure, self.started.isoformat(), seconds)
            yield left.pop(job.cell.id), record

    def _computing(self, jobs: Sequence[Job], left: Container[str]) -> list[Job]:
        """Return the jobs that the worker was computing when it ended.

        Before its first message this may be any of them.

        Args:
            jobs: the jobs that the worker got.
            left: the ids of the cells without a record.
        """
        without_record = [job for job in jobs if job.cell.id in left]
        if not self.cells:
            return without_record
        return [job for job in without_record if job.cell.id in self.cells]

    def _ask(self, jobs: Sequence[Job]) -> Iterator[Record | WorkerEnd]:
        """Yield a worker's records of jobs, and its end if it fails. Records are missing if it ends or is stopped."""
        worker = self._worker_for(jobs[0].code)
        if worker is None:
            return
        self._note_cells(())
        worker.ask(jobs)
        waiting = {job.cell.id for job in jobs}
        while waiting:
            event = self._hear(worker, waiting)
            if event is None:
                continue
            if isinstance(event, WorkerEnd):
                self.end()
                yield event
                return
            if event.record is not None:
                waiting.remove(event.record.cell_id)
                yield event.record
            self.on_progress(event.at, event.share)
            if event.share == 0:  # a record or a beginning restarts the clock
                self._note_cells(event.at)
            if event.unfit:
                self.end()
                return

    def _hear(self, worker: Worker, waiting: Container[str]) -> Message | WorkerEnd | None:
        """Return the worker's next message or its end, or None if it has sent nothing and exceeds no limit.

        Args:
            worker: the worker.
            waiting: the ids of the cells of which it has sent no record.
        """
        try:
            message = worker.answer(CHECK_INTERVAL, Message)
            if message is not None and message.record is not None and message.record.cell_id not in waiting:
                raise ValueError("it is about another cell")
        except EOFError:
            code = worker.end(EXIT_SECONDS)
            reason = f"the worker {exit_text(code)}"
            from_outside = -code in KILL_SIGNALS
            return WorkerEnd("crashed", reason, worker.last_words(), from_outside)
        except ValueError as error:
            return WorkerEnd("crashed", f"the worker's answer cannot be read: {error}", worker.last_words())
        if message is not None:
            return message
        seconds = time.monotonic() - self.clock
        if 0 < self.timeout < seconds:
            reason = f"no result after {seconds:.1f} s, with --timeout {self.timeout:g}"
            return WorkerEnd("timeout", reason, worker.last_words())
        if self.memory:
            size = memory_over([worker.pid, *descendants(worker.pid)], self.memory)
            if size:
                limit = f"over the --memory-limit of {self.memory / GIB:.2f} GiB"
                return WorkerEnd("oom", f"its processes held {size / GIB:.2f} GiB, {limit}")
        return None

    def _worker_for(self, code: tuple[str, ...]) -> Worker | None:
        """Return a worker that waits for cells with this code, or None if the run is stopped."""
        if self.worker is not None and self.code == code:
            return self.worker
        end_of_log = self.log.stat().st_size if self.log.exists() else 0
        for _ in range(START_ATTEMPTS):
            self.end()
            with suppress(EOFError, ValueError):
                self.worker = self.server.start("sparsebench.runner.run_cell", self.place, self.log)
                self.code = code
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
