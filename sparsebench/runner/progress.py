"""How far a run is: the file in its folder that says so, and the bar in a terminal or a notebook."""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import BaseModel, ConfigDict

from sparsebench import files
from sparsebench.errors import UserError

if TYPE_CHECKING:
    from sparsebench.plan.plan import Expected, Plan
    from sparsebench.records.record import Record

EVERY = 1.0
"""Seconds between two writings."""
DEAD = 60.0
"""Seconds after which a run that has written nothing is held for dead."""
OFTEN = 0.2
"""Seconds between two drawings that records bring about."""
GOOD = ("ok", "unsupported", "skipped")
"""Statuses of cells in which nothing failed."""
LINE = 60.0
"""Seconds between two lines, where what is shown goes to a file."""


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
        try:
            if self.host == socket.gethostname():
                os.kill(self.pid, 0)
        except PermissionError:
            pass
        except (OSError, OverflowError):
            return False
        return self.pid > 0 and time.time() - self.updated < DEAD


@contextmanager
def beat(
    out: Path, expected: Expected, workers: int, tell: Callable[[Underway], None] = lambda now: None
) -> Iterator[None]:
    """Keep the file of a run up to date for a while, in a thread, and remove it then.

    Args:
        out: the run's folder.
        expected: says which cells the run has still to do.
        workers: its worker processes.
        tell: called with what was written.
    """
    path, over = out / "underway" / f"{socket.gethostname()}-{os.getpid()}.json", threading.Event()

    def write_on() -> None:
        while True:
            now = time.time()
            with expected.lock:
                left, running = expected.left, expected.running
                state = Underway(
                    host=socket.gethostname(), pid=os.getpid(), workers=workers, updated=now,
                    since=min((since for since, _ in running.values()), default=now),
                    left=Counter(job.label for job in left.values()),
                    running=Counter(left[cell_id].label for cell_id in running),
                    done=sum(share for _, share in running.values()), seconds=expected.time_left(workers, now),
                )  # fmt: skip
            with suppress(UserError):  # the run itself will say that the folder cannot be written
                files.write_whole(path, state.model_dump_json().encode())
            tell(state)
            if over.wait(EVERY):
                return

    clear(out)
    thread = threading.Thread(target=write_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(OSError):
            path.unlink(missing_ok=True)
            path.parent.rmdir()


def underway(out: Path) -> dict[Path, Underway]:
    """Return what the runs of a folder say of themselves, by file; one that was killed is silent and not alive."""
    runs = {}
    for path in files.files_in(out / "underway", ".json"):
        with suppress(OSError, ValueError):  # it is gone, or torn
            runs[path] = Underway.model_validate_json(path.read_bytes())
    return runs


def clear(out: Path) -> None:
    """Remove what runs of a folder have left that were killed: who runs there now goes on with their cells."""
    for path, run in underway(out).items():
        if not run.alive:
            path.unlink(missing_ok=True)
    with suppress(OSError):  # others are under way, or there is none
        (out / "underway").rmdir()


@dataclass(eq=False)
class Callbacks:
    """Who is told of a run.

    Attributes:
        on_plan: called with the plan and the number of workers before the first cell starts.
        on_record: called with each stored record.
        on_beat: called about every second, in a thread, with how far the run is.
        on_stop: called, in a signal handler, at the first Ctrl-C.
        on_pictures: called with how far pictures are that are looked at before, see `sources.cache.Tell`.
    """

    on_plan: Callable[[Plan, int], None] = lambda plan, workers: None
    on_record: Callable[[Record], None] = lambda record: None
    on_beat: Callable[[Underway], None] = lambda now: None
    on_stop: Callable[[], None] = lambda: None
    on_pictures: Callable[[str, int, int], None] = lambda text, done, total: None


SILENT = Callbacks()


class Progress(Callbacks):
    """A bar with the time left as the run says it of itself, see `Underway`; it moves also between records.

    In a file it is a line a minute. As a context it ends the bar.

    Args:
        out: the run's folder.
        on_record: called with each record.
    """

    def __init__(self, out: Path, on_record: Callable[[Record], None] = lambda record: None) -> None:
        super().__init__(self.begin, self.step, self.beat, self.stopping, self.pictures)
        self.out, self.then = out, on_record
        self.bar: Any = None
        self.live = sys.stderr.isatty() or in_a_notebook()
        self.cells = self.total = 0
        self.done = self.began = self.line_time = 0.0
        self.left = self.last = ""
        self.failures: set[tuple[str, str]] = set()

    def _open(self, total: int, text: str, delay: float = 0.0) -> None:
        """Begin to show something; a bar that takes less than a delay is not shown."""
        self.began = self.line_time = time.monotonic()
        if self.live:
            from tqdm import tqdm

            form = f"{{percentage:3.0f}}%|{{bar}}| {text}"
            self.bar = tqdm(total=total, bar_format=form, dynamic_ncols=True, delay=delay, mininterval=OFTEN)

    def pictures(self, text: str, done: int, total: int) -> None:
        """Show how far pictures are that are looked at before the first cell.

        What is done with them is said first; where that is "", the bar is there only if it takes more than a second.
        """
        now = time.monotonic()
        if done == 0:
            if text:
                click.echo(text, err=True)
            self._open(total, "{n_fmt}/{total_fmt} pictures, {elapsed} gone, {remaining} left", 0.0 if text else 1.0)
        elif self.bar is not None:
            self.bar.update(done - self.bar.n)
        elif (done == total and text) or now > self.line_time + LINE:
            self.line_time = now
            click.echo(f"{done}/{total} pictures, {clock(now - self.began)} gone", err=True)
        if done == total:
            self._close()

    def begin(self, plan: Plan, workers: int) -> None:
        """Say what is to do, and how long that is expected to take if anything is known."""
        if not plan.todo:
            heads = [plan.heads[job.cell.id] for job in plan.jobs if job.cell.id in plan.heads]
            failed = sum(head.status not in GOOD for head in heads)
            again = f"; {failed} of them failed, --rerun failed tries them again" if failed else ""
            click.echo(f"all {len(plan.jobs)} cells are in the store{again}", err=True)
            return
        seconds = plan.expected.time_left(workers)
        about = "" if seconds is None else f", {time_of(seconds, 'about ')}"
        where = f"on {workers or 'no'} worker processes"
        click.echo(f"{len(plan.todo)} of {len(plan.jobs)} cells to run, {where}{about}", err=True)
        for line in plan.changes:
            click.echo(line, err=True)
        self.cells, self.done, self.total, self.left = 0, 0.0, len(plan.todo), time_of(seconds)
        self._open(self.total, "{desc}, {elapsed} gone{postfix}")
        if self.bar is not None:
            self._show(at_once=True)

    def step(self, record: Record) -> None:
        """Count one record, and say at once, above the bar, why a cell has no result."""
        good = record.status in GOOD
        self.last = f", {record.label} on {record.cell.task.name} {'done' if good else record.status}"
        reason = record.failure.reason if record.failure is not None else record.status
        if not good and (record.label, reason) not in self.failures:  # once for all cells with the same reason
            self.failures.add((record.label, reason))
            logs = f"; logs: {self.out / 'logs'}" if (self.out / "logs").is_dir() else ""
            if self.bar is not None:
                self.bar.clear()
            line = f"{record.status}: {record.label} on {record.cell.task.name}: {reason}{logs}"
            click.secho(line, fg="red", err=True)
        self.cells += 1
        if self.cells == self.total:
            self.left = clock(0)
        self.done = max(self.done, self.cells)
        self._show(at_once=self.cells == self.total)
        self.then(record)

    def beat(self, now: Underway) -> None:
        """Show the time gone and left, and how much of the cells under way is done."""
        if self.cells < self.total:
            self.left, self.done = time_of(now.seconds), min(self.cells + now.done, float(self.total))
            self._show(at_once=True)

    def _show(self, at_once: bool) -> None:
        """Draw the bar, unless at once not too often, or print a line: once a minute, and when all cells are done."""
        cells, left = f"{self.cells}/{self.total} cells", f"{self.left} left{self.last}"
        if self.bar is not None:
            self.bar.n = self.done
            self.bar.set_description_str(cells, refresh=False)
            self.bar.set_postfix_str(left, refresh=at_once)
            self.bar.update(0)
        elif self.cells == self.total or time.monotonic() > self.line_time + LINE:
            self.line_time = time.monotonic()
            click.echo(f"{cells}, {left}", err=True)

    def stopping(self) -> None:
        """Say what the first Ctrl-C does; in a signal handler, so without the buffers that it may interrupt."""
        os.write(2, b"\nstopping when the cells under way are done; Ctrl-C again stops now\n")

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_about: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            click.echo(f"\nstopped; what is done is kept in {self.out}: the same command goes on from there", err=True)
        self._close()


def remedy(statuses: Iterable[str]) -> str:
    """Return, of the statuses of cells without a result, how many there are and which command tries them again."""
    counts = Counter(statuses)
    text = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    command = "the same command" + " with --rerun failed" * (counts.keys() != {"skipped"})
    return f"cells without a result: {counts.total()} ({text}); {command} tries them again"


def in_a_notebook() -> bool:
    """Say whether the program is a notebook's."""
    return "ipykernel" in sys.modules


def time_of(seconds: float | None, about: str = "") -> str:
    """Return how long something takes, for people; after `about` where that is known."""
    return "unknown time" if seconds is None else f"{about}{clock(math.ceil(seconds))}"


def clock(seconds: float) -> str:
    """Return minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
