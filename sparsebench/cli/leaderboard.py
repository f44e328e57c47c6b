"""The command leaderboard."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin

import click

from sparsebench.board.tables import FORMATS, Choice
from sparsebench.cli.terminal import PATH, folder_argument, joined, notes, output, table, write
from sparsebench.errors import UserError
from sparsebench.files import write_whole
from sparsebench.stats import style

if TYPE_CHECKING:
    import pandas as pd

    from sparsebench.board.board import Board
    from sparsebench.board.judge import Leaderboard
    from sparsebench.board.tables import Report
    from sparsebench.records.store import Store

HTML, BIBTEX = "html", "bibtex"
MOST_CONTRADICTIONS = 5
"""Largest number of contradictions of a board that --check prints."""


@dataclass(frozen=True)
class _Options:
    """The options of the command, which describes them; `choice` has those of tables."""

    folder: Path
    form: str
    by: str | None
    view: str
    check: bool
    update: bool
    picture: Path | None
    quantity: str | None
    strategies: str | None
    columns_of_paper: str | None
    title: str | None
    against: Path | None
    link: str | None
    url: str | None
    speed: Path | None
    loss: float | None
    choice: Choice
    notes: bool
    output: Path | None

    @property
    def names(self) -> list[str]:
        """The names in `strategies`. Commas in parentheses separate the parameters of a strategy."""
        parts = re.split(r",(?![^(]*\))", self.strategies or "")
        return [part.strip() for part in parts if part.strip()]


@click.command()
@folder_argument
@click.option("--format", "form", type=click.Choice([*FORMATS, HTML, BIBTEX]), default="table", show_default=True)
@click.option("--by", type=click.Choice(["task"]), help="One row for each task and model.")
@click.option(
    "--view",
    type=click.Choice(["board", "pairs", "matched", "paper", "shifts"]),
    default="board",
    show_default=True,
    help="The board; comparisons of all pairs; rows of equal MACs or equal accuracy, and MACs and images/s at a loss; "
    "the table of a paper; or accuracy and rank on each set of pictures.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Test whether boards and documents match the records.",
)
@click.option(
    "--update",
    is_flag=True,
    help="Write the boards in FOLDER, including new boards, and the documents that show them.",
)
@click.option(
    "--picture", type=PATH, metavar="FILE", help="Draw the board as PNG, SVG or PDF, depending on the suffix of FILE."
)
@click.option(
    "--of",
    "quantity",
    type=click.Choice(["accuracy", "speed", "iou", "gap", "samples", "relevance", "shares"]),
    help="What the picture shows: accuracy over MACs or over images/s (speed), IoU of predicted patches, reduction of "
    "the spurious gap, N50 of trials, the sample complexity (images to target, or N50) over the share of relevant "
    "tokens among those that stay, or accuracy over their share in the pictures.  [default: accuracy]",
)
@click.option(
    "--strategies",
    multiple=True,
    callback=joined,
    metavar="NAMES",
    help="Strategies, separated by commas: the only ones in tables, besides dense, or those that a picture names.  "
    "[default: all, or the best in a picture]",
)
@click.option(
    "--width",
    "columns_of_paper",
    type=click.Choice(["one", "two"]),
    help="Width of the picture: one or two columns of a paper.  [default: two]",
)
@click.option(
    "--title",
    metavar="TEXT",
    help="Title of the picture or the page; '' for a picture without one.  [a page: the usual one; a picture: data and "
    "networks, or none in one column]",
)
@click.option(
    "--against",
    type=PATH,
    metavar="FOLDER",
    help="Rank correlation with the board of another run, by budget; with --picture as a heat map.",
)
@click.option("--link", metavar="ADDRESS", help="Address below the title of the page, such as that of a paper.")
@click.option(
    "--url",
    metavar="ADDRESS",
    help="Address that the page will have; that of a folder ends with /. Previews of links to it then have a picture, "
    "which is written beside the page.",
)
@click.option(
    "--speed",
    type=PATH,
    metavar="FOLDER",
    help="Take images/s, and for the table of a paper also latency and memory, from a folder of sparsebench speed.",
)
@click.option(
    "--loss",
    type=click.FloatRange(0, 100),
    metavar="POINTS",
    help="Points of accuracy below dense at which --view matched compares MACs and images/s.  [default: 2]",
)
@table
@notes
@output
def leaderboard(**values: Any) -> None:
    """Show the leaderboard of a run's FOLDER, or of all submissions in FOLDER.

    The board depends only on the records. html is one offline page with all tables and charts; bibtex has sparsebench
    and the board's strategies, data sets and trained weights, each work once. --check exits with 1 if files differ or
    if a record contradicts itself.
    """
    options = _Options(**values)
    _check_needs(options)
    if options.against is not None:
        _give(_agreement(options, options.against), options, options.picture or options.output)
        return
    if options.picture is not None:
        _draw(options, options.picture)
        return
    if options.check or options.update:
        if options.names:
            raise UserError("--check and --update compare whole boards", next_step="leave --strategies out")
        sys.exit(_update(options.folder) if options.update else _check(options.folder))
    _check_form(options)
    content = _page(options) if options.form == HTML else _text(options).encode("utf-8", "replace")
    _give(content, options, options.output)


def _give(content: bytes, options: _Options, file: Path | None) -> None:
    """Write a content to a file, or show it."""
    if file is None:
        write(content.decode("utf-8"), options.form)
        return
    write_whole(file, content)
    click.echo(f"written: {file}", err=True)


def _check_needs(options: _Options) -> None:
    """Raise UserError if an option is given that needs a picture, a page, another view, or a single board."""
    _refuse_beside(options)
    if options.view not in ("paper", "matched"):
        _refuse({"--speed": options.speed}, "a table with images/s", next_step="add --view paper or --view matched")
    if options.loss is not None and math.isnan(options.loss):
        raise UserError("--loss", got="nan", allowed="points from 0 to 100")
    if options.picture is not None and options.output is not None:
        raise UserError("--picture and -o write different files", next_step="leave one of them out")
    if options.view != "matched":
        has_loss = options.loss is not None
        _refuse({"--loss": has_loss}, "the view of equal accuracy", next_step="add --view matched")
    _refuse_for_submissions(options)
    if options.against is not None:
        _refuse_beside_another_board(options)


def _refuse_beside_another_board(options: _Options) -> None:
    """Raise UserError if an option is given that needs a single board."""
    alone = {
        "--check": options.check,
        "--update": options.update,
        "--view": options.view != "board",
        "--by": options.by,
        "--of": options.quantity,
        "--title": options.title,
    }
    _refuse(alone, "one board", next_step="leave --against out")
    is_no_table = options.form in (HTML, BIBTEX)
    _refuse({"--against": is_no_table}, "a table", got=f"--format {options.form}", allowed=list(FORMATS))


def _check_form(options: _Options) -> None:
    """Raise UserError if a page would go to a terminal, or if options of tables are given for another form."""
    if options.form == HTML and options.output is None and sys.stdout.isatty():
        raise UserError("an HTML page cannot be shown in a terminal", next_step="give -o FILE.html")
    if options.form in (HTML, BIBTEX):
        of_tables = {
            "--columns": options.choice.names,
            "--strategies": options.names,
            "--view": options.view != "board",
        }
        _refuse(of_tables, "a table", got=f"--format {options.form}", allowed=list(FORMATS))


def _agreement(options: _Options, other: Path) -> bytes:
    """Return the table or the heat map of the rank correlations with another board."""
    from sparsebench.board import orders
    from sparsebench.board.judge import judge
    from sparsebench.board.reading import read
    from sparsebench.board.tables import render

    kind = style.form_of("--picture", options.picture) if options.picture is not None else ""
    first, second = (judge(read(folder)) for folder in (options.folder, other))
    if options.picture is not None:
        width = options.columns_of_paper or "two"
        boards = options.folder.resolve().name, other.resolve().name
        return style.content(orders.draw(first, second, options.names, width, boards), kind)
    table = orders.agreement(first, second, options.names)
    return render(table, options.form, options.choice).encode("utf-8", "replace")


def _refuse(options: Mapping[str, object], needed: str, **hints: Any) -> None:
    """Raise UserError with hints if one of the options is given, as they need something else."""
    for name, value in options.items():
        if value:
            raise UserError(f"{name} needs {needed}", **hints)


def _refuse_beside(options: _Options) -> None:
    """Raise UserError if an option of pictures or pages is given, and neither a picture nor a page is."""
    if options.picture is None:
        of_pictures = {"--of": options.quantity, "--width": options.columns_of_paper}
        _refuse(of_pictures, "a picture", next_step="add --picture FILE.png")
    if options.form != HTML or options.picture is not None:
        of_pages = {"--link": options.link, "--url": options.url}
        _refuse(of_pages, "a page", next_step="add --format html -o FILE.html")
    if options.form != HTML and options.picture is None:
        _refuse({"--title": options.title}, "a page or a picture", next_step="add --format html or --picture FILE.png")


def _refuse_for_submissions(options: _Options) -> None:
    """Raise UserError if a folder has several submissions, and an option is given that needs a single board."""
    from sparsebench.publish.collection import is_collection

    folder = options.folder
    given = {"--check": options.check, "--update": options.update, "--view": options.view != "board"}
    if is_collection(folder):
        _refuse(
            given,
            "the folder of a run or of a board",
            got=f"{folder}, whose submissions have one board",
            next_step=f"`sparsebench leaderboard {folder}` shows it, and --format and -o write it",
        )


def _board(folder: Path) -> Board:
    """Return the board of a run's folder or submission, or of all submissions in a folder."""
    from sparsebench.board.board import gather
    from sparsebench.publish.collection import collect, is_collection
    from sparsebench.publish.submission import badges

    return collect(folder).board() if is_collection(folder) else gather(folder, badges(folder))


