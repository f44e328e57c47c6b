"""A run's folder while the run is under way: whether its name still leads to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsebench.errors import UserError

Identity = tuple[int, int]
"""Which file or folder something is, whatever it is called: its device and its number there."""


def identity(file: Path | int) -> Identity | None:
    """Return which file a path or a descriptor leads to, or None if to none."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def check(folder: Path, known: Identity | None) -> None:
    """Raise UserError if the name of a folder leads to another than the known one, or to none; None knows nothing."""
    if known is not None and identity(folder) != known:
        raise UserError(
            f"{folder} was removed or replaced while the run was under way, so nothing more is written",
            next_step="put it back and give the same command again: it goes on with what the folder has",
        )


@contextmanager
def hold(folder: Path, known: Identity | None) -> Iterator[Path]:
    """Yield a path that leads to the known folder whatever takes its name meanwhile; outside Linux its own name.

    Raises:
        UserError: its name leads to another by now.
    """
    if known is None or sys.platform != "linux":
        yield folder
        return
    check(folder, known)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def check_link(folder: Path, pattern: str) -> None:
    """Raise UserError for a link to a folder that has other things only than the pattern says: not a run's."""
    if folder.is_symlink() and folder.is_dir() and not any(folder.glob(pattern)) and any(folder.iterdir()):
        raise UserError(
            f"{folder} is a link to a folder that is no run's", got=os.path.realpath(folder),
            next_step="remove the link, or give that folder itself as --out",
        )  # fmt: skip
