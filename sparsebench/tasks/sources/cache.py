"""Pictures by the thousand: all cores look at them, once a command, and what they become is kept for every process.

Decoded pictures are files of pixels that each process maps into its memory. A file is named by what is in it: the
fingerprint of the pictures, how they were cut and resized, and the versions of that and of Pillow. It is never changed,
and there whole or not at all. One process decodes while the others wait for it, where files can be locked.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from sparsebench.errors import UserError
from sparsebench.files import CACHE, cache_folder, check_writable, whole_file, write_whole

K = TypeVar("K")
T = TypeVar("T")

VERSION = 3
"""Of how pictures are decoded, cut and resized; a change of pixels needs the next number."""
SUFFIX, ABOUT = ".pixels.npy", ".pictures.json"
LOCK = "decoding.lock"
CHUNK = 16
"""Pictures that a thread takes at a time, at most."""
THREADS = 2
"""Of each core: one works while the other waits for the interpreter."""
NAMED = 1000
"""Bad pictures that a message names at most."""


class BadPicturesError(UserError):
    """Pictures that cannot be read.

    Attributes:
        reasons: why not, by what names each.
    """

    code: ClassVar[int] = 1

    def __init__(self, reasons: Mapping[str, str], total: int = 1):
        self.reasons = dict(reasons)
        names = [f"{name} ({reason})" for name, reason in itertools.islice(reasons.items(), NAMED)]
        more = f" and {len(reasons) - NAMED:,} more" if len(reasons) > NAMED else ""
        super().__init__(
            f"{len(reasons):,} of {total:,} pictures cannot be read: {', '.join(names)}{more}",
            next_step="mend or remove what cannot be read, or leave it out with --skip-bad",
        )


Tell = Callable[[str, int, int], None]
"""Told how far pictures are: what is done with them ("" for what takes little time), how many are done, of how many."""
_tell: ContextVar[Tell] = ContextVar("tell", default=lambda text, done, total: None)


@contextmanager
def telling(tell: Tell) -> Iterator[None]:
    """Have someone told, for a while, how far pictures are that are looked at."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def counter(text: str, total: int) -> Callable[[], None]:
    """Return what is to be called after each of so many pictures; who is told hears how many are done."""
    tell, done = _tell.get(), itertools.count(1)
    tell(text, 0, total)
    return lambda: tell(text, next(done), total)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_threads(
    work: Callable[[K], T], items: Sequence[K], count: Callable[[], None]
) -> tuple[dict[K, T], dict[K, BadPicturesError]]:
    """Return by item what `work` returns for it, and that error where it raises it; all cores do it.

    Threads will do, which need no main guard in scripts: Pillow, hashlib and numpy let go of the interpreter.

    Args:
        work: thread-safe.
        items: what it is done for.
        count: called after each, see `counter`.
    """
    threads = THREADS * cores()
    chunk = max(1, min(CHUNK, len(items) // (4 * threads)))
    good, bad = dict[K, T](), dict[K, BadPicturesError]()

    def attempt(part: Sequence[K]) -> list[tuple[K, T | BadPicturesError]]:
        outcomes: list[tuple[K, T | BadPicturesError]] = []
        for item in part:
            try:
                outcomes.append((item, work(item)))
            except BadPicturesError as error:
                outcomes.append((item, error))
        return outcomes

    with warnings.catch_warnings(), ThreadPoolExecutor(threads) as pool:
        warnings.simplefilter("ignore")  # Pillow's, of what it could still read
        parts = pool.map(attempt, [items[first : first + chunk] for first in range(0, len(items), chunk)])
        try:
            for item, outcome in itertools.chain.from_iterable(parts):
                if isinstance(outcome, BadPicturesError):
                    bad[item] = outcome
                else:
                    good[item] = outcome
                count()
        finally:
            pool.shutdown(cancel_futures=True)  # whoever stops it does not wait for the rest
    return good, bad


@dataclass(frozen=True)
class Pixels:
    """Pictures as one array of pixels, which is kept in a file.

    Attributes:
        name: says what is in it: content, size, and how pictures were cut.
        shape: (n, 3, height, width).
        row: makes (3, height, width) uint8, one of the n by its number, and is thread-safe; `BadPicturesError` where it
            cannot.
    """

    name: str
    shape: tuple[int, int, int, int]
    row: Callable[[int], np.ndarray]

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape)

    @property
    def path(self) -> Path:
        """The file that it is kept in."""
        return cache_folder() / f"{self.name}-{versions()}{SUFFIX}"

    def read(self) -> np.memmap | None:
        """Return it mapped from its file, or None if there is none that is whole."""
        try:
            pixels = np.lib.format.open_memmap(self.path, mode="c")
        except (OSError, ValueError, EOFError, SyntaxError):
            return None
        return pixels if pixels.dtype == np.uint8 and pixels.shape == self.shape else None

    def array(self) -> np.ndarray:
        """Return (n, 3, height, width) uint8, mapped from its file, which is made where there is none; see `decode`.

        What is written to it stays in memory.
        """
        if (pixels := self.read()) is None:
            decode([self])
            pixels = self.read()
        assert pixels is not None
        return pixels

    def write(self, count: Callable[[], None]) -> dict[str, str]:
        """Make its file, and return why pictures are bad: then there is none."""
        bad: dict[str, str] = {}
        with suppress(BadPicturesError), whole_file(self.path) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": self.shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            start, size = file.tell(), math.prod(self.shape[1:])

            def write(i: int) -> None:
                if os.pwrite(file.fileno(), self.row(i).tobytes(), start + i * size) < size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            errors = in_threads(write, range(self.shape[0]), count)[1].values()
            if bad := {name: reason for error in errors for name, reason in error.reasons.items()}:
                raise BadPicturesError(bad)  # so that the file is not kept
        return bad


def versions() -> str:
    """Return what decoded pictures depend on besides the pictures."""
    import PIL

    return f"v{VERSION}-pillow{PIL.__version__}"


def decode(arrays: Sequence[Pixels]) -> None:
    """Decode what is not kept yet, and keep it.

    Raises:
        BadPicturesError: all that are bad; what has none is kept.
        UserError: there is no room, no file can be written, or a picture is not what it was.
    """
    folder = check_writable(cache_folder(), f"set {CACHE} to a folder that can be written, for decoded pictures")
    with _lock(folder):
        missing = [array for array in arrays if array.read() is None]  # by who was before
        if not missing:
            return
        n, size = sum(array.shape[0] for array in missing), sum(array.size for array in missing)
        if (free := shutil.disk_usage(folder).free) < size:
            raise UserError(
                f"decoded pictures have no room in {folder}: they have {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB "
                "are free", next_step=f"make room, or set {CACHE} to a folder that has it",
            )  # fmt: skip
        count, bad = counter(f"{n:,} pictures to decode, {size / 1e9:.2f} GB in {folder}", n), dict[str, str]()
        for array in missing:
            bad |= array.write(count)
    if bad:
        raise BadPicturesError(bad, n)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Wait until no other process decodes, and take away what one left that was killed; go on where there are no locks.

    The lock goes with the process that has it, however that ends.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    with suppress(OSError):  # of a file system without locks
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _tell.get()("waiting for another command that decodes pictures", 0, 0)
            lock.acquire()
        for part in folder.glob(f".*{SUFFIX}.*.part"):
            part.unlink(missing_ok=True)
    try:
        yield
    finally:
        lock.release()


def keep_about(name: str, value: Any) -> None:
    """Keep what is known of pictures, a value of JSON, where a file can be written."""
    with suppress(UserError):
        write_whole(cache_folder() / f"{name}{ABOUT}", json.dumps(value).encode())


def read_about(name: str) -> Any:
    """Return what `keep_about` kept, or None."""
    try:
        return json.loads((cache_folder() / f"{name}{ABOUT}").read_bytes())
    except (OSError, ValueError):
        return None


def _files() -> list[Path]:
    """Return the files of the cache, those included that a stopped process left half-written; no other's."""
    return [path for end in (SUFFIX, ABOUT) for path in cache_folder().glob(f"*{end}*")]


def size() -> tuple[int, int]:
    """Return the number of files and of bytes."""
    files = _files()
    return len(files), sum(path.stat().st_size for path in files)


def clear() -> tuple[int, int]:
    """Remove every file; return how many, and how many bytes.

    Raises:
        OSError: one cannot be removed.
    """
    bytes_ = size()
    for path in _files():
        path.unlink(missing_ok=True)
    return bytes_
