"""sparsebench leaderboard."""

from __future__ import annotations

from pathlib import Path

import click

from sparsebench.board.columns import FORMATS


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--by", type=click.Choice(["task"]), help="A row a task and model as well.")
def leaderboard(folder: Path, form: str, by: str | None) -> None:
    """Print the leaderboard of a run's FOLDER, from its records alone."""
    from sparsebench.board import flat
    from sparsebench.board.build import judge
    from sparsebench.board.entries import METRICS
    from sparsebench.board.notes import notes_on
    from sparsebench.board.tables import render

    records = flat.frame(folder, METRICS)
    judged = judge(records, by)
    click.echo(render(judged.rows, form, notes_on(records, judged.contests)), nl=False)
