"""The folder of a run as an argument: the one that was written last here, unless it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from sparsebench.errors import UserError


def last_written(here: Path) -> Path:
    """Return the run's folder in `here` whose records were written last.

    Raises:
        UserError: there is none.
    """
    folders: dict[Path, float] = {}
    for path in sorted(here.glob("*/records/*.jsonl")):
        folder = path.parents[1]
        folders[folder] = max(folders.get(folder, 0.0), path.stat().st_mtime)
    if not folders:
        raise UserError("FOLDER is missing, and no run has written one here", next_step="name it, or sparsebench run")
    return max(folders, key=lambda path: folders[path])


def _named_or_last(_context: click.Context, _parameter: click.Parameter, given: Path | None) -> Path:
    if given is not None:
        return given
    folder = last_written(Path())
    click.echo(f"folder: {folder}", err=True)
    return folder


argument: Callable[[Any], Any] = click.argument(
    "folder", metavar="[FOLDER]", type=click.Path(path_type=Path), required=False, callback=_named_or_last
)
"""Gives a command the argument `folder`."""
