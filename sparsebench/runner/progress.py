"""Progress of a run: a status file in its folder, and a progress bar in a terminal or a notebook."""

from __future__ import annotations

import math
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel, ConfigDict

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.records import store
from sparsebench.records.store import Store

if TYPE_CHECKING:
    from sparsebench.plan.forecast import Forecast
    from sparsebench.plan.jobs import Job
    from sparsebench.plan.plan import Plan
    from sparsebench.records.record import Record, RecordSummary

STATUS_INTERVAL = 1.0
"""Seconds between two updates of the status file."""
DEAD_AFTER = 60.0
"""Seconds without an update after which a run counts as dead."""
BAR_INTERVAL = 0.2
"""Seconds between two updates of the bar."""
QUIET_BAR_DELAY = 1.0
"""Seconds for which a quiet bar stays hidden."""
CELLS_SUFFIX = ".cells"
"""The end of the names of files with a run's cells."""
NOT_FAILED = ("ok", "unsupported", "skipped")
"""Statuses of cells in which nothing failed."""
LINE_INTERVAL = 60.0
"""Seconds between two lines if the output is a file."""


class Underway(BaseModel):
    """The content of a status file.

    Attributes:
        updated: when the file was written, in seconds since 1970.
        since: when the running cell that began first began, in seconds since 1970.
        left: the number of cells without a record, by strategy; running cells included.
        running: the number of running cells, by strategy.
        done: the sum of the shares of running cells that are done.
        seconds: the expected seconds until the end of the run; None if unknown.
        stopped: whether the run has ended with cells left.
        cells: the name of the file with the run's cells, see `Cells`; "" if an earlier version wrote this.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    pid: int
    updated: float
    since: float
    left: dict[str, int]
    running: dict[str, int] = {}
    done: float = 0.0
    seconds: float | None = None
    stopped: bool = False
    cells: str = ""

    @property
    def alive(self) -> bool:
        """Whether the run has not ended, and has written lately. On the same machine its process must also exist."""
        if self.host == socket.gethostname() and not store.process_exists(self.pid):
            return False
        return self.pid > 0 and not self.stopped and time.time() - self.updated < DEAD_AFTER


Labels = dict[str, dict[str, str]]
"""For each strategy its cells: the id, and when the record began that the cell had when the run was planned, or ""."""


class Cells(BaseModel):
    """The cells that a run was to compute. With the records it gives the cells that are left, however the run ended.

    Attributes:
        own: the cells of the run, or of its shard.
        others: the cells of the other shards that had no record.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    own: Labels = {}
    others: Labels = {}


def labels_of(jobs: Iterable[Job], summaries: Mapping[str, RecordSummary]) -> Labels:
    """Return the cells of jobs by strategy, see `Labels`."""
    labels = defaultdict[str, dict[str, str]](dict)
    for job in jobs:
        summary = summaries.get(job.cell.id)
        labels[job.label][job.cell.id] = "" if summary is None else summary.started
    return labels


def left_of(labels: Labels, started: Mapping[str, str]) -> dict[str, str]:
    """Return the strategies of the cells that have no new record, by cell id.

    Args:
        labels: the cells.
        started: for each cell with a record, when its newest record began, see `Store.newest`.
    """
    left = {}
    for label, cells in labels.items():
        for cell_id, before in cells.items():
            if cell_id not in started or (before and started[cell_id] <= before):
                left[cell_id] = label
    return left


