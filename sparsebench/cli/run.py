"""sparsebench run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sparsebench.board.columns import FORMATS
from sparsebench.board.fit import Choice
from sparsebench.cli.options import PLACE, REQUEST, callbacks_of, options
from sparsebench.cli.width import table
from sparsebench.planning.request import values_of
from sparsebench.progress import Progress, remedy


@click.command()
@options(*REQUEST, "tasks", "seeds", "shard", *PLACE)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="How the leaderboard is printed.",
)
@table
def run(form: str, choice: Choice, dry_run: bool, out: Path, **values: Any) -> None:
    """Run a suite with the strategies named beside the baselines, and print the leaderboard.

    What the folder has is not run again: the same command goes on where it was stopped. Leaves with 0 if all is well,
    1 if cells failed, 2 if the command is wrong.
    """
    from sparsebench.api import execute
    from sparsebench.board.budget_table import text
    from sparsebench.board.build import judge
    from sparsebench.board.notes import notes_on
    from sparsebench.records.record import ANSWERS

    request, files, how = values_of(values)
    if dry_run:
        from sparsebench.cli.dry_run import forecast
        from sparsebench.engine.run import plan_of
        from sparsebench.plugin.registry import Registry

        click.echo(forecast(plan_of(request, replace(files, download=False), how, Registry(), out)))
        return
    with Progress(out) as progress:
        finished = execute(request, files, how, out, callbacks_of(progress))
    judged = judge(finished)
    notes = notes_on(finished, judged.single)
    click.echo(text(judged.rows, judged.budgets, form, notes, choice, judged.columns), nl=False)
    click.echo(f"written: {out}/leaderboard.md, .csv, .json, .png, .html", err=True)
    lost = finished[~finished["status"].isin(ANSWERS)]["status"]
    if len(lost):
        click.echo(remedy(lost), err=True)
    sys.exit(int(bool(len(lost))))
