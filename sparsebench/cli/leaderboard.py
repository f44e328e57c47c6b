"""sparsebench leaderboard."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sparsebench.board.columns import FORMATS
from sparsebench.errors import UserError

HTML, BIBTEX = "html", "bibtex"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--format", "form", type=click.Choice([*FORMATS, HTML, BIBTEX]), default="table", show_default=True)
@click.option("--by", type=click.Choice(["task"]), help="A row a task and model as well; the page has both.")
@click.option(
    "--view",
    type=click.Choice(["board", "pairs", "matched"]),
    default="board",
    show_default=True,
    help="The board; every two strategies compared; or rows of equal MACs and of equal accuracy.",
)
@click.option("--check", is_flag=True, help="Say whether the boards in FOLDER are what their records give.")
@click.option("--update", is_flag=True, help="Write the boards in FOLDER anew, or one where there is none.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="[standard output]")
def leaderboard(
    folder: Path, form: str, by: str | None, view: str, check: bool, update: bool, output: Path | None
) -> None:
    """Show the leaderboard of a run's FOLDER, made from its records alone.

    html is one page with all of it, charts included, that any browser opens without a network; bibtex what the
    strategies in it cite. --check leaves with 1 if files differ.
    """
    from sparsebench.sweep.store import write_whole

    if check or update:
        sys.exit(_published(folder, update))
    if form == HTML and output is None and sys.stdout.isatty():
        raise UserError("a page is not for the terminal", next_step="give -o FILE.html")
    content = _page(folder) if form == HTML else _text(folder, form, by, view)
    if output is None:
        click.echo(content, nl=False)
        return
    write_whole(output, content)
    click.echo(f"written: {output}", err=True)


def _published(folder: Path, write: bool) -> int:
    """Compare the boards in a folder with their records, or write them; return how the command leaves."""
    from sparsebench.board import published

    wrong = 0
    folders = [folder] if write and (folder / "records").is_dir() else published.boards(folder)
    for one in folders:
        found = published.update(one) if write else published.differing(one)
        said = "written" if write else "not what the records give"
        click.echo(f"{one}: {said}: {', '.join(found)}" if found else f"{one}: as it must be")
        wrong += bool(found) and not write
    if wrong:
        click.echo(f"{wrong} of {len(folders)} boards differ; sparsebench leaderboard {folder} --update", err=True)
    return int(wrong > 0)


def _page(folder: Path) -> bytes:
    from sparsebench.board import page
    from sparsebench.board.gather import gather

    return page.render(gather(folder))


def _text(folder: Path, form: str, by: str | None, view: str) -> bytes:
    from sparsebench.board import flat, views
    from sparsebench.board.build import judge
    from sparsebench.board.entries import METRICS
    from sparsebench.board.gather import bibtex
    from sparsebench.board.notes import notes_on
    from sparsebench.board.tables import render

    records = flat.frame(folder, METRICS)
    if form == BIBTEX:
        return "\n\n".join([*bibtex(folder, records), ""]).encode()
    judged = judge(records, by)
    if view == "pairs":
        text = render(views.pairs(judged.contests), form, (), views.PAIRS, views.LEGEND_OF_PAIRS)
    elif view == "matched":
        text = render(views.matched(judged.contests), form, (), views.MATCHED, views.LEGEND_OF_MATCHED)
    else:
        text = render(judged.rows, form, notes_on(records, judged.contests))
    return text.encode("utf-8", "replace")
