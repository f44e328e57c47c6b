"""The progress of a run in the terminal."""

from __future__ import annotations

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sparsebench.planning.planner import Plan
    from sparsebench.records.record import Record


class Took:
    """What cells took so far: of a task, by its number of training samples where such cells are done, else all of them.

    Cells that act in the test only are reckoned apart: they may have no training of their own. In which order cells are
    run, the longest first or those with the same data together, does not matter then.
    """

    def __init__(self) -> None:
        self.sums: defaultdict[tuple[str, bool, int | None], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, task: str, tests: bool, n_train: int, seconds: float) -> None:
        """Take note of one cell."""
        for kind in ((task, tests, n_train), (task, tests, None)):
            self.sums[kind][0] += seconds
            self.sums[kind][1] += 1

    def left(self, cells: Iterable[tuple[str, bool, int, int]], workers: int) -> tuple[float, bool]:
        """Return the seconds that cells will take, and whether there are some more of which nothing is known.

        Args:
            cells: task, whether they act in the test only, number of training samples, and how many.
            workers: how many are run at a time.
        """
        total, unknown = 0.0, False
        for task, tests, n_train, n in cells:
            kind = (task, tests, n_train) if (task, tests, n_train) in self.sums else (task, tests, None)
            seconds, done = self.sums.get(kind, (0.0, 0.0))
            total += n * seconds / max(1.0, done)
            unknown |= n > 0 and not done
        return total / max(1, workers), unknown


class Progress:
    """A bar with the time left, reckoned from what like cells took so far.

    As a context it ends the bar, and the command if the user stops it.

    Args:
        out: the run's folder.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.bar: Any = None
        self.left: Counter[tuple[str, bool, int]] = Counter()
        self.took = Took()
        self.workers = 1

    def begin(self, plan: Plan, workers: int, expected: float | None = None) -> None:
        """Say what is to do, and how many seconds that is expected to take if anybody knows."""
        if not plan.todo:
            click.echo(f"all {len(plan.jobs)} cells are in the store", err=True)
            return
        from tqdm import tqdm

        about = "" if expected is None else f", about {self.clock(expected)}"
        where = f"on {workers or 'no'} worker processes"
        click.echo(f"{len(plan.todo)} of {len(plan.jobs)} cells to run{plan.apart}, {where}{about}", err=True)
        self.left.update((job.cell.task.name, job.cell.tests_only, job.cell.n_train) for job in plan.todo)
        self.workers = max(1, workers)
        form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} cells, {elapsed} gone{postfix}"
        interval = 0.5 if sys.stderr.isatty() else 10
        self.bar = tqdm(total=len(plan.todo), bar_format=form, mininterval=interval, file=sys.stderr)

    def step(self, record: Record) -> None:
        """Count one record."""
        task = record.cell.task.name
        kind = task, record.cell.tests_only, record.cell.n_train
        self.left[kind] -= 1
        self.took.add(*kind, record.seconds)
        self.bar.set_postfix_str(f"{self.time_left()} left, {record.label} on {task} done", refresh=False)
        self.bar.update()

    def stopping(self) -> None:
        """Say what the first Ctrl-C does; in a signal handler, so without the buffers that it may interrupt."""
        os.write(2, b"\nstopping when the cells under way are done; Ctrl-C again stops now\n")

    def time_left(self) -> str:
        """Return the time left; "over" it while some task has no finished cell yet."""
        seconds, unknown = self.took.left(((*kind, n) for kind, n in self.left.items()), self.workers)
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
