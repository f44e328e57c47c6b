"""The folder of a run as an argument: the one that was written last here, unless it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sparsebench.errors import UserError


def newest_folder(here: Path) -> Path:
    """Return the run's folder in `here` whose records were written last.

    Raises:
        UserError: there is none.
    """
    folders: dict[Path, float] = {}
    for path in sorted((*here.glob("*/records/*.jsonl"), *here.glob("*/records/*.parquet"))):
        folder = path.parents[1]
        folders[folder] = max(folders.get(folder, 0.0), path.stat().st_mtime)
    if not folders:
        raise UserError("FOLDER is missing, and no run has written one here", next_step="name it, or sparsebench run")
    return max(folders, key=lambda path: folders[path])


def named_or_last(given: Path | str | None) -> Path:
    """Return the folder that is given, or else the one written last here, and say which it is; see `newest_folder`."""
    if given is not None:
        return Path(given)
    folder = newest_folder(Path())
    click.echo(f"folder: {folder}", err=True)
    return folder


argument: Callable[[Any], Any] = click.argument(
    "folder",
    metavar="[FOLDER]",
    type=click.Path(path_type=Path),
    required=False,
    callback=lambda _context, _parameter, given: named_or_last(given),
)
"""Gives a command the argument `folder`."""
