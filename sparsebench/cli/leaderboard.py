"""sparsebench leaderboard."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sparsebench.board.columns import FORMATS
from sparsebench.errors import UserError

HTML = "html"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice([*FORMATS, HTML]), default="table", show_default=True)
@click.option("--by", type=click.Choice(["task"]), help="A row a task and model as well; the page has both.")
@click.option(
    "--view",
    type=click.Choice(["board", "pairs", "matched"]),
    default="board",
    show_default=True,
    help="The board; every two strategies compared; or rows of equal MACs and of equal accuracy.",
)
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="[standard output]")
def leaderboard(folder: Path, form: str, by: str | None, view: str, output: Path | None) -> None:
    """Show the leaderboard of a run's FOLDER, made from its records alone.

    html is one page with all of it, charts included, that any browser opens without a network.
    """
    from sparsebench.sweep.store import write_whole

    if form == HTML and output is None and sys.stdout.isatty():
        raise UserError("a page is not for the terminal", next_step="give -o FILE.html")
    content = _page(folder) if form == HTML else _text(folder, form, by, view)
    if output is None:
        click.echo(content, nl=False)
        return
    write_whole(output, content)
    click.echo(f"written: {output}", err=True)


def _page(folder: Path) -> bytes:
    from sparsebench.board import page
    from sparsebench.board.gather import gather

    return page.render(gather(folder))


def _text(folder: Path, form: str, by: str | None, view: str) -> bytes:
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
    return text.encode("utf-8", "replace")
