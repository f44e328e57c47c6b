"""sparsebench leaderboard."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sparsebench.board.tables import FORMATS
from sparsebench.errors import UserError

HTML = "html"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice([*FORMATS, HTML]), default="table", show_default=True)
@click.option("--by", type=click.Choice(["task"]), help="A row a task and model as well; the page has both.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="[standard output]")
def leaderboard(folder: Path, form: str, by: str | None, output: Path | None) -> None:
    """Show the leaderboard of a run's FOLDER, made from its records alone.

    html is one page with all of it, charts included, that any browser opens without a network.
    """
    from sparsebench.sweep.store import write_whole

    if form == HTML and output is None and sys.stdout.isatty():
        raise UserError("a page is not for the terminal", next_step="give -o FILE.html")
    content = _page(folder) if form == HTML else _text(folder, form, by)
    if output is None:
        click.echo(content, nl=False)
        return
    write_whole(output, content)
    click.echo(f"written: {output}", err=True)


def _page(folder: Path) -> bytes:
    from sparsebench.board import page
    from sparsebench.board.gather import gather

    return page.render(gather(folder))


def _text(folder: Path, form: str, by: str | None) -> bytes:
    from sparsebench.api import load_flat
    from sparsebench.board.build import METRICS, build
    from sparsebench.board.notes import notes_on
    from sparsebench.board.tables import render

    flat = load_flat(folder, METRICS)
    return render(build(flat, by), form, notes_on(flat)).encode()