def _draw(options: _Options, file: Path) -> None:
    """Draw the picture of a board into a file."""
    from sparsebench.board import picture, relevance, shares

    quantity = options.quantity or "accuracy"
    width = options.columns_of_paper or "two"
    form = style.form_of("--picture", file)
    board = _board(options.folder)
    if quantity == relevance.QUANTITY:
        if options.title is not None:
            raise UserError(f"--of {quantity} has a title of its own for each task", next_step="leave --title out")
        figure = relevance.draw(board, options.names, width)
    elif quantity == shares.QUANTITY:
        figure = shares.draw(board, options.names, width, options.title)
    elif quantity == picture.SPEED:
        figure = picture.over_speed(board, options.names, width, options.title)
    else:
        figure = picture.draw(board, quantity, options.names, width, options.title)
    write_whole(file, style.content(figure, form))
    click.echo(f"written: {file}", err=True)


def _page(options: _Options) -> bytes:
    """Return the page of a board. If its address is known, also write the picture of previews beside it."""
    from sparsebench.board import picture
    from sparsebench.board.published import page
    from sparsebench.publish.collection import TITLE, is_collection

    board = _board(options.folder)
    title = options.title or (TITLE if is_collection(options.folder) else "")
    link, url = options.link or "", options.url or ""
    if not url:
        return page(board, title=title, link=link)

    if options.output is None or options.output.suffix == ".png":
        raise UserError("--url needs a file, beside which the picture is written", next_step="give -o FILE.html")
    file = options.output.with_suffix(".png")
    content = page(board, title=title, link=link, url=url, picture_url=urljoin(url, quote(file.name)))
    first, *_ = picture.quantities(board)
    write_whole(file, style.content(picture.draw(board, first)))
    click.echo(f"written: {file}", err=True)
    return content


