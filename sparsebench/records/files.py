"""One opener for what lies in a folder of records, which may be a stranger's: plain files of bounded size, no links.

And one way to write a file that is there whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from sparsebench.errors import UserError
from sparsebench.text import plain

log = logging.getLogger(__name__)

MOST_BYTES, FEW_BYTES = 2**34, 2**21
"""Of a segment of records, and of any other file unless it is said."""
LINE_BYTES = 2**22
"""Of one record."""
MOST_FILES = 100_000
"""In one folder."""
CACHE = "SPARSEBENCH_CACHE"
"""The variable that names the user's cache folder."""


@contextmanager
def open_file(path: Path, most: int = FEW_BYTES) -> Iterator[BufferedReader]:
    """Open a plain file of at most so many bytes.

    Raises:
        OSError: it is something else, a link to one among them, or cannot be read.
    """
    # A pipe that took its place would be waited for, and a link followed.
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        opened = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe's end, or a socket
            raise OSError(errno.EINVAL, "it is a link, or no plain file", os.fspath(path)) from error
        raise
    with open(opened, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
        if info.st_size > most:
            raise OSError(errno.EFBIG, f"it has {info.st_size} bytes, more than {most}", os.fspath(path))
        yield file


def content_of(path: Path, most: int = FEW_BYTES) -> bytes:
    """Return the content of a plain file of at most so many bytes; see `open_file`."""
    with open_file(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return content


def content_or_none(path: Path, most: int = 2**28) -> bytes | None:
    """Return the content of a plain file, or None where there is none that can be read; see `open_file`."""
    try:
        return content_of(path, most)
    except OSError:
        return None


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read."""
    try:
        with open_file(path, MOST_BYTES) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def files_in(folder: Path, end: str) -> list[Path]:
    """Return what lies in a folder under names that end so and are not hidden, by name; nothing if it is not there.

    Raises:
        UserError: the folder is a link, or holds too much.
    """
    if folder.is_symlink():
        raise UserError(f"{folder} is a link, which is not followed", next_step="put the folder itself there")
    paths: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries, 1):
                if number > MOST_FILES:
                    raise UserError(f"{folder} holds more than {MOST_FILES} files")
                if entry.name.endswith(end) and not entry.name.startswith("."):
                    paths.append(folder / entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(paths)


def contents_in(folder: Path, end: str = ".json", most: int = FEW_BYTES) -> Iterator[tuple[Path, bytes]]:
    """Yield the files of `files_in` with their contents; what cannot be read is left out with a warning."""
    for path in files_in(folder, end):
        try:
            yield path, content_of(path, most)
        except OSError as error:
            leave_out(path, error)


def leave_out(path: Path, error: Exception) -> None:
    """Warn of a file that cannot be read."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    log.warning("%s is left out: %s", plain(path.name), plain(" ".join(str(reason).split()), 300))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write that is there, when all is written, either whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
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


def cache_folder() -> Path | None:
    """Return where what can be made again is kept; None where there is no home.

    That is $SPARSEBENCH_CACHE, else $XDG_CACHE_HOME/sparsebench or ~/.cache/sparsebench.
    """
    try:
        if given := os.environ.get(CACHE):
            return Path(given).expanduser()
        base = Path(os.environ.get("XDG_CACHE_HOME") or "")
        return (base if base.is_absolute() else Path.home() / ".cache") / "sparsebench"
    except RuntimeError:
        return None
