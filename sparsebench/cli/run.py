"""Commands for runs: run, its dry run, and status."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tabulate import tabulate

from sparsebench.board.tables import FORMATS, Choice
from sparsebench.cli.terminal import (
    OF_PROBES,
    PLACE,
    REQUEST,
    Guided,
    complete,
    folder_argument,
    notes,
    options,
    table,
    write,
)
from sparsebench.errors import UserError, few, plain
from sparsebench.files import cache_folder
from sparsebench.plan.jobs import Job
from sparsebench.plan.request import Execution, Files, Request, values_of
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import ANSWERS, Record
from sparsebench.runner.progress import Progress, Underway, cells_of, clock, left_of, remedy, time_of, underway
from sparsebench.strategy.budget import AUTO, FULL
from sparsebench.strategy.spec import fill
from sparsebench.tasks.sources.files import quick_check

if TYPE_CHECKING:
    import pandas as pd

    from sparsebench.board.board import Board
    from sparsebench.plan.forecast import Forecast
    from sparsebench.plan.plan import Plan

ALSO = {"strategy": "plugin"}
"""Other names of options."""


@click.command(cls=Guided, context_settings={"token_normalize_func": lambda name: ALSO.get(name, name)})
@click.argument("strategies", nargs=-1, metavar="[STRATEGY|FILE.py[:PARAM=V]]...", shell_complete=complete)
@options(*REQUEST, "tasks", "seeds", "batch", "shard", *OF_PROBES, *PLACE)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="Format of the printed leaderboard.",
)
@table
@notes
def run(
    strategies: tuple[str, ...], form: str, choice: Choice, notes: bool, dry_run: bool, out: Path, **values: Any
) -> None:
    """Run strategies and print the leaderboard.

    The suite determines the tasks, models, budgets and baselines.

    Give strategies as arguments or with --plugin. Both may be repeated.

    Results in the folder are not computed again: the same command resumes a stopped run. The exit code is 0 for
    success, 1 if cells failed or pictures cannot be read, 2 if the command is wrong.
    """
    from sparsebench.api import execute
    from sparsebench.runner.run import plan_of

    request, files, execution = read_options(values | {"plugins": (*strategies, *values["plugins"])}, dry_run)
    if dry_run:
        forecast(lambda: plan_of(request, files, execution, Registry(), out))
        return
    folder = store.Store(out)
    with Progress(out) as progress:
        board, finished = execute(request, files, execution, folder, progress)
    _write_tables(board, finished, folder, form, choice, notes=notes)
    click.echo(f"written: {out}/leaderboard.md, .csv, .json, .png, .html", err=True)
    _warn(board, finished, folder, out)
    click.echo(_next_step(finished, out), err=True)
    sys.exit(1 if len(_lost(finished)) else 0)


def _write_tables(
    board: Board, finished: pd.DataFrame, folder: store.Store, form: str, choice: Choice, *, notes: bool
) -> None:
    """Write the tables of a board to standard output, with technical notes if asked for, or in a form for files."""
    from sparsebench.board.notes import notes_on
    from sparsebench.board.tables import render
    from sparsebench.board.views import report

    all_notes = notes or form != "table"
    lines = board.notes if all_notes else notes_on(finished, board.judged, folder, technical=False)
    content = report(board.judged, lines, whole=form != "latex" and not choice.names)
    write(render(content, form, choice), form)


def _warn(board: Board, finished: pd.DataFrame, folder: store.Store, out: Path) -> None:
    """Warn of results that are no better than chance, and name strategies of earlier runs that are not shown."""
    from sparsebench.board.notes import below_chance

    for line in below_chance(finished):
        click.echo(f"warning: {line}", err=True)
    shown = {*board.judged.rows["strategy"], *finished["strategy"]}
    others = sorted(_strategies_in(folder) - shown)
    if others:
        names = few(others, width=60)
        click.echo(f"{out} also has results of {names}: `sparsebench leaderboard {out}` shows all", err=True)


def _lost(finished: pd.DataFrame) -> pd.Series:
    """Return the statuses of the cells that gave no answer."""
    return finished[~finished["status"].isin(ANSWERS)]["status"]


def _next_step(finished: pd.DataFrame, out: Path) -> str:
    """Return what the user may do after a run with these records."""
    lost = _lost(finished)
    if len(lost):
        return remedy(lost)
    deployable = finished[finished["kind"] == "deployable"]["status"]
    if (deployable == "ok").any():
        return f"next: sparsebench leaderboard {out} --view pairs\npage: {out}/leaderboard.html"
    if len(deployable):
        return "next: give the strategy what it lacks (see the note above), and run the same command"
    return f"next: sparsebench run STRATEGY --out {out}; `sparsebench list` has strategies"


def _strategies_in(folder: store.Store) -> set[str]:
    """Return the strategies with records in a folder, with their parameters, without baselines and oracles."""
    records = folder.index()
    pairs = zip(records["strategy"].to_pylist(), records["kind"].to_pylist(), strict=True)
    return {strategy for strategy, kind in pairs if kind == "deployable"}


def read_options(values: Mapping[str, Any], dry_run: bool) -> tuple[Request, Files, Execution]:
    """Return the request, files and execution of a command's options, see `values_of`. A dry run downloads nothing."""
    return values_of({**values, "download": bool(values.get("download")) and not dry_run})