def _check(folder: Path) -> int:
    """Compare the boards in a folder, and the documents that show them, with their records; return the exit code."""
    from sparsebench.board import published
    from sparsebench.publish.submission import badges, contradictions

    folders = published.boards(folder)
    for place in published.without_boards(folder):
        click.echo(f"{place}: has records and no board; --update writes it")
    n_different = n_contradicted = 0
    for board in folders:
        names = [path.name for path in published.differences(published.board_files(board, badges(board)))]
        click.echo(_state(board, "files that differ from its records", names))
        n_different += bool(names)
        conflicts = list(contradictions(board))
        n_contradicted += bool(conflicts)
        for text in conflicts[:MOST_CONTRADICTIONS]:
            click.echo(f"{board}: {text}")
        if len(conflicts) > MOST_CONTRADICTIONS:
            click.echo(f"{board}: and {len(conflicts) - MOST_CONTRADICTIONS} more contradictions")
    if n_contradicted:
        click.echo(f"records of {n_contradicted} boards contradict themselves: run their cells again", err=True)
    if n_different:
        click.echo(
            f"{n_different} of {len(folders)} boards differ; sparsebench leaderboard {folder} --update", err=True
        )

    stale = published.differences(published.documents(folder))
    for path in stale:
        click.echo(f"{path}: does not show what is in {folder}")
    if stale:
        documents = f"{len(stale)} document{'s' if len(stale) > 1 else ''}"
        click.echo(f"{documents} differ; run `sparsebench leaderboard {folder} --update`", err=True)
    return int(bool(n_different or n_contradicted or stale))


