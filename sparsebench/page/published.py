"""Boards that are published: whether their files are what their records give."""

from __future__ import annotations

from pathlib import Path

from sparsebench.board.gather import gather
from sparsebench.errors import UserError
from sparsebench.page.files import files
from sparsebench.records import store
from sparsebench.records.files import content_or_none

SAME = (".md", ".csv", ".json", ".html")
"""Files that are the same bytes anywhere; pictures hang on the version of what draws them."""
NAME = "leaderboard.csv"


def boards(folder: Path) -> list[Path]:
    """Return the folders of boards: the one given, or those below it.

    Raises:
        UserError: there is none.
    """
    folders = sorted(path.parent for path in folder.rglob(NAME) if (path.parent / "records").is_dir())
    if not folders:
        raise UserError(
            f"no board in {folder}", allowed=f"folders with {NAME} and the records behind it",
            next_step="sparsebench leaderboard DIR --update writes one",
        )  # fmt: skip
    return folders


def differing(folder: Path) -> list[str]:
    """Return the names of a board's files that are not what its records give."""
    contents = {name: content for name, content in files(gather(folder)).items() if Path(name).suffix in SAME}
    return [name for name, content in contents.items() if content_or_none(folder / name) != content]


def update(folder: Path) -> list[str]:
    """Write a board's files anew where they are not what its records give, and return their names."""
    made = files(gather(folder))
    changed = [name for name, content in made.items() if content_or_none(folder / name) != content]
    for name in changed:
        store.write_whole(folder / name, made[name])
    return changed
