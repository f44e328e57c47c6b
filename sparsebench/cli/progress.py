"""The progress of a run in the terminal."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sparsebench.sweep.record import Record
    from sparsebench.sweep.run import Plan


class Progress:
    """A bar with the time left, reckoned from what the cells of each task took so far.

    As a context it ends the bar, and the command if the user stops it.

    Args:
        out: the run's folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.bar: Any = None
        self.left: Counter[str] = Counter()
        self.took: dict[str, list[float]] = {}
        self.workers = 1

    def begin(self, plan: Plan, workers: int, expected: float | None = None) -> None:
        """Say what is to do, and how many seconds that is expected to take if anybody knows."""
        if not plan.todo:
            click.echo(f"all {len(plan.jobs)} cells are in the store", err=True)
            return
        from tqdm import tqdm

        about = "" if expected is None else f", about {self.clock(expected)}"
        where = f"on {workers or 'no'} worker processes"
        click.echo(f"{len(plan.todo)} of {len(plan.jobs)} cells to run, {where}{about}", err=True)
        self.left.update(job.cell.task.name for job in plan.todo)
        self.workers = max(1, workers)
        form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} cells, {elapsed} gone{postfix}"
        interval = 0.5 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=len(plan.todo), bar_format=form, mininterval=interval, file=sys.stderr)

    def step(self, record: Record) -> None:
        """Count one record."""
        task = record.cell.task.name
        self.left[task] -= 1
        self.took.setdefault(task, []).append(record.seconds)
        self.bar.set_postfix_str(f"{self.time_left()} left, {record.label} on {task} done", refresh=False)
        self.bar.update()

    def stopping(self) -> None:
        """Say what the first Ctrl-C does; in a signal handler, so without the buffers that it may interrupt."""
        os.write(2, b"\nstopping when the cells under way are done; Ctrl-C again stops now\n")

    def time_left(self) -> str:
        """Return the time left; "over" it while some task has no finished cell yet."""
        known = {task: sum(s) / len(s) for task, s in self.took.items()}
        seconds = sum(n * known.get(task, 0) for task, n in self.left.items()) / self.workers
        unknown = any(n > 0 and task not in known for task, n in self.left.items())
        return f"{'over ' if unknown else ''}{self.clock(seconds)}"

    @staticmethod
    def clock(seconds: float) -> str:
        """Return minutes:seconds."""
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_about: object) -> None:
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        if stopped:
            click.echo(f"\nstopped; what is done is kept in {self.out}: the same command goes on from there", err=True)
        if self.bar is not None:
            self.bar.close()
        if stopped:
            sys.exit(130)