def _update(folder: Path) -> int:
    """Write the boards in a folder, also new ones, and the documents that show them; return the exit code."""
    from sparsebench.board import published
    from sparsebench.publish.submission import badges
    from sparsebench.records.manifests import MANIFEST

    if (folder / MANIFEST).is_file():
        raise UserError(
            f"{folder} is a submission, to which no files are added",
            next_step=f"`sparsebench leaderboard {folder} -o FILE` writes its board to another place",
        )
    folders = [folder] if (folder / "records").is_dir() else published.boards(folder, new=True)
    for board in folders:
        names = [path.name for path in published.write(published.board_files(board, badges(board)))]
        click.echo(_state(board, "written", names))
    for path in published.write(published.documents(folder)):
        click.echo(f"{path}: written")
    return 0


def _state(board: Path, state: str, names: Sequence[str]) -> str:
    return f"{board}: {state}: {', '.join(names)}" if names else f"{board}: matches its records"


def _of_submissions(options: _Options) -> str:
    """Return the board of all submissions in a folder as a text."""
    from sparsebench.publish.collection import collect

    collection = collect(options.folder)
    if options.form == BIBTEX:
        return "\n\n".join([*collection.board().bibtex, ""])
    report = collection.report(by_task=options.by is not None)
    if options.form in ("csv", "json"):
        for line in collection.notes:
            click.echo(line, err=True)
    return _rendered(report, options)


def _rendered(report: Report, options: _Options) -> str:
    """Return the tables of a report as a text, with the strategies that are asked for."""
    from sparsebench.board import views
    from sparsebench.board.tables import render

    shown = views.only(report, options.names) if options.names else report
    return render(shown, options.form, options.choice)


def _text(options: _Options) -> str:
    """Return the tables of a board, or its citations, as a text."""
    from sparsebench.board import at_loss, views
    from sparsebench.board.board import bibtex
    from sparsebench.board.judge import judge
    from sparsebench.board.reading import frame_of, read
    from sparsebench.board.tables import render
    from sparsebench.publish.collection import is_collection
    from sparsebench.publish.submission import badges
    from sparsebench.records.store import Store

    if is_collection(options.folder):
        return _of_submissions(options)
    opened = Store(options.folder)
    records = frame_of(read(opened, badges=badges(options.folder)))
    if options.form == BIBTEX:
        return "\n\n".join([*bibtex(opened, records), ""])
    result = judge(records, "task" if options.view == "shifts" else options.by)
    if options.view == "paper":
        from sparsebench.paper.claims import add_published

        report = views.paper(result.rankings, options.speed, options.names)
        return render(add_published(report, result.rankings), options.form, options.choice)
    if options.view == "matched":
        loss = at_loss.LOSS if options.loss is None else options.loss
        return _rendered(views.matched([*result.rankings, *result.sections], loss, options.speed), options)
    if options.view != "board":
        compared = getattr(views, options.view)(result.rankings)
        return _rendered(compared, options)
    notes = _notes(options, result, records, opened)
    whole = options.form != "latex" and not options.choice.names and not options.names
    return _rendered(views.report(result, notes, whole=whole), options)


def _notes(options: _Options, judged: Leaderboard, records: pd.DataFrame, opened: Store) -> list[str]:
    """Return the notes below the tables of a board. For forms that hold only a table, print notes instead."""
    from sparsebench.board.notes import machines, notes_on, unequal

    if options.form in ("csv", "json"):
        for line in (*unequal(judged.comparisons, opened), *machines(records)):
            click.echo(line, err=True)
        return []
    technical = options.notes or options.output is not None or options.form != "table"
    return notes_on(records, judged, opened, technical=technical)
