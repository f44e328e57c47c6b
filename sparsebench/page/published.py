"""Boards that are published: whether their files are what their records give."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from sparsebench.board.gather import gather
from sparsebench.errors import UserError
from sparsebench.page.files import files
from sparsebench.records.files import content_or_none, write_whole

REDUCED, ALIKE = 8, 0.95
"""Pictures are made so many times smaller to be compared; they show the same from this correlation of greys on."""
NAME = "leaderboard.csv"
KEPT = (".md", ".csv", ".png")
"""Endings of what lies beside the records of a published board; page and JSON are made of the records when wanted."""


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


def differing(folder: Path) -> list[str]:
    """Return the names of a board's files that are not what its records give."""
    made = _made(folder)
    return [name for name, content in made.items() if not _is(content_or_none(folder / name), content)]


def _made(folder: Path) -> dict[str, bytes]:
    made = files(gather(folder))
    return {name: content for name, content in made.items() if name.endswith(KEPT)}


def _is(content: bytes | None, made: bytes) -> bool:
    """Say whether a file holds what is made, or a picture shows it: another version of matplotlib draws other bytes."""
    if content == made or content is None:
        return content == made
    try:
        pictures = [Image.open(BytesIO(one), formats=("PNG",)) for one in (made, content)]
        if pictures[0].size != pictures[1].size:  # known before anything is decoded
            return False
        first, second = (np.asarray(picture.convert("L").reduce(REDUCED), np.float64).ravel() for picture in pictures)
    except (OSError, ValueError, SyntaxError):
        return False
    return bool(second.std() > 0 and np.corrcoef(first, second)[0, 1] >= ALIKE)


def update(folder: Path) -> list[str]:
    """Write a board's files anew where they are not what its records give, and return their names."""
    made = _made(folder)
    changed = [name for name, content in made.items() if content_or_none(folder / name) != content]
    for name in changed:
        write_whole(folder / name, made[name])
    return changed
