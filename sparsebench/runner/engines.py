"""Which cells come next, and the engines that run them and yield their records: in this process or in workers of it."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice, takewhile
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import NamedTuple, Protocol

from sparsebench.errors import UserError
from sparsebench.plan.request import GIB, Job, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Head, Record, Status
from sparsebench.runner.devices import first_of, places, turn
from sparsebench.runner.process import START, Message, OnBegin, Worker, descendants, exit_text, memory_over, server

log = logging.getLogger(__name__)

LOOK = 0.25
"""Seconds between looks at a worker that says nothing, and at cells that other runs are at."""
PATIENCE = 5.0
"""Seconds that a worker may take to leave once it has closed its line."""
TRIES = 3
"""Workers in a row that may fail to start."""
ECHO = 0.3
"""Seconds after an interrupt in which another is the same one: a program's starter may hand on its own."""
TOGETHER = 1000
"""Cells given to a worker on a GPU at once; it trains as many at a time as its memory holds."""
KILLS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that others send, as the kernel does that lacks memory, and not the code of a cell."""
AHEAD = 64
"""Jobs among which one is chosen."""
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

    def __init__(self, out: Path, heads: Mapping[str, Head], on_done: Callable[[str], None] = lambda cell_id: None):
        self.out, self.heads, self.on_done = out, heads, on_done
        self.new = dict[str, Head | Record]()
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
        """Say whether another run has stored an answer to a cell, of the same revision, since this one was planned.

        What others have stored since is read: all heads at first and once a run has sealed its records, and lines.
        """
        others = [path for path in store.segments(self.out) if store.process_tag() not in path.name]
        if (sealed := store.sealed_files(self.out)) != self.sealed and (sealed or others):
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
        head, old = self.new.get(job.cell.id), self.heads.get(job.cell.id)
        if head is None or not job.is_answered_by(head) or (old is not None and old.started == head.started):
            return False
        self.on_done(job.cell.id)
        return True

    def close(self) -> None:
        """Let others have all cells."""
        if self.file is not None:
            os.close(self.file)


def _place(cell_id: str) -> int:
    return int.from_bytes(hashlib.sha256(cell_id.encode()).digest()[:7])


class Queue:
    """Jobs in order, each handed out once the one that it starts from is done; some several at a time.

    Who asks is given a job with the data and third-party code of its last one, if it can be, and else one with data
    that nobody else is at, with the same code before other code, which needs a worker of its own. That is only a
    choice among the next jobs that are expected to take equally long: longer ones never come later for it.

    Args:
        jobs: in the order in which they are begun.
        most: how many are handed out at once, of those that can be trained together.
        seconds: what each is expected to take, or None if nobody knows.
        locks: which of them other runs are at: those are waited for last, and left out once they are done.
        begin: told, maybe in other threads, of cells.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        most: int,
        seconds: Callable[[Job], float | None] = lambda job: None,
        locks: CellLocks | None = None,
        begin: OnBegin = lambda cells, share: None,
    ):
        self.most, self.locks, self.begin = most, locks, begin
        self.length = {job.cell.id: (job.order, None if self._joins(job) else seconds(job)) for job in jobs}
        self.left, self.open = list(jobs), {job.cell.id for job in jobs}
        self.last: dict[object, Job] = {}
        self.elsewhere, self.closed = set[str](), False
        self.changed = threading.Condition()

    def _joins(self, job: Job) -> bool:
        """Say whether a job can be handed out with others."""
        return job.together and self.most > 1

    def _may_start(self, job: Job) -> bool:
        return job.after not in self.open and job.cell.id not in self.elsewhere

    def take(self, consumer: object = None, wait: bool = True) -> list[Job] | None:
        """Return the next batch; None when there is none left, or, unless one is waited for, none that may start.

        Args:
            consumer: asks, and has the data of what it was given last; None has none.
            wait: whether one that waits for others is waited for.
        """
        with self.changed:
            while self.left and not self.closed:
                if batch := self._next(consumer):
                    if jobs := self._claim(batch):
                        return jobs
                elif wait:
                    self.changed.wait(LOOK if self.elsewhere else None)
                    self.elsewhere.clear()
                else:
                    return None
            return None

    def _claim(self, batch: list[Job]) -> list[Job]:
        """Return the jobs of a batch that no other run is at or has done; those that one is at are the last now."""
        if self.locks is None:
            return batch
        jobs = []
        for job in batch:
            if not self.locks.begin(job.cell.id):
                self.elsewhere.add(job.cell.id)
                self.left.append(job)
            elif self.locks.is_done(job):
                self.locks.release(job.cell.id)
                self.done(job)
            else:
                jobs.append(job)
        return jobs

    def _next(self, consumer: object) -> list[Job] | None:
        """Take out the next batch for somebody, if any may start."""
        ready = ((i, job) for i, job in enumerate(self.left) if self._may_start(job))
        if (first := next(ready, None)) is None:
            return None
        length, last = self.length[first[1].cell.id], self.last.get(consumer)
        code, draw = ((), "") if last is None else (last.code, last.cell.draw)
        others = {job.cell.draw for other, job in self.last.items() if other != consumer} - {draw}

        def unlike(item: tuple[int, Job]) -> tuple[bool, bool, bool]:
            job = item[1]
            return job.code != code, job.cell.draw in others, job.cell.draw != draw

        equals = takewhile(lambda item: self.length[item[1].cell.id] == length, ready)
        i, job = min((first, *islice(equals, AHEAD)), key=unlike)
        batch = [(i, job)]
        if self._joins(job):
            alike = (item for item in enumerate(self.left) if self._joins(item[1]) and item[1].code == job.code)
            batch = list(islice((item for item in alike if self._may_start(item[1])), self.most))
        for i, _ in reversed(batch):
            del self.left[i]
        if consumer is not None:
            self.last[consumer] = job
        return [job for _, job in batch]

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
    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            on_first()
        elif time.monotonic() - first >= ECHO:
            before(number, frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Engine(Protocol):
    """Runs cells, wherever that is."""

    def records(self, queue: Queue, setting: Setting) -> Generator[Record, None, None]:
        """Yield the record of each job as it comes; once the queue is closed, only of those that are under way.

        Args:
            queue: gives the jobs, and is to be told of each that begins and of each that has its record.
            setting: what they have in common.

        Raises:
            UserError: cells cannot be run.
        """
        ...


class InProcess:
    """The engine without worker processes.

    Args:
        registry: from which strategies come.
    """

    def __init__(self, registry: Registry):
        self.registry = registry

    def records(self, queue: Queue, setting: Setting) -> Generator[Record, None, None]:
        """Yield the record of each job, run one after the other in this process; see `Engine`."""
        from sparsebench.runner.prepare import Context
        from sparsebench.runner.run_cell import one_thread, run_cells

        setting = replace(setting, device=first_of(setting.device))
        with one_thread():
            context = Context(setting, begin=queue.begin)
            while batch := queue.take("here"):
                with turn(setting.device) if setting.how.exclusive else nullcontext():
                    records = run_cells(batch, self.registry, context)
                    for job, record in zip(batch, records, strict=True):
                        yield record
                        queue.done(job)


class Processes:
    """The engine of worker processes, of one thread each.

    A cell that goes over a limit, or whose worker dies, has a record that says `timeout`, `oom` or `crashed`. The next
    cell has a fresh worker then. Workers, and what they have started, end with this process, however it ends.

    Args:
        workers: how many processes.
    """

    def __init__(self, workers: int):
        self.workers = workers

    def records(self, queue: Queue, setting: Setting) -> Generator[Record, None, None]:
        """Yield the record of each job as it comes; see `Engine`.

        Raises:
            UserError: workers do not start.
        """
        records: SimpleQueue[Record | BaseException | None] = SimpleQueue()
        supervisors = [
            Supervisor(setting, str(number), place, queue.begin)
            for number, place in enumerate(places(setting.device, self.workers))
        ]
        threads = [threading.Thread(target=item.serve, args=(queue, records), daemon=True) for item in supervisors]
        for thread in threads:
            thread.start()
        try:
            left = len(threads)
            while left:
                record = records.get()
                if isinstance(record, BaseException):
                    raise record
                if record is None:
                    left -= 1
                else:
                    yield record
        finally:
            queue.close()
            for supervisor in supervisors:
                supervisor.kill()
            for thread in threads:
                thread.join()


class _End(NamedTuple):
    """How it came to an end with a worker that did not answer.

    Attributes:
        killed: whether by a signal that the run did not send.
    """

    status: Status
    reason: str
    words: str = ""
    killed: bool = False


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
        self.timeout, self.memory = setting.how.limits()
        self.log, self.place, self.on_begin = setting.out / "logs" / f"worker-{name}.log", place, on_begin
        self.server = server()
        self.worker: Worker | None = None
        self.code: tuple[str, ...] = ()
        self.stopped = False
        self._note_cells(())

    def _note_cells(self, cells: Sequence[str]) -> None:
        """Take note of the ids of cells that the worker is at from now on."""
        self.cells, self.started, self.clock = cells, datetime.now(UTC), time.monotonic()

    def serve(self, queue: Queue, records: SimpleQueue[Record | BaseException | None]) -> None:
        """Work through a queue; at the end hand on what went wrong, or None."""
        error = None
        try:
            while not self.stopped and (batch := queue.take(self)) is not None:
                for job, record in self.records(batch):
                    records.put(record)
                    queue.done(job)
        except BaseException as raised:  # the thread that waits for records raises it
            error = raised
        self.end()
        records.put(error)

    def records(self, batch: list[Job]) -> Iterator[tuple[Job, Record]]:
        """Yield the record of each job, unless it is killed.

        If it does not go well with a worker, the cell that it was at has a record that says so, and what is left of
        the batch is given to the next one. If it was at several, nobody knows whose fault it is: each is given alone.
        If it was killed, whoever did so, the cell is first given once more.
        """
        left, alone, again = {job.cell.id: job for job in batch}, False, set[str]()
        while left and not self.stopped:
            jobs = list(left.values())[: 1 if alone else None]
            end = yield from self._ask(jobs, left)
            if end is None or self.stopped:
                continue
            current = [job for job in jobs if job.cell.id in left and (job.cell.id in self.cells or not self.cells)]
            alone = alone or len(current) > 1
            if len(current) != 1:
                continue
            (job,) = current
            if end.killed and job.cell.id not in again:
                log.warning("%s of %s: %s; it is tried once more", job.cell.id, job.label, end.reason)
                again.add(job.cell.id)
                continue
            failure = Failure(reason=end.reason, kind=end.status, traceback=end.words)
            seconds = time.monotonic() - self.clock
            yield left.pop(job.cell.id), job.record_of_failure(end.status, failure, self.started.isoformat(), seconds)

    def _ask(self, jobs: list[Job], left: dict[str, Job]) -> Generator[tuple[Job, Record], None, _End | None]:
        """Yield a worker's records of jobs, which are left no more; return how it came to an end with it, if it did."""
        worker, answers = self._start(jobs[0].code), 0
        if worker is None:
            return None
        self._note_cells(())
        worker.ask(jobs)
        while answers < len(jobs):
            event = self._hear(worker, left)
            if isinstance(event, _End):
                self.end()
                return event
            if event is None:
                continue
            if event.record is not None:
                answers += 1
                yield left.pop(event.record.cell_id), event.record
            self.on_begin(event.at, event.share)
            if not event.share:
                self._note_cells(event.at)
            if event.unfit:
                self.end()
                return None
        return None

    def _hear(self, worker: Worker, left: dict[str, Job]) -> Message | _End | None:
        """Return the worker's next message, or how it ends here, or None if there is nothing to say yet."""
        try:
            message = worker.answer(LOOK, Message)
            if message is not None and message.record is not None and message.record.cell_id not in left:
                raise ValueError("it is about another cell")
        except EOFError:
            code = worker.end(PATIENCE)
            return _End("crashed", f"the worker {exit_text(code)}", worker.last_words(), -code in KILLS)
        except ValueError as error:
            return _End("crashed", f"the worker's answer cannot be read: {error}", worker.last_words())
        if message is not None:
            return message
        if 0 < self.timeout < (seconds := time.monotonic() - self.clock):
            reason = f"no result after {seconds:.1f} s, with --timeout {self.timeout:g}"
            return _End("timeout", reason, worker.last_words())
        if self.memory and (size := memory_over([worker.pid, *descendants(worker.pid)], self.memory)):
            limit = f"over the --memory-limit of {self.memory / GIB:.2f} GiB"
            return _End("oom", f"its processes held {size / GIB:.2f} GiB, {limit}")
        return None

    def _start(self, code: tuple[str, ...]) -> Worker | None:
        """Return a worker that waits for cells with that code, or None if the run is stopped."""
        if self.worker is not None and self.code == code:
            return self.worker
        self.end()
        for _ in range(TRIES):
            try:
                worker = self.server.start("sparsebench.runner.run_cell", self.place, self.log)
            except EOFError:
                if self.stopped:
                    return None
                continue
            self.worker, self.code = worker, code
            if self.stopped:  # by `kill`, which has not seen it
                worker.cut()
            worker.ask(self.setting)
            with suppress(EOFError, ValueError):
                if worker.answer(START, Message) is not None:
                    return worker
            self.end()
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