def forecast(make_plan: Callable[[], Plan]) -> None:
    """Print the cells to run with their expected time and memory, pictures to decode, and numbers of class folders.

    If all cells only test trained weights and none has run before, their networks are timed on the device. Pictures are
    not read again if they seem unchanged since a command read them.
    """
    with quick_check():
        plan = make_plan()
    registry = Registry()
    for file in {file for job in plan.todo for file in job.files}:  # files may define tasks
        registry.load_file(Path(file))
    lines = [f"{len(plan.todo)} of {len(plan.jobs)} cells to run"]
    lines += _pictures_to_decode(plan, registry)
    lines += plan.changes
    lines += _networks_of(plan)
    lines.append(_times(plan, registry))
    lines += _token_counts(plan, registry)
    lines += _numbers_of_class_folders(plan)
    click.echo("\n".join(lines))


def _pictures_to_decode(plan: Plan, registry: Registry) -> list[str]:
    from sparsebench.plan.locate import pictures_of

    pictures = pictures_of(plan.todo, registry, plan.locations)
    number = sum(picture.shape[0] for picture in pictures)
    megabytes = sum(picture.size for picture in pictures) / 1e6
    if not number:
        return []
    return [f"{number:,} pictures to decode first, {megabytes:,.1f} MB in {cache_folder()}; nothing is decoded now"]


def _networks_of(plan: Plan) -> list[str]:
    """Return a line with the names of the user's weight files, if there are any."""
    from sparsebench.plan.locate import file_names

    used = {job.cell.model.params.get("weights") for job in plan.jobs}
    names = sorted(plain(file) for name, file in file_names(plan.located).items() if name in used)
    return [f"{len(names)} network{'s' * (len(names) > 1)}: {', '.join(names)}"] if names else []


def _times(plan: Plan, registry: Registry) -> str:
    """Return a table of the cells to run, with their expected time and memory, by task and strategy."""
    expected, memory = plan.forecast, 0
    only_tests = not any(registry.task(job.cell.task.name).trains for job in plan.todo)
    if plan.todo and only_tests and not any(expected.seconds(job) for job in plan.todo):
        from sparsebench.inspection.speed import expect_tests
        from sparsebench.runner.devices import first_of

        expected, memory = expect_tests(plan, registry, first_of(plan.device))
    groups: defaultdict[tuple[str, str], list[Job]] = defaultdict(list)
    for job in plan.todo:
        groups[job.cell.task.name, job.label].append(job)
    rows = []
    for (task, label), jobs in [*sorted(groups.items()), (("all", ""), plan.todo)]:
        rows.append({"task": task, "strategy": label, "cells": len(jobs), **_totals(jobs, expected, memory)})
    return tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True)


MOST_COUNTS = 40
"""Most lines of token counts in a forecast."""