@contextmanager
def beat(
    folder: Path | Store,
    forecast: Forecast,
    workers: int,
    tell: Callable[[Underway], None] = lambda now: None,
    others: Iterable[Job] = (),
    summaries: Mapping[str, RecordSummary] = {},
) -> Iterator[None]:
    """Update the status file of a run in a thread, and remove it at the end unless cells are left.

    Args:
        folder: the run's folder.
        forecast: the cells that are left, and the time that they take.
        workers: the number of worker processes.
        tell: called with each written status and with the last status.
        others: the jobs of other shards without a record.
        summaries: the stored summaries by cell id when the run was planned.
    """
    opened = Store.open(folder)
    status = _StatusFile(opened.path, forecast, workers, tell)
    clear(opened)
    status.write_cells(Cells(own=labels_of(forecast.left.values(), summaries), others=labels_of(others, summaries)))
    over = threading.Event()
    thread = threading.Thread(target=status.update_until, args=[over], daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        if forecast.left:
            status.write_stopped()
        else:
            status.remove()
            opened.refresh()
            forget_answered(opened)


class _StatusFile:
    """The status file of this process, and the file with the cells of its run; see `beat`."""

    def __init__(self, out: Path, forecast: Forecast, workers: int, tell: Callable[[Underway], None]) -> None:
        self.forecast, self.workers, self.tell = forecast, workers, tell
        name = f"{socket.gethostname()}-{os.getpid()}"
        self.path = out / "underway" / f"{name}.json"
        self.cells_path = self.path.with_name(f"{name}-{secrets.token_hex(4)}{CELLS_SUFFIX}")

    def write_cells(self, cells: Cells) -> None:
        """Write the cells of the run."""
        self._write(self.cells_path, cells)

    def update_until(self, over: threading.Event) -> None:
        """Write and tell the status every STATUS_INTERVAL until an event, and tell the last status then."""
        while not over.is_set():
            now = self._status()
            self._write(self.path, now)
            self.tell(now)
            over.wait(STATUS_INTERVAL)
        self.tell(self._status())

    def write_stopped(self) -> None:
        """Write that the run has ended with cells left."""
        self._write(self.path, self._status().model_copy(update={"stopped": True, "running": {}}))

    def remove(self) -> None:
        """Remove the status file."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _status(self) -> Underway:
        now = time.time()
        with self.forecast.lock:
            left, running = self.forecast.left, self.forecast.running
            return Underway(
                host=socket.gethostname(),
                pid=os.getpid(),
                updated=now,
                since=min((since for since, _ in running.values()), default=now),
                left=Counter(job.label for job in left.values()),
                running=Counter(left[cell_id].label for cell_id in running),
                done=sum(share for _, share in running.values()),
                seconds=self.forecast.time_left(self.workers, now),
                cells=self.cells_path.name,
            )

    @staticmethod
    def _write(path: Path, content: BaseModel) -> None:
        with suppress(UserError):  # if the folder cannot be written, the run itself reports it
            files.write_whole(path, content.model_dump_json().encode())


def underway(out: Path) -> dict[Path, Underway]:
    """Return the statuses of a folder's runs, by file. A stopped or killed run leaves a file that is not `alive`."""
    runs = {}
    for path in files.files_in(out / "underway", ".json"):
        with suppress(OSError, ValueError):  # the file is gone or damaged
            runs[path] = Underway.model_validate_json(path.read_bytes())
    return runs


def cells_of(out: Path) -> dict[str, Cells]:
    """Return the cells of a folder's runs, by the name of the file."""
    lists = {}
    for path in files.files_in(out / "underway", CELLS_SUFFIX):
        with suppress(OSError, ValueError):  # the file is gone or damaged
            lists[path.name] = Cells.model_validate_json(path.read_bytes())
    return lists


def clear(folder: Path | Store) -> None:
    """Remove the files of a folder's stopped and killed runs. The current run computes their cells."""
    opened = Store.open(folder)
    for path, run in underway(opened.path).items():
        if not run.alive:
            path.unlink(missing_ok=True)
            if run.cells.endswith(CELLS_SUFFIX):
                (path.parent / Path(run.cells).name).unlink(missing_ok=True)
    forget_answered(opened)


def forget_answered(opened: Store) -> None:
    """Remove the lists of cells of ended runs that have all their records, and the folder of status files if empty."""
    out = opened.path
    lists = cells_of(out)
    used = {run.cells for run in underway(out).values()}
    if lists.keys() - used:
        started = opened.newest()
        for name in lists.keys() - used:
            if not left_of(lists[name].own, started) and not left_of(lists[name].others, started):
                (out / "underway" / name).unlink(missing_ok=True)
    with suppress(OSError):  # other runs have files there, or the folder does not exist
        (out / "underway").rmdir()


@dataclass(eq=False)
class Callbacks:
    """Functions that are called during a run.

    Attributes:
        on_plan: called with the plan and the number of workers before the first cell starts.
        on_record: called with each stored record.
        on_beat: called about every second with the status, in a thread.
        on_stop: called at the first Ctrl-C, in a signal handler.
        on_pictures: called while pictures are listed or decoded before the first cell, see `sources.cache.Tell`.
    """

    on_plan: Callable[[Plan, int], None] = lambda plan, workers: None
    on_record: Callable[[Record], None] = lambda record: None
    on_beat: Callable[[Underway], None] = lambda now: None
    on_stop: Callable[[], None] = lambda: None
    on_pictures: Callable[[str, int, int], None] = lambda text, done, total: None


SILENT = Callbacks()


class Progress(Callbacks):
    """A progress bar of a run, with the expected time. It also moves between records.

    If the output is a file, this prints a line per minute instead. Used as a context, it closes the bar.

    Args:
        out: the run's folder.
        on_record: called with each record.
    """

    def __init__(self, out: Path, on_record: Callable[[Record], None] = lambda record: None) -> None:
        super().__init__(self.begin, self.step, self.beat, self.stopping, self.pictures)
        self.out, self.then = out, on_record
        self.bar: Any = None
        self.live = sys.stderr.isatty() or in_a_notebook()
        self.total, self.quiet, self.began, self.due = 0, False, 0.0, 0.0
        self.last = ""
        self.failures: set[tuple[str, str]] = set()

    def _open(self, total: int, quiet: bool = False) -> None:
        self.total = total
        self.quiet = quiet
        self.began = time.monotonic()
        self.due = self.began + (QUIET_BAR_DELAY * quiet if self.live else LINE_INTERVAL)

    def _draw(self, done: int, text: str, left: str, last: str = "", shares: float = 0.0) -> None:
        """Update the bar every BAR_INTERVAL seconds and at the end, or print a line per minute and one at the end.

        `shares` is the part of running cells that is done. At the end nothing appears if the bar is quiet and still
        hidden.
        """
        from tqdm import tqdm

        now = time.monotonic()
        if now >= self.due or (done == self.total and (self.bar is not None or not self.quiet)):
            self.due = now + (BAR_INTERVAL if self.live else LINE_INTERVAL)
            line = f"{text}, {clock(now - self.began)} gone, {left} left{last}"
            if not self.live:
                click.echo(line, err=True)
            elif self.bar is None:
                form = "{percentage:3.0f}%|{bar}| {desc}"
                self.bar = tqdm(desc=line, total=self.total, initial=done + shares, bar_format=form, dynamic_ncols=True)
            else:
                self.bar.n = done + shares
                self.bar.set_description_str(line)
        if done == self.total:
            self._close()

    def pictures(self, text: str, done: int, total: int) -> None:
        """Show the progress of listing or decoding pictures. `text` is printed first; if it is "", the bar is quiet."""
        if done == 0:
            if text:
                click.echo(text, err=True)
            self._open(total, quiet=not text)
        left = (time.monotonic() - self.began) * (total - done) / done if done else None
        self._draw(done, f"{done}/{total} pictures", time_of(left))

    def begin(self, plan: Plan, workers: int) -> None:
        """Print the number of cells to run, and the expected time if known."""
        if not plan.todo:
            summaries = [plan.summaries[job.cell.id] for job in plan.jobs if job.cell.id in plan.summaries]
            failed = sum(summary.status not in NOT_FAILED for summary in summaries)
            if len(plan.jobs) == 1:
                stored, again = "the only cell is in the store", "; it failed, --rerun failed tries it again"
            else:
                stored = f"all {len(plan.jobs)} cells are in the store"
                again = f"; {failed} of them failed, --rerun failed tries them again"
            click.echo(f"{stored}{again if failed else ''}", err=True)
            return
        seconds = plan.forecast.time_left(workers, time.time())
        about = "" if seconds is None else f", {time_of(seconds, 'about ')}"
        where = f"on {workers or 'no'} worker process{'' if workers == 1 else 'es'}"
        click.echo(f"{len(plan.todo)} of {len(plan.jobs)} cells to run, {where}{about}", err=True)
        for line in plan.changes:
            click.echo(line, err=True)
        self._open(len(plan.todo))

    def step(self, record: Record) -> None:
        """Print above the bar why a cell failed."""
        good = record.status in NOT_FAILED
        self.last = f", {record.label} on {record.cell.task.name} {'done' if good else record.status}"
        reason = record.failure.reason if record.failure is not None else record.status
        if not good and (record.label, reason) not in self.failures:  # print each reason once for a strategy
            self.failures.add((record.label, reason))
            logs = f"; logs: {self.out / 'logs'}" if (self.out / "logs").is_dir() else ""
            if self.bar is not None:
                self.bar.clear()
            line = f"{record.status}: {record.label} on {record.cell.task.name}: {reason}{logs}"
            click.secho(line, fg="red", err=True)
        self.then(record)

    def beat(self, now: Underway) -> None:
        """Show the number of finished cells, with shares of running cells, and the elapsed and remaining time."""
        if self.total:
            done = self.total - sum(now.left.values())
            self._draw(done, f"{done}/{self.total} cells", time_of(now.seconds), self.last, now.done)

    def stopping(self) -> None:
        """Print what the first Ctrl-C does. A signal handler must not use buffered output, which it may interrupt."""
        os.write(2, b"\nstopping when the running cells are done; Ctrl-C again stops now\n")

    def _close(self) -> None:
        self.total = 0
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_about: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            click.echo(f"\nstopped; finished cells are stored in {self.out}; the same command continues", err=True)
        self._close()


def remedy(statuses: Iterable[str], again: str = "the same command", option: str = "--rerun failed") -> str:
    """Return a text that counts the cells without a result by status, and says what tries them again."""
    counts = Counter(statuses)
    text = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    command = again + f" with {option}" * (counts.keys() != {"skipped"})
    return f"cells without a result: {counts.total()} ({text}); {command} tries them again"


def in_a_notebook() -> bool:
    """Return whether this process is a notebook's kernel."""
    return "ipykernel" in sys.modules


def time_of(seconds: float | None, about: str = "") -> str:
    """Return a time as text, with `about` in front, or "unknown time"."""
    return "unknown time" if seconds is None else f"{about}{clock(math.ceil(seconds))}"


def clock(seconds: float) -> str:
    """Return seconds as minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
