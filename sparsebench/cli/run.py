"""sparsebench run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sparsebench.board.columns import FORMATS
from sparsebench.board.fit import Choice
from sparsebench.cli.options import distributed, request
from sparsebench.cli.progress import Progress
from sparsebench.cli.width import table


@click.command()
@request
@click.option("--task", "tasks", multiple=True, metavar="NAME[:PARAM=V...]", help="Only this task. Repeatable.")
@click.option("--seeds", type=int, help="Repetitions of each cell, in place of the suite's.")
@distributed
@click.option(
    "--dry-run", is_flag=True, help="Say what would be run, and how long that may take; run and write nothing."
)
@click.option(
    "--observe",
    multiple=True,
    metavar="NAME|FILE.py[:PARAM=V]",
    help="Tell it each record: tensorboard[:dir=DIR], mlflow[:uri=URI], or one's own. Repeatable.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="How the leaderboard is printed.",
)
@table
def run(form: str, choice: Choice, dry_run: bool, out: Path, **options: Any) -> None:
    """Run a suite with the strategies named beside the baselines, and print the leaderboard.

    What the folder has is not run again: the same command goes on where it was stopped. Leaves with 0 if all is well,
    1 if cells failed, 2 if the command is wrong.
    """
    from sparsebench.api import execute
    from sparsebench.board.budget_table import text
    from sparsebench.board.build import judge
    from sparsebench.board.notes import notes_on

    if dry_run:
        from sparsebench.cli.dry_run import foreseen

        click.echo(foreseen(out=out, **options))
        return
    with Progress(out) as progress:
        finished = execute(
            out=out, on_plan=progress.begin, on_record=progress.step, on_stop=progress.stopping, **options
        )
    judged = judge(finished)
    notes = notes_on(finished, judged.single)
    click.echo(text(judged.rows, judged.budgets, form, notes, choice, judged.columns), nl=False)
    click.echo(f"written: {out}/leaderboard.md, .csv, .json, .png, .html", err=True)
    sys.exit(int(not finished["status"].isin(("ok", "unsupported", "skipped")).all()))
