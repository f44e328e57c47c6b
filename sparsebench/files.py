"""Files that are there whole or not at all, hashes of their contents, and the user's cache folder."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from sparsebench.errors import UserError, plain, reason_of

log = logging.getLogger(__name__)

CACHE = "SPARSEBENCH_CACHE"
"""The variable that names the user's cache folder."""


def check_writable(folder: Path, next_step: str | None = None) -> Path:
    """Return a folder, made if it was not there; UserError unless files can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise UserError(f"cannot write to {plain(folder)}: {reason_of(error)}", next_step=next_step) from error


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or "" if it is none or cannot be read."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def content_or_none(path: Path, most: int | None = None) -> bytes | None:
    """Return the content of a file of at most so many bytes, or None where there is none that can be read."""
    with suppress(OSError):
        if path.is_file() and (most is None or path.stat().st_size <= most):
            return path.read_bytes()
    return None


def files_in(folder: Path, end: str) -> list[Path]:
    """Return the files of a folder under names that end so and are not hidden, by name; nothing if it is not there."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(end) and not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def leave_out(path: Path, error: Exception) -> None:
    """Warn of a file that cannot be read."""
    log.warning("%s is left out: %s", plain(path.name), reason_of(error))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write that is there, when all is written, either whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another run that ends may just have removed it, as it was empty
            part.touch()
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there either whole or not at all; see `whole_file`."""
    with whole_file(path) as file:
        file.write(content)


def cache_folder() -> Path:
    """Return where what can be made again is kept.

    That is $SPARSEBENCH_CACHE, else $XDG_CACHE_HOME/sparsebench or ~/.cache/sparsebench.

    Raises:
        UserError: there is no home.
    """
    if given := os.environ.get(CACHE):
        return Path(given).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "sparsebench"
    except RuntimeError as error:
        raise UserError("there is no home directory", next_step=f"set {CACHE} to a folder") from error
