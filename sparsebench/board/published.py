"""What is written of boards: files beside their records, and the documents that show them; and whether they match.

Between `<!-- NAME board -->` and `<!-- end of NAME board -->` a page of docs/ has NAME/leaderboard.md, and README.md
what the board tells first; between `<!-- NAME verdicts -->` and its end NAME/verdicts.md. docs/results/NAME/FILE is a
copy of NAME/FILE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from sparsebench.board import page, picture
from sparsebench.board.board import Board, gather
from sparsebench.board.tables import render
from sparsebench.board.views import best, report
from sparsebench.errors import UserError
from sparsebench.files import content_or_none, write_whole
from sparsebench.stats import style

REDUCED, ALIKE = 8, 0.95
"""Pictures are made so many times smaller to be compared; they show the same from this correlation of greys on."""
NAME = "leaderboard.csv"
KEPT = (".md", ".csv", ".png")
"""Endings of what lies beside the records of a published board; page and JSON are made of the records when wanted."""
README = "README.md"
MARKED = re.compile(rb"(<!-- ([\w-]+) (board|verdicts) -->\n).*?(<!-- end of \2 \3 -->)", re.DOTALL)


def publish(board: Board, out: Path) -> None:
    """Write OUT/leaderboard.{md,csv,json,png,html}, and a picture each of the spurious gap and sample complexity."""
    write({out / name: content for name, content in files(board).items()})


def files(board: Board) -> dict[str, bytes]:
    """Return what is written of a board, by the files' names; a pure function of it."""
    content = report(board.judged, board.notes)
    texts = {f"leaderboard.{form}": render(content, form).encode() for form in ("md", "csv", "json")}
    first, *others = picture.measured(board)
    pictures = {"leaderboard.png": first} | {f"leaderboard-{what}.png": what for what in others}
    drawn = {name: style.content(picture.draw(board, what)) for name, what in pictures.items()}
    return texts | drawn | {"leaderboard.html": page.render(board)}


def boards(folder: Path) -> list[Path]:
    """Return the folders of boards: the one given, or those below it.

    Raises:
        UserError: there is none.
    """
    folders = sorted(path.parent for path in folder.rglob(NAME) if (path.parent / "records").is_dir())
    if not folders:
        raise UserError(
            f"no board in {folder}", allowed=f"folders with {NAME} and the records behind it",
            next_step="sparsebench run STRATEGY --out DIR makes one",
        )  # fmt: skip
    return folders


def made(folder: Path) -> dict[Path, bytes]:
    """Return what must lie beside the records of a board, by its paths."""
    content = files(gather(folder))
    return {folder / name: value for name, value in content.items() if name.endswith(KEPT)}


def documents(folder: Path) -> dict[Path, bytes]:
    """Return what the documents beside a folder of boards must hold, by their paths; parts of other folders stay."""
    root = folder.resolve().parent
    pages = [path for path in (root / README, *sorted((root / "docs").rglob("*.md"))) if path.is_file()]
    wanted = {path: _filled(path.read_bytes(), folder, path == root / README) for path in pages}
    for path in sorted((root / "docs" / "results").glob("*/*")):
        source = content_or_none(folder / path.parent.name / path.name) if path.suffix != ".md" else None
        wanted |= {} if source is None else {path: source}
    return wanted


def _filled(content: bytes, folder: Path, is_readme: bool) -> bytes:
    """Return a document with each marked part as the folder has it."""

    def part(match: re.Match[bytes]) -> bytes:
        begin, name, kind, end = match.groups()
        board = folder / name.decode()
        shown = content_or_none(board / ("leaderboard.md" if kind == b"board" else "verdicts.md"))
        if shown is None:
            return match[0]
        if is_readme and kind == b"board":
            shown = "".join(render(best(one), "md") for one in gather(board).judged.rankings).encode()
        return begin + shown + end

    return MARKED.sub(part, content)


def differing(wanted: Mapping[Path, bytes]) -> list[Path]:
    """Return the paths whose files do not hold what they must, or pictures that do not show it."""
    return [path for path, content in wanted.items() if not _is(content_or_none(path), content)]


def write(wanted: Mapping[Path, bytes]) -> list[Path]:
    """Write the files that do not hold what they must, and return their paths."""
    changed = [path for path, content in wanted.items() if content_or_none(path) != content]
    for path in changed:
        write_whole(path, wanted[path])
    return changed


def _is(content: bytes | None, wanted: bytes) -> bool:
    """Say whether a file holds what is made, or a picture shows it: another version of matplotlib draws other bytes."""
    if content == wanted or content is None:
        return content == wanted
    try:
        pictures = [Image.open(BytesIO(one), formats=("PNG",)) for one in (wanted, content)]
        if pictures[0].size != pictures[1].size:  # known before anything is decoded
            return False
        first, second = (np.asarray(picture.convert("L").reduce(REDUCED), np.float64).ravel() for picture in pictures)
    except (OSError, ValueError, SyntaxError):
        return False
    return bool(second.std() > 0 and np.corrcoef(first, second)[0, 1] >= ALIKE)
