"""Atomic writing of files, locks on files, hashes of their contents, and the user's cache folder."""

from __future__ import annotations

import errno
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

CACHE = "SPARSEBENCH_CACHE"
"""The environment variable that names the user's cache folder."""


def check_writable(folder: Path, next_step: str | None = None) -> Path:
    """Create a folder if it is missing, and return it. Raise UserError if files cannot be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError) as error:  # ValueError: a null character
        raise UserError(f"cannot write to {plain(folder)}: {reason_of(error)}", next_step=next_step) from error


def content_hash(path: Path) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read or is not a file."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return ""


def content_or_none(path: Path, most: int | None = None) -> bytes | None:
    """Return the content of a file, or None if it has more than `most` bytes, cannot be read or is not a file."""
    with suppress(OSError):
        if path.is_file() and (most is None or path.stat().st_size <= most):
            return path.read_bytes()
    return None


def own_content(path: Path, most: int) -> bytes:
    """Return the content of a file in a stranger's folder.

    Links, pipes and larger files are not opened: they may lead out of the folder, or never end.

    Raises:
        UserError: it is no file of its own, or has more than `most` bytes.
        OSError: it cannot be read, as a folder.
    """
    if path.is_symlink() or not (path.is_file() or path.is_dir()):
        raise UserError("it is no file of its own")
    if path.stat().st_size > most:
        raise UserError("it is too large", allowed=f"{most} bytes")
    return path.read_bytes()


def with_lf(content: bytes) -> bytes:
    """Return a text with LF at the ends of its lines, as Git may check it out with CRLF; other contents as they are."""
    return content if b"\0" in content else content.replace(b"\r\n", b"\n")


def files_in(folder: Path, end: str) -> list[Path]:
    """Return the files in a folder whose names end with `end`, sorted, without hidden files; [] for no folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.name.endswith(end) and not path.name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []


def leave_out(path: Path, error: Exception) -> None:
    """Warn that a file is left out because it cannot be read."""
    log.warning("%s is left out: %s", plain(path.name), reason_of(error))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for atomic writing: afterwards the file is complete, or unchanged if an error occurs.

    Raises:
        UserError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another run that ends may have just removed the empty folder
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
    """Write a file atomically, see `whole_file`."""
    with whole_file(path) as file:
        file.write(content)


def lock(file: int, *, shared: bool = False) -> None:
    """Lock an open file until `unlock` or the end of the process. The lock does not wait.

    Locks of network file systems may hold on one machine only, or do nothing.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the system or the file system has no locks.
    """
    _check_locks()
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)


def unlock(file: int) -> None:
    """Release the lock on an open file. Closing is not enough: a process that was forked meanwhile holds it too."""
    with suppress(OSError):
        _check_locks()
        fcntl.flock(file, fcntl.LOCK_UN)


def lock_byte(file: int, place: int) -> None:
    """Lock one byte of an open file until `unlock_byte` or the end of the process; for errors see `lock`."""
    _check_locks()
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
    except PermissionError as error:  # POSIX allows both errors
        raise BlockingIOError from error


def unlock_byte(file: int, place: int) -> None:
    """Release the lock on one byte of an open file."""
    with suppress(OSError):
        _check_locks()
        fcntl.lockf(file, fcntl.LOCK_UN, 1, place)


def _check_locks() -> None:
    if fcntl is None:
        raise OSError(errno.ENOSYS, "this system has no file locks")


def cache_folder() -> Path:
    """Return the folder of files that can be computed again.

    It is $SPARSEBENCH_CACHE, else $XDG_CACHE_HOME/sparsebench, else ~/.cache/sparsebench.

    Raises:
        UserError: there is no home directory.
    """
    if folder := os.environ.get(CACHE):
        return Path(folder).expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "")
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "sparsebench"
    except RuntimeError as error:
        raise UserError("there is no home directory", next_step=f"set {CACHE} to a folder") from error
