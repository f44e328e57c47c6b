"""Cells in worker processes of this machine."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from sparsebench.contain.memory import held_over
from sparsebench.contain.messages import dump
from sparsebench.contain.process import Worker, how_it_left, was_killed
from sparsebench.engine.limits import CHECKPOINT, Limits, shown_size, shown_time
from sparsebench.engine.messages import Message, Question
from sparsebench.engine.queue import Queue, Seconds, most_together, unknown
from sparsebench.engine.setting import OnBegin, Setting, nobody
from sparsebench.engine.slots import Slot, slots
from sparsebench.engine.stop import Stop
from sparsebench.errors import UserError
from sparsebench.planning.job import Job
from sparsebench.records.record import Failure, Record, Status
from sparsebench.tasks.base import Locations

log = logging.getLogger(__name__)

LOOK = 0.25
"""Seconds between looks at a worker that says nothing."""
START = 300.0
"""Seconds that a worker may take to load, on a file system that is slow."""
PATIENCE = 5.0
"""Seconds that a worker may take to leave once it has closed its line."""
TRIES = 3
"""Workers in a row that may fail to start."""
WAITING = 3
"""Workers of a place on the CPU that wait at most, each for cells with the code of other strangers; a GPU's memory is
for one."""
Strangers = tuple[str, ...]


class Processes:
    """The engine of worker processes, of one thread each.

    A cell that goes over a limit, or whose worker dies, costs itself: its record says `timeout`, `oom` or `crashed`.
    The next cell has a fresh worker then, as after any cell that may have left something behind. Workers, and what they
    have started, end with this process, however it ends.

    Args:
        workers: how many processes.
        gpus: how many torch sees.
        seconds: what each job is expected to take; among equals a worker is given those whose data it has.
    """

    def __init__(self, workers: int, gpus: int = 0, seconds: Seconds = unknown):
        self.workers, self.gpus, self.seconds = workers, gpus, seconds

    def records(
        self, jobs: Sequence[Job], setting: Setting, stop: Stop, on_begin: OnBegin = nobody
    ) -> Generator[Record, None, None]:
        """Yield the record of each job as it comes; see `Engine`.

        Raises:
            UserError: workers do not start.
        """
        queue_ = Queue(jobs, most_together(setting.device), self.seconds)
        records: queue.SimpleQueue[Record | BaseException | None] = queue.SimpleQueue()
        servers = [
            _Server(queue_, records, Supervisor(setting, slot, log_of(setting.out, slot.number), on_begin))
            for slot in slots(setting.device, self.workers, self.gpus)
        ]
        stop.tell(queue_.close)
        for server in servers:
            server.thread.start()
        try:
            serving = len(servers)
            while serving:
                record = records.get()
                if isinstance(record, BaseException):
                    raise record
                if record is None:
                    serving -= 1
                else:
                    yield record
        finally:
            queue_.close()
            for server in servers:
                server.supervisor.kill()
            for server in servers:
                server.thread.join()


def local(
    jobs: Sequence[Job],
    workers: int,
    out: Path,
    device: str,
    locations: Locations,
    checkpoint: float = CHECKPOINT,
    limits: Limits | None = None,
    stop: Stop | None = None,
    gpus: int = 0,
    on_begin: OnBegin = nobody,
    seconds: Seconds = unknown,
) -> Generator[Record, None, None]:
    """Yield the record of each job as it comes, run by worker processes; see `Processes`."""
    limits = limits or Limits()
    setting = Setting(out=out, device=device, locations=dict(locations), checkpoint=checkpoint, limits=limits)
    return Processes(workers, gpus, seconds).records(jobs, setting, stop or Stop(), on_begin)


def _command(setting: Setting, strangers: Strangers) -> list[str]:
    """Return what starts a worker; see `worker.main`."""
    command = [sys.executable, "-u", "-P", "-m", "sparsebench.engine.worker", dump(setting)]
    return [*command, *(["strangers"] if strangers else [])]


def log_of(out: Path, worker: int | str) -> Path:
    """Return where what a worker prints is added."""
    return out / "logs" / f"worker-{worker}.log"


class _End(NamedTuple):
    """How it came to an end with a worker that did not answer.

    Attributes:
        killed: whether by a signal that the run did not send.
    """

    status: Status
    reason: str
    words: str = ""
    killed: bool = False


@dataclass
class _Asked:
    """A batch that a worker was given.

    Attributes:
        left: the jobs without a record, by cell.
        at: ids of the cells that the worker is at.
        started, clock: since when it is.
    """

    left: dict[str, Job]
    at: tuple[str, ...] = ()
    started: datetime = field(default_factory=lambda: datetime.now(UTC))
    clock: float = field(default_factory=time.monotonic)

    def begins(self, at: tuple[str, ...] = ()) -> None:
        """Take note of what the worker is at from now on."""
        self.at, self.started, self.clock = at, datetime.now(UTC), time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the worker has been at it."""
        return time.monotonic() - self.clock

    def guilty(self) -> Job | None:
        """Return the job that the worker was at, if it was at one."""
        candidates = [self.left[id_] for id_ in self.at or self.left if id_ in self.left]
        return candidates[0] if len(candidates) == 1 else None


