"""sparsebench run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.board.columns import FORMATS
from sparsebench.board.fit import Choice
from sparsebench.cli.guide import Guided, complete
from sparsebench.cli.options import PLACE, REQUEST, callbacks_of, options
from sparsebench.cli.width import notes, show, table
from sparsebench.planning.request import values_of
from sparsebench.progress import Progress, remedy

if TYPE_CHECKING:
    import pandas as pd

ALSO = {"strategy": "plugin"}
"""Other names of options."""


@click.command(cls=Guided, context_settings={"token_normalize_func": lambda name: ALSO.get(name, name)})
@click.argument("named", nargs=-1, metavar="[STRATEGY|FILE.py[:PARAM=V]]...", shell_complete=complete)
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
@notes
def run(
    named: tuple[str, ...], form: str, choice: Choice, notes: bool, dry_run: bool, out: Path, **values: Any
) -> None:
    """Run a suite with the strategies named beside the baselines, and print the leaderboard.

    A strategy is named by itself or after --plugin, both as often as wanted.

    What the folder has is not run again: the same command goes on where it was stopped. Exits with 0 if all is well,
    1 if cells failed or pictures cannot be read, 2 if the command is wrong.
    """
    from sparsebench.api import execute
    from sparsebench.board.budget_table import text
    from sparsebench.board.build import judge
    from sparsebench.board.findings import findings
    from sparsebench.board.notes import below_chance, notes_on
    from sparsebench.records.record import ANSWERS

    request, files, how = values_of(values | {"plugins": (*named, *values["plugins"])})
    if dry_run:
        from sparsebench.cli.dry_run import forecast
        from sparsebench.engine.run import plan_of
        from sparsebench.plugin.registry import Registry

        forecast(plan_of(request, replace(files, dry=True), how, Registry(), out))
        return
    with Progress(out) as progress:
        finished = execute(request, files, how, out, callbacks_of(progress))
    judged = judge(finished)
    said = notes_on(finished, judged.single, out, technical=notes or form != "table")
    show(text(judged.rows, judged.budgets, form, said, choice, judged.columns), form)
    if form == "table":
        show("".join(f"\n{line}" for line in findings(judged.rows)) + "\n", form)
    click.echo(f"written: {out}/leaderboard.md, .csv, .json, .png, .html", err=True)
    for line in below_chance(finished):
        click.echo(f"warning: {line}", err=True)
    lost = finished[~finished["status"].isin(ANSWERS)]["status"]
    click.echo(remedy(lost) if len(lost) else f"next: {_next(finished, out)}", err=True)
    sys.exit(int(bool(len(lost))))


def _next(finished: pd.DataFrame, out: Path) -> str:
    """Return the command to try after a run without failures."""
    asked = finished[finished["kind"] == "deployable"]["status"]
    if (asked == "ok").any():
        return f"sparsebench leaderboard {out} --view pairs\npage: {out}/leaderboard.html"
    if len(asked):
        return "give the strategy what the note above says that it lacks, and run the same command"
    return f"sparsebench run STRATEGY --out {out}, with one of sparsebench list"
