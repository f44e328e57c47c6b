"""sparsebench leaderboard."""

from __future__ import annotations

from pathlib import Path

import click

from sparsebench.board.columns import FORMATS


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--by", type=click.Choice(["task"]), help="A row a task and model as well.")
@click.option(
    "--view",
    type=click.Choice(["board", "pairs", "matched"]),
    default="board",
    show_default=True,
    help="The board; every two strategies compared; or rows of equal MACs and of equal accuracy.",
)
def leaderboard(folder: Path, form: str, by: str | None, view: str) -> None:
    """Print the leaderboard of a run's FOLDER, from its records alone."""
    from sparsebench.board import flat, views
    from sparsebench.board.build import judge
    from sparsebench.board.entries import METRICS
    from sparsebench.board.notes import notes_on
    from sparsebench.board.tables import render

    records = flat.frame(folder, METRICS)
    judged = judge(records, by)
    if view == "pairs":
        text = render(views.pairs(judged.contests), form, (), views.PAIRS, views.LEGEND_OF_PAIRS)
    elif view == "matched":
        text = render(views.matched(judged.contests), form, (), views.MATCHED, views.LEGEND_OF_MATCHED)
    else:
        text = render(judged.rows, form, notes_on(records, judged.contests))
    click.echo(text, nl=False)
