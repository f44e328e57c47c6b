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
"""Seconds between two drawings of the bar."""
QUIET = 1.0
"""Seconds for which what is quiet is not shown."""
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
        tell: called with what was written, and with how it is at the end.
    """
    path, over = out / "underway" / f"{socket.gethostname()}-{os.getpid()}.json", threading.Event()

    def state() -> Underway:
        now = time.time()
        with expected.lock:
            left, running = expected.left, expected.running
            return Underway(
                host=socket.gethostname(), pid=os.getpid(), updated=now,
                since=min((since for since, _ in running.values()), default=now),
                left=Counter(job.label for job in left.values()),
                running=Counter(left[cell_id].label for cell_id in running),
                done=sum(share for _, share in running.values()), seconds=expected.time_left(workers, now),
            )  # fmt: skip

    def write_on() -> None:
        while not over.is_set():
            now = state()
            with suppress(UserError):  # the run itself will say that the folder cannot be written
                files.write_whole(path, now.model_dump_json().encode())
            tell(now)
            over.wait(EVERY)
        tell(state())

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
        self.total, self.quiet, self.began, self.due = 0, False, 0.0, 0.0
        self.last = ""
        self.failures: set[tuple[str, str]] = set()

    def _open(self, total: int, quiet: bool = False) -> None:
        self.total, self.quiet, self.began = total, quiet, time.monotonic()
        self.due = self.began + (QUIET * quiet if self.live else LINE)

    def _draw(self, done: float, text: str, left: str, last: str = "") -> None:
        """Draw the bar, not too often, or print a line once a minute; both at the end, unless it was quiet so far."""
        from tqdm import tqdm

        now = time.monotonic()
        if now >= self.due or (done == self.total and (self.bar is not None or not self.quiet)):
            self.due = now + (OFTEN if self.live else LINE)
            line = f"{text}, {clock(now - self.began)} gone, {left} left{last}"
            if not self.live:
                click.echo(line, err=True)
            elif self.bar is None:
                form = "{percentage:3.0f}%|{bar}| {desc}"
                self.bar = tqdm(desc=line, total=self.total, initial=done, bar_format=form, dynamic_ncols=True)
            else:
                self.bar.n = done
                self.bar.set_description_str(line)
        if done == self.total:
            self._close()

    def pictures(self, text: str, done: int, total: int) -> None:
        """Show how far pictures are that are looked at before the first cell.

        What is done with them is said first; where that is "", it is quiet.
        """
        if done == 0:
            if text:
                click.echo(text, err=True)
            self._open(total, quiet=not text)
        left = (time.monotonic() - self.began) * (total - done) / done if done else None
        self._draw(done, f"{done}/{total} pictures", time_of(left))

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
        self._open(len(plan.todo))

    def step(self, record: Record) -> None:
        """Say at once, above the bar, why a cell has no result."""
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
        self.then(record)

    def beat(self, now: Underway) -> None:
        """Show how many cells are done, with the shares of those under way, and the time gone and left."""
        if self.total:
            done = self.total - sum(now.left.values())
            self._draw(done + now.done, f"{done}/{self.total} cells", time_of(now.seconds), self.last)

    def stopping(self) -> None:
        """Say what the first Ctrl-C does; in a signal handler, so without the buffers that it may interrupt."""
        os.write(2, b"\nstopping when the cells under way are done; Ctrl-C again stops now\n")

    def _close(self) -> None:
        self.total = 0
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
