"""sparsebench status."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparsebench.cli.progress import Progress, Took

if TYPE_CHECKING:
    from sparsebench.engine.underway import Underway
    from sparsebench.records.record import Record


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
def status(folder: Path) -> None:
    """Say how far the runs of a FOLDER are: cells done, failed, running and left, by strategy, and the time left."""
    from tabulate import tabulate

    from sparsebench.engine.underway import underway
    from sparsebench.errors import UserError
    from sparsebench.records import store

    records, runs = list(store.read(folder).values()), underway(folder)
    if not records and not runs:
        raise UserError(f"no records in {folder}, and no run under way")
    alive = [run for run in runs if run.alive]
    click.echo(tabulate(_rows(records, alive), headers="keys", tablefmt="simple"))
    for run in runs:
        click.echo(_about(run, records))
    if not runs:
        click.echo("no run is under way")


def _rows(records: Iterable[Record], runs: Iterable[Underway]) -> list[dict[str, str | int]]:
    """Return a row a strategy."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        good = record.status in ("ok", "unsupported", "skipped")
        counts[record.label]["done" if good else "failed"] += 1
    for run in runs:
        for cells in run.left:
            counts[cells.label]["left"] += cells.n
        for cells in run.running:
            counts[cells.label]["running"] += cells.n
            counts[cells.label]["left"] -= cells.n
    columns = ("done", "failed", "running", "left")
    return [{"strategy": label} | {name: counts[label][name] for name in columns} for label in sorted(counts)]


def _about(run: Underway, records: Sequence[Record]) -> str:
    from sparsebench.planning.planner import apart

    where = f"the run on {run.host} (process {run.pid})"
    left = sum(cells.n for cells in run.left)
    if not run.alive:
        silent = Progress.clock(time.time() - run.updated)
        return f"{where} was stopped with {left} cells left, or says nothing since {silent}: the same command goes on"
    longest = Progress.clock(max((time.time() - cells.since for cells in run.running), default=0.0))
    split = apart(left, sum(cells.n for cells in run.left if cells.network))
    about = f"{left} cells without a record{split}, {_time_left(run, records)}"
    return f"{where}: {about}; the longest at work so far: {longest}"


def _time_left(run: Underway, records: Iterable[Record]) -> str:
    """Return about how long a run will take, from what like cells took so far."""
    took = Took()
    for record in records:
        if record.seconds:
            took.add(record.cell.task.name, record.cell.tests_only, record.cell.n_train, record.seconds)
    cells = ((some.task, some.tests_only, some.n_train, some.n) for some in run.left)
    seconds, unknown = took.left(cells, run.workers)
    return ("over " if unknown else "about ") + Progress.clock(seconds)
