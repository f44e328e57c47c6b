"""Engines map cells to records: in this process, or in worker processes of this machine."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsebench.errors import UserError
from sparsebench.plugin.registry import Registry
from sparsebench.sweep.job import Job
from sparsebench.sweep.record import Failure, Record
from sparsebench.tasks.base import Locations

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

CHECKPOINT = 60.0
"""Seconds between checkpoints of a cell."""

TOGETHER = 1000
"""Cells given to a worker on a GPU at once; it trains as many at a time as its memory holds."""


def inline(
    jobs: Sequence[Job],
    registry: Registry,
    out: Path,
    device: str,
    locations: Locations,
    checkpoint: float = CHECKPOINT,
) -> Iterator[Record]:
    """Yield the record of each job, run one after the other in this process: for debugging."""
    from sparsebench.sweep.prepare import Context
    from sparsebench.sweep.run_cell import run_cells
    from sparsebench.sweep.worker import one_thread

    several = most_together(device)
    with one_thread():
        for batch in _batches(jobs, several):
            yield from run_cells(batch, registry, Context(out, device, locations, checkpoint))


def most_together(device: str) -> int:
    """Return how many cells a worker is given at once, if they can be trained in one program."""
    return 1 if device == "cpu" else TOGETHER


def _batches(jobs: Sequence[Job], most: int) -> Iterator[list[Job]]:
    """Yield the jobs in their order: neighbours that may go together in lists of at most `most`, others alone."""
    batch: list[Job] = []
    for job in jobs:
        if batch and not (job.together and batch[-1].together and len(batch) < most):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def local(
    jobs: Sequence[Job],
    workers: int,
    out: Path,
    device: str,
    locations: Locations,
    checkpoint: float = CHECKPOINT,
) -> Iterator[Record]:
    """Yield the record of each job as it comes, run by worker processes of one thread each.

    A worker that dies costs the cell it was at, whose record says `crashed`; a fresh worker takes the next one.
    Workers end with this process, however it ends.
    """
    queue_ = _Queue(jobs, most_together(device))
    records: queue.SimpleQueue[Record | BaseException] = queue.SimpleQueue()
    setting = {
        "out": str(out),
        "device": device,
        "checkpoint": checkpoint,
        "locations": {name: str(path) for name, path in locations.items()},
    }
    slots = [_Slot(queue_, records, setting, out / "logs" / f"worker-{i}.log") for i in range(workers)]
    for slot in slots:
        slot.thread.start()
    try:
        for _ in jobs:
            record = records.get()
            if isinstance(record, BaseException):
                raise record
            yield record
    finally:
        queue_.close()
        for slot in slots:
            slot.kill()
        for slot in slots:
            slot.thread.join()


class _Queue:
    """Jobs in order, each handed out once those it waits for are done; some several at a time."""

    def __init__(self, jobs: Sequence[Job], most: int):
        self.waiting = list(_batches(jobs, most))
        self.open = {job.cell.id for job in jobs}
        self.changed = threading.Condition()

    def take(self) -> list[Job] | None:
        with self.changed:
            while self.waiting:
                for position, batch in enumerate(self.waiting):
                    if not any(job.after in self.open for job in batch):
                        return self.waiting.pop(position)
                self.changed.wait()
            return None

    def done(self, job: Job) -> None:
        with self.changed:
            self.open.discard(job.cell.id)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.waiting.clear()
            self.changed.notify_all()


class _Slot:
    """One worker process after another, and the thread that talks to it."""

    def __init__(self, jobs: _Queue, records: queue.SimpleQueue[Any], setting: dict[str, Any], log: Path):
        self.jobs, self.records, self.setting, self.log = jobs, records, setting, log
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        try:
            while (batch := self.jobs.take()) is not None:
                for job, record in self._ask(batch):
                    if self.stopped:
                        return
                    self.records.put(record)
                    self.jobs.done(job)
            self._end()
        except BaseException as error:  # handed to the consumer, which raises it
            self.records.put(error)

    def _ask(self, batch: list[Job]) -> Iterator[tuple[Job, Record]]:
        """Yield the worker's record of each job.

        If the worker dies, the jobs it had not answered are asked again one by one; one that was alone has a record
        that says so.
        """
        process = self._worker()
        assert process.stdin is not None and process.stdout is not None
        started, left = datetime.now(UTC), {job.cell.id: job for job in batch}
        with suppress(BrokenPipeError, OSError):
            process.stdin.write(b"[" + b",".join(job.model_dump_json().encode() for job in batch) + b"]\n")
            process.stdin.flush()
            while left and (answer := process.stdout.readline()).endswith(b"\n"):
                record = Record.model_validate_json(answer)
                yield left.pop(record.cell_id), record
        if not left:
            return
        code = self._reap(process)
        if self.stopped:
            return
        if len(batch) > 1:
            for job in left.values():
                yield from self._ask([job])
            return
        yield batch[0], self._crashed(batch[0], code, started)

    def _crashed(self, job: Job, code: int, started: datetime) -> Record:
        reason = f"the worker was ended by {signal.Signals(-code).name}" if code < 0 else f"the worker left with {code}"
        failure = Failure(reason=reason, kind="crash", traceback=self._last_words())
        seconds = (datetime.now(UTC) - started).total_seconds()
        return job.record_of_failure("crashed", failure, started.isoformat(), seconds)

    def _worker(self) -> subprocess.Popen[bytes]:
        with self.lock:
            if self.process is None and not self.stopped:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                with self.log.open("ab") as log:
                    self.process = subprocess.Popen(
                        [sys.executable, "-u", "-P", "-m", "sparsebench.sweep.worker", json.dumps(self.setting)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=os.environ
                        | THREADS
                        | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                        start_new_session=True,
                    )
            if self.process is None:
                raise UserError("the run was stopped")
            return self.process

    def _last_words(self) -> str:
        try:
            return self.log.read_bytes()[-2000:].decode(errors="replace")
        except OSError:
            return ""

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """Close the pipes to a worker, wait for its end, and return its exit code."""
        assert process.stdin is not None and process.stdout is not None
        with suppress(OSError):  # a last flush finds nobody
            process.stdin.close()
        process.stdout.close()
        code = process.wait()
        with self.lock:
            self.process = None
        return code

    def _end(self) -> None:
        """Let the worker go: it leaves when its input ends."""
        if self.process is not None:
            self._reap(self.process)

    def kill(self) -> None:
        """End the worker and all it started, at once."""
        with self.lock:
            self.stopped = True
            if self.process is not None and self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
