"""Pictures that were decoded once, as files of pixels that every process maps into its memory.

A file is named by what is in it: the fingerprint of the pictures, how they were cut and resized, and the versions of
that and of Pillow. It is never changed, and there whole or not at all, whoever else writes it at the same time. One
process makes it while the others wait, where files can be locked.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np

from sparsebench.errors import UserError
from sparsebench.records.files import CACHE, cache_folder

log = logging.getLogger(__name__)

VERSION = 2
"""Of how pictures are decoded, cut and resized; a change of pixels needs the next number."""

LARGE = 2 * 10**9
"""Bytes of an array that are too many for the memory of each of several processes."""

SUFFIX = ".pixels.npy"


def keep_pixels(name: str, shape: tuple[int, ...], rows: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
    """Return the uint8 array of that name, from its file if there is a whole one, else made and kept for the next.

    Args:
        name: says what is in it: content, size, and how it was cut.
        shape: (n, ...) of the array.
        rows: makes it, one of the n after the other.

    Returns:
        An array that is mapped, not read; what is written to it stays in memory. Where no file can be written it is
        in memory altogether.

    Raises:
        UserError: the disk has no room for more than `LARGE` bytes.
    """
    where = cache_folder()
    if where is None:
        _warn("there is no home directory")
        return _in_memory(shape, rows)
    path = where / f"{name}-v{VERSION}-pillow{_pillow()}{SUFFIX}"
    if (pixels := _map(path, shape)) is not None:
        return pixels
    with _lock(path):
        pixels = _map(path, shape)  # by who was before
        if pixels is None and _write(path, shape, rows):
            pixels = _map(path, shape)
    return _in_memory(shape, rows) if pixels is None else pixels


def _pillow() -> str:
    import PIL

    return PIL.__version__


def _in_memory(shape: tuple[int, ...], rows: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
    out = np.empty(shape, dtype=np.uint8)
    for place, row in zip(out, rows(), strict=True):
        place[:] = row
    return out


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Wait until no other process makes this file; where there are no locks, go on.

    The lock's file goes with the lock. Who waited for it then looks for the array first, so nothing is made twice.
    """
    lock = path.with_name(f".{path.name}.lock")
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            lock.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(lock.open("wb"))
            stack.callback(lock.unlink, missing_ok=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _header(shape: tuple[int, ...]) -> bytes:
    """Return the bytes with which the .npy file of such an array begins."""
    head = BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return head.getvalue()


def _map(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the array of a file, or None unless the file is exactly as long and begins as it should."""
    header = _header(shape)
    try:
        with path.open("rb") as file:
            whole = os.fstat(file.fileno()).st_size == len(header) + math.prod(shape)
            if whole and file.read(len(header)) == header:
                return np.memmap(file, dtype=np.uint8, mode="c", offset=len(header), shape=shape)
    except OSError:
        pass
    return None


def _write(path: Path, shape: tuple[int, ...], rows: Callable[[], Iterable[np.ndarray]]) -> bool:
    """Write the file, or say why not, once, and return False. What is written is whole before it has its name.

    Raises:
        UserError: the disk has no room for it, nor has the memory of each process.
    """
    size = math.prod(shape)
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with part.open("xb") as file:
            file.write(_header(shape))
            for row in rows():
                file.write(row.astype(np.uint8, copy=False).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and size > LARGE:
            raise UserError(
                f"{path.parent} has no room for the decoded pictures, {size / 1e9:.1f} GB",
                next_step=f"make room, or set {CACHE} to a folder that has it",
            ) from error
        _warn(f"{path.parent}: {error.strerror or error}")
        return False
    finally:
        with suppress(OSError):
            part.unlink()
    return True


def check() -> None:
    """Warn if no file can be written, before workers find out one by one."""
    where = cache_folder()
    if where is None:
        _warn("there is no home directory")
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        _warn(f"{where}: {error.strerror or error}")


@lru_cache
def _warn(reason: str) -> None:
    """Warn once a process and reason."""
    log.warning("decoded pictures are not kept (%s); set %s to a folder that can be written", reason, CACHE)


def _files() -> list[Path]:
    """Return the files of the cache, those included that a stopped process left half-written; no other's."""
    where = cache_folder()
    if where is None or not where.is_dir():
        return []
    return [path for path in where.iterdir() if SUFFIX in path.name]


def size() -> tuple[int, int]:
    """Return the number of files and of bytes."""
    sizes = []
    for path in _files():
        with suppress(OSError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def clear() -> tuple[int, int]:
    """Remove every file; return how many, and how many bytes.

    Raises:
        OSError: one cannot be removed.
    """
    bytes_ = size()
    for path in _files():
        path.unlink(missing_ok=True)
    return bytes_