def _token_counts(plan: Plan, registry: Registry) -> list[str]:
    """Return lines with the tokens after each block, for each strategy and budget on deep networks."""
    from sparsebench.measure.schedule import TokenSchedule, counts_text
    from sparsebench.plan.contenders import closed_cost

    lines: dict[str, None] = {}
    for job in plan.todo:
        cell = job.cell
        cls = registry.strategy(cell.strategy.name).cls
        if not job.requested or not cls.budgeted or cell.budget == FULL:
            continue
        _, task, model = registry.resolve(cell)
        cost = closed_cost(task, model)
        if cost is None or cost.depth == 1:
            continue
        name = f"{task.name}, {job.label}, {cell.budget.label}"
        strategy = fill(cls, cell.strategy.params, f"strategy '{cls.name}'")
        if cell.budget.schedule == AUTO:
            lines[f"{name}: chosen on each network"] = None
        else:
            schedule = TokenSchedule(cell.budget, strategy.traits(), cost)
            lines[f"{name}: {counts_text(strategy, schedule)}"] = None
    if len(lines) > MOST_COUNTS:
        return [*list(lines)[:MOST_COUNTS], f"and {len(lines) - MOST_COUNTS} other schedules"]
    return list(lines)


def _numbers_of_class_folders(plan: Plan) -> list[str]:
    from sparsebench.tasks.sources.labels import numbering

    lines = {(job.cell.task.name, numbering(job.cell.task.params)) for job in plan.jobs}
    return [f"{task}: class folders are numbered {line}" for task, line in sorted(lines) if line]


def _totals(jobs: Sequence[Job], expected: Forecast, bytes_: int) -> dict[str, str]:
    """Return the expected time on one worker and the memory; "unknown" unless similar cells were run or timed."""
    seconds = [expected.seconds(job) for job in jobs]
    times = [value for value in seconds if value is not None]
    sizes = [size for job in jobs if (size := expected.memory(job) or bytes_)]
    return {
        "worker time": str(timedelta(seconds=ceil(sum(times)))) if len(times) == len(seconds) else "unknown",
        "GiB": f"{max(sizes) / 2**30:.2f}" if sizes else "unknown",
    }


@click.command()
@folder_argument
def status(folder: Path) -> None:
    """Show the progress of the runs in a FOLDER.

    The table has the numbers of cells done, failed, running and left for each strategy. The time left is estimated.
    """
    opened = store.Store(folder)
    records = list(opened.records().values())
    runs = underway(folder).values()
    if not records and not runs:
        raise UserError(f"no records in {folder}, and no run under way")

    # The strategy of each cell that is left: of the runs, and of other shards.
    started = opened.newest()
    left_of_run: dict[str, Mapping[str, str]] = {}
    of_runs: dict[str, str] = {}
    of_others: dict[str, str] = {}
    for name, cells in cells_of(folder).items():
        left_of_run[name] = left_of(cells.own, started)
        of_runs |= left_of_run[name]
        of_others |= left_of(cells.others, started)

    rows = _counts(records, (of_others | of_runs).values(), [run for run in runs if run.alive])
    write(f"{tabulate(rows, headers='keys', tablefmt='simple')}\n")
    for run in runs:
        left = len(left_of_run[run.cells]) if run.cells in left_of_run else sum(run.left.values())
        write(f"the run on {plain(run.host)} (process {run.pid}){_state_of(run, left)}\n")
    if not runs:
        click.echo("no run is under way")
    rest = len(of_others.keys() - of_runs.keys())
    if rest:
        write(f"{rest} cells of other shards have no record: run these shards\n")


def _state_of(run: Underway, left: int) -> str:
    """Return the end of a sentence about a run: what is left, and for how long it runs or is silent."""
    if run.alive:
        longest = f"the longest running cell: {clock(time.time() - run.since)}"
        return f": {left} cells without a record, {time_of(run.seconds, 'about ')}; {longest}"
    silent = "" if run.stopped else f", or has not reported for {clock(time.time() - run.updated)}"
    return f" was stopped with {left} cells left{silent}: run the same command again to continue"


def _counts(records: Iterable[Record], left: Iterable[str], runs: Iterable[Underway]) -> list[dict[str, str | int]]:
    """Return the numbers of cells of each strategy, one row per strategy.

    Args:
        records: the records that count.
        left: the strategy of each cell that is left, running cells included.
        runs: the runs under way.
    """
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        counts[record.label]["done" if record.status in ANSWERS else "failed"] += 1
    for label in left:
        counts[label]["left"] += 1
    for run in runs:
        for label, n in run.running.items():
            running = min(n, counts[label]["left"])  # a cell may have got its record since the run said that it runs
            counts[label]["running"] += running
            counts[label]["left"] -= running
    rows = []
    for label in sorted(counts):
        row: dict[str, Any] = {"strategy": plain(label)}
        for name in ("done", "failed", "running", "left"):
            row[name] = counts[label][name]
        rows.append(row)
    return rows
