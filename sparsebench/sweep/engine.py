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


def inline(jobs: Sequence[Job], registry: Registry, out: Path, device: str, locations: Locations) -> Iterator[Record]:
    """Yield the record of each job, run one after the other in this process: for debugging."""
    from sparsebench.sweep.run_cell import Context, run_cell
    from sparsebench.sweep.worker import one_thread

    with one_thread():
        for job in jobs:
            yield run_cell(job, registry, Context(out, device, locations))


def local(jobs: Sequence[Job], workers: int, out: Path, device: str, locations: Locations) -> Iterator[Record]:
    """Yield the record of each job as it comes, run by worker processes of one thread each.

    A worker that dies costs the cell it was at, whose record says `crashed`; a fresh worker takes the next one.
    Workers end with this process, however it ends.
    """
    queue_ = _Queue(jobs)
    records: queue.SimpleQueue[Record | BaseException] = queue.SimpleQueue()
    setting = {
        "out": str(out),
        "device": device,
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
    """Jobs in order, each handed out once those it waits for are done."""

    def __init__(self, jobs: Sequence[Job]):
        self.waiting = list(jobs)
        self.open = {job.cell.id for job in jobs}
        self.changed = threading.Condition()

    def take(self) -> Job | None:
        with self.changed:
            while self.waiting:
                for position, job in enumerate(self.waiting):
                    if job.after not in self.open:
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
            while (job := self.jobs.take()) is not None:
                record = self._ask(job)
                if self.stopped:
                    return
                self.records.put(record)
                self.jobs.done(job)
            self._end()
        except BaseException as error:  # handed to the consumer, which raises it
            self.records.put(error)

    def _ask(self, job: Job) -> Record:
        """Return the worker's record of the job, or one that says that the worker died."""
        process = self._worker()
        assert process.stdin is not None and process.stdout is not None
        started = datetime.now(UTC)
        try:
            process.stdin.write(job.model_dump_json().encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (BrokenPipeError, OSError):
            answer = b""
        if answer.endswith(b"\n"):
            return Record.model_validate_json(answer)
        code = self._reap(process)
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