class Supervisor:
    """Gives cells to one worker after another, and ends those that go over a limit or are unfit.

    Whose strategy does not come with sparsebench has workers of its own: what it changes of a process no other meets.

    Args:
        setting: what the cells have in common; the device is the slot's.
        slot: where the workers run.
        log: where what they print is added.
        on_begin: called with the ids of cells that something begins for.
    """

    def __init__(self, setting: Setting, slot: Slot, log: Path, on_begin: OnBegin = nobody):
        self.log, self.limits, self.on_begin = log, setting.limits, on_begin
        self.setting, self.slot = setting.model_copy(update={"device": slot.device}), slot
        self.workers: OrderedDict[Strangers, Worker] = OrderedDict()  # the last one used last
        self.most = WAITING if slot.device == "cpu" else 1
        self.stopped = False
        self.lock = threading.Lock()

    def records(self, batch: list[Job]) -> Iterator[tuple[Job, Record]]:
        """Yield the record of each job, unless it is killed.

        If it does not go well with a worker, the cell that it was at has a record that says so, and what is left of
        the batch is given to the next one. If it was at several, nobody knows whose fault it is: each is given alone.
        If it was killed, whoever did so, the cell is first given once more, alone.
        """
        batches, again = [batch], set[str]()
        while batches and not self.stopped:
            asked = _Asked({job.cell.id: job for job in batches.pop()})
            end = yield from self._ask(asked)
            if end is not None and not self.stopped:
                job = asked.guilty()
                if job is None:
                    batches += [[job] for job in reversed(asked.left.values())]
                    continue
                del asked.left[job.cell.id]
                if end.killed and job.cell.id not in again:
                    log.warning("%s of %s: %s; it is tried once more", job.cell.id, job.label, end.reason)
                    again.add(job.cell.id)
                    batches += [list(asked.left.values()), [job]] if asked.left else [[job]]
                    continue
                failure = Failure(reason=end.reason, kind=end.status, traceback=end.words)
                yield job, job.record_of_failure(end.status, failure, asked.started.isoformat(), asked.seconds)
            if asked.left:
                batches.append(list(asked.left.values()))

    def _ask(self, asked: _Asked) -> Generator[tuple[Job, Record], None, _End | None]:
        """Yield the worker's records; return how it came to an end with it if not by answering."""
        strangers = next(iter(asked.left.values())).strangers
        worker = self._start(strangers)
        if worker is None:
            return None
        asked.begins()
        worker.ask(dump(Question(jobs=tuple(asked.left.values()))).encode())
        while asked.left:
            heard = self._hear(worker, asked)
            if isinstance(heard, _End):
                self._end(strangers)
                return heard
            if heard is None:
                continue
            if heard.record is not None:
                yield asked.left.pop(heard.record.cell_id), heard.record
            if heard.share:
                self.on_begin(heard.at, heard.share)
                continue
            asked.begins(heard.at)
            self.on_begin(heard.at)
            if heard.unfit:
                self._end(strangers)
                return None
        return None

    def _hear(self, worker: Worker, asked: _Asked) -> Message | _End | None:
        """Return the worker's next message, or how it ends here, or None if there is nothing to say yet."""
        try:
            message = worker.answer(LOOK, Message)
            if message is not None and message.record is not None and message.record.cell_id not in asked.left:
                raise ValueError("it is about another cell")
        except EOFError:
            code = worker.end(PATIENCE)
            return _End("crashed", f"the worker {how_it_left(code)}", worker.last_words(), was_killed(code))
        except ValueError as error:
            return _End("crashed", f"the worker's answer cannot be read: {error}", worker.last_words())
        return self._over(worker, asked) if message is None else message

    def _over(self, worker: Worker, asked: _Asked) -> _End | None:
        """Return the end of a worker that is over a limit."""
        if 0 < self.limits.timeout < asked.seconds:
            reason = f"no result after {shown_time(asked.seconds)}, with --timeout {self.limits.timeout:g}"
            return _End("timeout", reason, worker.last_words())
        if self.limits.memory and (size := held_over(worker.processes(), self.limits.memory)):
            limit = shown_size(self.limits.memory)
            return _End("oom", f"its processes held {shown_size(size)}, over the --memory-limit of {limit}")
        return None

    def _start(self, strangers: Strangers) -> Worker | None:
        """Return a worker that waits for cells with the code of those strangers, or None if the run is stopped."""
        for _ in range(TRIES):
            with self.lock:
                if self.stopped:
                    return None
                if strangers in self.workers:
                    self.workers.move_to_end(strangers)
                    return self.workers[strangers]
            while len(self.workers) >= self.most:
                self._end(next(iter(self.workers)))
            with self.lock:
                if self.stopped:
                    return None
                self.workers[strangers] = worker = Worker(
                    _command(self.setting, strangers), self.slot.environment, self.log
                )
            try:
                if worker.answer(START, Message) is not None:
                    return worker
            except (EOFError, ValueError):
                pass
            self._end(strangers)
        raise UserError(f"{TRIES} workers in a row did not start; {self.log} says why")

    def _end(self, strangers: Strangers) -> None:
        worker = self.workers[strangers]
        worker.end()
        with self.lock:
            del self.workers[strangers]

    def end(self) -> None:
        """End all workers."""
        for strangers in list(self.workers):
            self._end(strangers)

    def kill(self) -> None:
        """End the workers and all they started, at once, and start none."""
        with self.lock:
            self.stopped = True
            for worker in self.workers.values():
                worker.cut()


class _Server:
    """The thread that has one supervisor work through the queue."""

    def __init__(self, jobs: Queue, records: queue.SimpleQueue[Any], supervisor: Supervisor):
        self.jobs, self.records, self.supervisor = jobs, records, supervisor
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        try:
            while not self.supervisor.stopped and (batch := self.jobs.take(self)) is not None:
                for job, record in self.supervisor.records(batch):
                    self.records.put(record)
                    self.jobs.done(job)
            self.supervisor.end()
            self.records.put(None)
        except BaseException as error:  # handed to the consumer, which raises it
            self.supervisor.end()
            self.records.put(error)
