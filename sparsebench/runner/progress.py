"""The progress of a run, in a terminal or a notebook."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sparsebench.plan.plan import Plan
    from sparsebench.records.record import Record
    from sparsebench.runner.run import Callbacks
    from sparsebench.runner.underway import Underway

OFTEN = 0.2
"""Seconds between two drawings that records bring about."""
GOOD = ("ok", "unsupported", "skipped")
"""Statuses of cells in which nothing failed."""
LINE = 60.0
"""Seconds between two lines, where what is shown goes to a file."""


class Progress:
    """A bar with the time left as the run says it of itself, see `runner.underway`; it moves also between records.

    In a file it is a line a minute. As a context it ends the bar, and the program if the user stops it.

    Args:
        out: the run's folder.
        exits: whether a stop ends the program; else it is a KeyboardInterrupt.
    """

    def __init__(self, out: Path, exits: bool = True) -> None:
        self.out, self.exits = out, exits
        self.bar: Any = None
        self.pictures_bar: Any = None
        self.live = sys.stderr.isatty() or in_a_notebook()
        self.cells = self.total = 0
        self.left = self.last = ""
        self.failures: set[tuple[str, str]] = set()
        self.began = self.said = time.monotonic()

    def callbacks(self, on_record: Callable[[Record], None] | None = None) -> Callbacks:
        """Return what tells this bar of a run, and perhaps somebody else of each record."""
        from sparsebench.runner.run import Callbacks

        def step(record: Record) -> None:
            self.step(record)
            if on_record is not None:
                on_record(record)

        return Callbacks(self.begin, step, self.beat, self.stopping, self.pictures)

    def pictures(self, what: str, done: int, total: int) -> None:
        """Show how far pictures are that are looked at before the first cell, in a bar of their own.

        What is done with them is said first; where that is "", the bar is there only if it takes more than a second.
        """
        now = time.monotonic()
        if done == 0:
            self.began = self.said = now
            if what:
                click.echo(what, err=True)
            if self.live and total:
                from tqdm import tqdm

                form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} pictures, {elapsed} gone, {remaining} left"
                self.pictures_bar = tqdm(total=total, bar_format=form, dynamic_ncols=True, delay=0 if what else 1)
        elif self.pictures_bar is not None:
            self.pictures_bar.update(done - self.pictures_bar.n)
            if done == total:
                self.pictures_bar.close()
                self.pictures_bar = None
        elif (done == total and what) or now > self.said + LINE:
            self.said = now
            click.echo(f"{done}/{total} pictures, {clock(now - self.began)} gone", err=True)

    def begin(self, plan: Plan, workers: int) -> None:
        """Say what is to do, and how long that is expected to take if anything is known."""
        if not plan.todo:
            heads = [plan.known[job.cell.id] for job in plan.jobs if job.cell.id in plan.known]
            failed = sum(head.status not in GOOD for head in heads)
            again = f"; {failed} of them failed, --rerun failed tries them again" if failed else ""
            click.echo(f"all {len(plan.jobs)} cells are in the store{again}", err=True)
            return
        from sparsebench.plan.time_left import Remaining

        seconds = Remaining(plan.todo, plan.expected).seconds(workers)
        about = "" if seconds is None else f", {time_of(seconds, 'about ')}"
        where = f"on {workers or 'no'} worker processes"
        click.echo(f"{len(plan.todo)} of {len(plan.jobs)} cells to run, {where}{about}", err=True)
        for line in plan.changed:
            click.echo(line, err=True)
        self.cells, self.total, self.left, self.said = 0, len(plan.todo), time_of(seconds), time.monotonic()
        if self.live:
            from tqdm import tqdm

            form = "{percentage:3.0f}%|{bar}| {desc}, {elapsed} gone{postfix}"
            self.bar = tqdm(total=self.total, bar_format=form, dynamic_ncols=True, mininterval=OFTEN)
            self._show(0.0)

    def step(self, record: Record) -> None:
        """Count one record."""
        good = record.status in GOOD
        self.last = f", {record.label} on {record.cell.task.name} {'done' if good else record.status}"
        if not good:
            self._tell(record)
        self.cells += 1
        if self.cells == self.total:
            self.left = clock(0)
        if self.bar is not None:
            self._show(max(self.bar.n, float(self.cells)), at_once=self.cells == self.total)
        elif self.cells == self.total:
            self._say()

    def _tell(self, record: Record) -> None:
        """Say at once, above the bar, why a cell has no result; once for all cells with the same reason."""
        reason = record.failure.reason if record.failure is not None else record.status
        if (record.label, reason) not in self.failures:
            self.failures.add((record.label, reason))
            logs = f"; logs: {self.out / 'logs'}" if (self.out / "logs").is_dir() else ""
            line = f"{record.status}: {record.label} on {record.cell.task.name}: {reason}{logs}"
            if self.bar is not None:
                self.bar.clear()
            click.secho(line, fg="red", err=True)

    def beat(self, now: Underway) -> None:
        """Show the time gone and left, and how much of the cells under way is done."""
        if self.cells == self.total:
            return
        self.left = time_of(now.seconds)
        if self.bar is not None:
            self._show(min(self.cells + now.done, float(self.total)))
        elif time.monotonic() > self.said + LINE:
            self._say()

    def _say(self) -> None:
        self.said = time.monotonic()
        click.echo(f"{self.cells}/{self.total} cells, {self.left} left{self.last}", err=True)

    def _show(self, done: float, at_once: bool = True) -> None:
        """Draw the bar with so many cells done, those under way in part; unless it is at once, not too often."""
        self.bar.n = done
        self.bar.set_description_str(f"{self.cells}/{self.total} cells", refresh=False)
        self.bar.set_postfix_str(f"{self.left} left{self.last}", refresh=False)
        if at_once:
            self.bar.refresh()
        else:
            self.bar.update(0)

    def stopping(self) -> None:
        """Say what the first Ctrl-C does; in a signal handler, so without the buffers that it may interrupt."""
        os.write(2, b"\nstopping when the cells under way are done; Ctrl-C again stops now\n")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_about: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        if stopped:
            click.echo(f"\nstopped; what is done is kept in {self.out}: the same command goes on from there", err=True)
        for bar in (self.bar, self.pictures_bar):
            if bar is not None:
                bar.close()
        if stopped and self.exits:
            sys.exit(130)


def remedy(statuses: Iterable[str]) -> str:
    """Return, of the statuses of cells without a result, how many there are and which command tries them again."""
    counts = Counter(statuses)
    number = counts.total()
    said = ", ".join(f"{n} {status}" for status, n in sorted(counts.items()))
    skipped = number == counts["skipped"]
    command = "the same command" if skipped else "the same command with --rerun failed"
    cells = "1 cell has" if number == 1 else f"{number} cells have"
    return f"{cells} no result ({said}): {command} tries {'it' if number == 1 else 'them'} again"


def in_a_notebook() -> bool:
    """Say whether the program is a notebook's."""
    return "ipykernel" in sys.modules


def time_of(seconds: float | None, about: str = "") -> str:
    """Return how long something takes, for people; after `about` where that is known."""
    return "unknown time" if seconds is None else f"{about}{clock(math.ceil(seconds))}"


def clock(seconds: float) -> str:
    """Return minutes:seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
