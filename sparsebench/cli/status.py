"""sparsebench status."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from sparsebench.cli import folder as folders
from sparsebench.cli.guide import Guided
from sparsebench.cli.width import show
from sparsebench.progress import clock, time_of
from sparsebench.text import plain

if TYPE_CHECKING:
    from pathlib import Path

    from sparsebench.engine.underway import Underway
    from sparsebench.records.record import Record


@click.command(cls=Guided)
@folders.argument
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
    show(f"{tabulate(_rows(records, alive), headers='keys', tablefmt='simple')}\n")
    for run in runs:
        show(f"{_about(run)}\n")
    if not runs:
        click.echo("no run is under way")


def _rows(records: Iterable[Record], runs: Iterable[Underway]) -> list[dict[str, str | int]]:
    """Return a row a strategy."""
    from sparsebench.records.record import ANSWERS

    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        good = record.status in ANSWERS
        counts[record.label]["done" if good else "failed"] += 1
    for run in runs:
        for cells in run.left:
            counts[cells.label]["left"] += cells.n
        for cells in run.running:
            counts[cells.label]["running"] += cells.n
            counts[cells.label]["left"] -= cells.n
    columns = ("done", "failed", "running", "left")
    return [{"strategy": plain(label)} | {name: counts[label][name] for name in columns} for label in sorted(counts)]


def _about(run: Underway) -> str:
    from sparsebench.planning.planner import apart

    where = f"the run on {plain(run.host)} (process {run.pid})"
    left = sum(cells.n for cells in run.left)
    if not run.alive:
        silent = clock(time.time() - run.updated)
        return f"{where} was stopped with {left} cells left, or says nothing since {silent}: the same command goes on"
    longest = clock(max((time.time() - cells.since for cells in run.running), default=0.0))
    split = apart(left, sum(cells.n for cells in run.left if cells.network))
    about = f"{left} cells without a record{split}, {time_of(run.estimate, 'about ')}"
    return f"{where}: {about}; the longest at work so far: {longest}"
