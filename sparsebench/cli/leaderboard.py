"""sparsebench leaderboard."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sparsebench.board.columns import FORMATS
from sparsebench.board.fit import Choice
from sparsebench.cli import folder as folders
from sparsebench.cli.guide import Guided
from sparsebench.cli.width import notes, show, table
from sparsebench.errors import UserError

HTML, BIBTEX = "html", "bibtex"
SHOWN = 5
"""Cells of a board that --check names."""


@click.command(cls=Guided)
@folders.argument
@click.option("--format", "form", type=click.Choice([*FORMATS, HTML, BIBTEX]), default="table", show_default=True)
@click.option("--by", type=click.Choice(["task"]), help="A row a task and model as well; the page has both.")
@click.option(
    "--view",
    type=click.Choice(["board", "pairs", "matched"]),
    default="board",
    show_default=True,
    help="The board; every two strategies compared; or rows of equal MACs and of equal accuracy.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Say whether the boards in FOLDER, and documents that show them, are what records give.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Write the boards in FOLDER and documents that show them anew, or a board where there is none.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw it: a PNG, SVG or PDF, by the file's ending.",
)
@click.option(
    "--of",
    type=click.Choice(["accuracy", "gap", "samples"]),
    help="What the picture shows: accuracy over MACs, how the spurious gap shrinks, or the samples that are needed.  "
    "[default: accuracy]",
)
@click.option("--strategies", metavar="NAMES", help="Those that the picture names, with commas.  [default: the best]")
@click.option(
    "--width",
    "columns_of_paper",
    type=click.Choice(["one", "two"]),
    help="Of the picture: one column of a paper, or two.  [default: two]",
)
@table
@notes
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="[standard output]")
def leaderboard(
    folder: Path,
    form: str,
    by: str | None,
    view: str,
    check: bool,
    update: bool,
    picture: Path | None,
    of: str | None,
    strategies: str | None,
    columns_of_paper: str | None,
    choice: Choice,
    notes: bool,
    output: Path | None,
) -> None:
    """Show the leaderboard of a run's FOLDER, made from its records alone.

    html is one page with all of it, charts included, that any browser opens without a network; bibtex what the
    strategies in it cite. --check exits with 1 if files differ, or a record contradicts itself.
    """
    from sparsebench.records.files import write_whole

    chosen = {"--of": of, "--strategies": strategies, "--width": columns_of_paper}
    if picture is None and (given := [name for name, value in chosen.items() if value is not None]):
        raise UserError(f"{given[0]} is of a picture", next_step="give --picture FILE.png too")
    if picture is not None:
        _draw(folder, picture, of or "accuracy", strategies or "", columns_of_paper or "two")
        return
    if check or update:
        sys.exit(_compare_or_write(folder, update))
    if form == HTML and output is None and sys.stdout.isatty():
        raise UserError("a page is not for the terminal", next_step="give -o FILE.html")
    if choice.names and form in (HTML, BIBTEX):
        raise UserError("--columns is of tables", got=f"--format {form}", allowed=FORMATS)
    content = _page(folder) if form == HTML else _text(folder, form, by, view, choice, notes or output is not None)
    if output is None:
        show(content.decode("utf-8"), form)
        return
    write_whole(output, content)
    click.echo(f"written: {output}", err=True)


def _draw(folder: Path, file: Path, what: str, strategies: str, width: str) -> None:
    from sparsebench import style
    from sparsebench.board.gather import gather
    from sparsebench.board.picture_input import draw
    from sparsebench.records.files import write_whole

    form = style.form_of("--picture", file)
    names = [name for part in strategies.split(",") if (name := part.strip())]
    write_whole(file, style.content(draw(gather(folder), what, names, width), form))
    click.echo(f"written: {file}", err=True)


def _compare_or_write(folder: Path, write: bool) -> int:
    """Compare the boards in a folder with their records, or write them; return how the command leaves."""
    from sparsebench.board import documents
    from sparsebench.page import published
    from sparsebench.publish.consistent import contradictions
    from sparsebench.publish.folder import MANIFEST

    if write and (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is a submission, which has no other files than it was submitted with",
            next_step=f"sparsebench leaderboard {folder} -o FILE writes its board elsewhere",
        )
    wrong = contradicted = 0
    folders = [folder] if write and (folder / "records").is_dir() else published.boards(folder)
    for one in folders:
        names = published.update(one) if write else published.differing(one)
        said = "written" if write else "not what the records give"
        click.echo(f"{one}: {said}: {', '.join(names)}" if names else f"{one}: as it must be")
        wrong += bool(names) and not write
        torn = [] if write else list(contradictions(one))
        for text in torn[:SHOWN]:
            click.echo(f"{one}: {text}")
        if len(torn) > SHOWN:
            click.echo(f"{one}: and {len(torn) - SHOWN} more such cells")
        contradicted += bool(torn)
    if contradicted:
        click.echo(f"records of {contradicted} boards contradict themselves: run their cells again", err=True)
    if wrong:
        click.echo(f"{wrong} of {len(folders)} boards differ; sparsebench leaderboard {folder} --update", err=True)
    stale = documents.update(folder) if write else documents.differing(folder)
    for path in stale:
        click.echo(f"{path}: {'written' if write else f'does not show what is in {folder}'}")
    if stale and not write:
        click.echo(f"{len(stale)} documents differ; sparsebench leaderboard {folder} --update", err=True)
    return int(wrong + contradicted > 0 or (bool(stale) and not write))


def _page(folder: Path) -> bytes:
    from sparsebench import page
    from sparsebench.board.gather import gather

    return page.render(gather(folder))


def _text(folder: Path, form: str, by: str | None, view: str, choice: Choice, technical: bool) -> bytes:
    from sparsebench.board import budget_table, missing, reading, views
    from sparsebench.board.build import judge
    from sparsebench.board.entries import METRICS, frame_of, settings_of
    from sparsebench.board.findings import findings
    from sparsebench.board.gather import bibtex
    from sparsebench.board.notes import machines, notes_on

    records = reading.read(folder, frozenset(METRICS))
    if form == BIBTEX:
        return "\n\n".join([*bibtex(folder, records), ""]).encode()
    judged, chosen = judge(records, by), budget_table.table_of_choice
    if view == "pairs":
        text = chosen(views.pairs(judged.rankings), views.PAIRS, form, (), views.LEGEND_OF_PAIRS, choice)
    elif view == "matched":
        text = chosen(views.matches(judged.rankings), views.MATCHED, form, (), views.LEGEND_OF_MATCHED, choice)
    else:
        said = notes_on(records, judged.single, folder, technical=technical or form != "table")
        if form in ("csv", "json"):  # which hold a table and nothing else
            for line in (*missing.notes(settings_of(frame_of(records)), folder), *machines(records, folder)):
                click.echo(line, err=True)
        text = budget_table.text(judged.rows, judged.budgets, form, said, choice, judged.columns)
        if form == "table" and by is None:
            text += "".join(f"\n{line}" for line in findings(judged.rows)) + "\n"
    return text.encode("utf-8", "replace")
