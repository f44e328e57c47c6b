"""The cache of decoded pictures, which are decoded once, on all cores, for all processes.

A cache file of pixels is mapped into memory. Its name contains the fingerprint of the pictures, how they were cut and
resized, and the versions of this code and of Pillow. It is written atomically and never changed. One process decodes at
a time, and the others wait, if the file system supports locks.
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

from sparsebench.errors import UserError, is_out_of_memory
from sparsebench.files import CACHE, cache_folder, check_writable, whole_file, write_whole

K = TypeVar("K")
T = TypeVar("T")

VERSION = 4
"""Version of decoding, cutting and resizing. Increase it if pixels change."""
SUFFIX, ABOUT = ".pixels.npy", ".pictures.json"
LOCK = "decoding.lock"
CGROUP, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""The control groups of Linux, and the file that names those of this process."""
CHUNK = 16
"""Largest number of pictures that a thread takes at a time."""
THREADS = 2
"""Threads per core: one works while the other waits for the interpreter lock."""
NAMED = 1000
"""Largest number of bad pictures that a message names."""


class BadPicturesError(UserError):
    """Pictures that cannot be read.

    Attributes:
        reasons: why a picture cannot be read, by its name.
    """

    code: ClassVar[int] = 1

    def __init__(self, reasons: Mapping[str, str], total: int = 1):
        self.reasons = dict(reasons)
        names = [f"{name} ({reason})" for name, reason in itertools.islice(reasons.items(), NAMED)]
        more = f" and {len(reasons) - NAMED:,} more" if len(reasons) > NAMED else ""
        super().__init__(
            f"{len(reasons):,} of {total:,} pictures cannot be read: {', '.join(names)}{more}",
            next_step="repair or remove these pictures, or leave them out with --skip-bad",
        )


Tell = Callable[[str, int, int], None]
"""Shows progress: gets the text of the current work ("" if it is short), the pictures done, and their total number."""
_tell: ContextVar[Tell] = ContextVar("tell", default=lambda text, done, total: None)


@contextmanager
def telling(tell: Tell) -> Iterator[None]:
    """Within the context, report the progress of reading and decoding pictures to `tell`."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def counter(text: str, total: int) -> Callable[[], None]:
    """Return a function to call after each of `total` pictures; it reports the progress, see `telling`."""
    tell, done = _tell.get(), itertools.count(1)
    tell(text, 0, total)
    return lambda: tell(text, next(done), total)


def cores() -> int:
    """Return the number of cores that this process may use, rounded up if a container has only a part of one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _quota())))


def _quota() -> float:
    """Return the number of cores whose time the control groups of this process allow; infinity without a limit."""
    limits = [math.inf]
    for file in _quota_files():
        with suppress(OSError, ValueError):  # there is no such file, or the quota is "max"
            words = " ".join(path.read_text(encoding="utf-8") for path in file).split()
            quota, period = map(int, words)
            limits.append(quota / period if quota > 0 else math.inf)
    return min(limits)


def _quota_files() -> Iterator[tuple[Path, ...]]:
    """Yield the files that may have a quota and its period: of version 1, and of each group above in version 2."""
    yield tuple(CGROUP / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
    with suppress(OSError):
        for line in OWN_GROUP.read_text(encoding="utf-8").splitlines():
            if line.startswith("0::"):
                folder = CGROUP / line.removeprefix("0::").strip("/")
                yield from ((above / "cpu.max",) for above in (folder, *folder.parents))


def in_threads(
    work: Callable[[K], T], items: Sequence[K], count: Callable[[], None]
) -> tuple[dict[K, T], dict[K, BadPicturesError]]:
    """Call `work` for each item in threads; return its results by item, and the BadPicturesErrors that it raised.

    Threads use all cores, since Pillow, hashlib and numpy release the interpreter lock. Unlike processes they need no
    main guard in scripts.

    Args:
        work: a thread-safe function of an item.
        items: the items.
        count: called after each item, see `counter`.
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
        warnings.simplefilter("ignore")  # Pillow warns of damage that it can still read
        parts = pool.map(attempt, [items[first : first + chunk] for first in range(0, len(items), chunk)])
        try:
            for item, outcome in itertools.chain.from_iterable(parts):
                if isinstance(outcome, BadPicturesError):
                    bad[item] = outcome
                else:
                    good[item] = outcome
                count()
        finally:
            pool.shutdown(cancel_futures=True)  # do not wait for the rest after an error or Ctrl-C
    return good, bad


@dataclass(frozen=True)
class Pixels:
    """The pixels of pictures as one array in a cache file.

    Attributes:
        name: identifies the contents: fingerprint, size, and how pictures were cut.
        shape: (n, 3, height, width).
        row: returns picture i as (3, height, width) uint8, or raises `BadPicturesError`. It is thread-safe.
    """

    name: str
    shape: tuple[int, int, int, int]
    row: Callable[[int], np.ndarray]

    @property
    def size(self) -> int:
        """The size of the array in bytes."""
        return math.prod(self.shape)

    @property
    def path(self) -> Path:
        """The cache file."""
        return cache_folder() / f"{self.name}-{versions()}{SUFFIX}"

    def read(self) -> np.memmap | None:
        """Return the array mapped from the cache file, or None if there is no complete one.

        Raises:
            MemoryError: the file does not fit the address space.
        """
        try:
            pixels = np.lib.format.open_memmap(self.path, mode="c")
        except (OSError, ValueError, EOFError, SyntaxError) as error:
            if is_out_of_memory(error):
                raise MemoryError(f"{self.path.name} of {self.size / 1e9:.2f} GB cannot be mapped") from error
            return None
        return pixels if pixels.dtype == np.uint8 and pixels.shape == self.shape else None

    def array(self) -> np.ndarray:
        """Return (n, 3, height, width) uint8, mapped from the cache file, which is written first if needed.

        Changes of the array stay in memory. For errors see `decode` and `read`.
        """
        if (pixels := self.read()) is None:
            decode([self])
            pixels = self.read()
        if pixels is None:
            raise UserError(
                f"{self.path} was written and cannot be read", next_step=f"set {CACHE} to a folder on another disk"
            )
        return pixels

    def write(self, count: Callable[[], None]) -> dict[str, str]:
        """Write the cache file. If pictures are bad, write none and return the reasons by picture."""
        bad: dict[str, str] = {}
        with suppress(BadPicturesError), whole_file(self.path) as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": self.shape}
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            start = file.tell()
            size = math.prod(self.shape[1:])

            def write(i: int) -> None:
                if os.pwrite(file.fileno(), self.row(i).tobytes(), start + i * size) < size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            _, errors = in_threads(write, range(self.shape[0]), count)
            for error in errors.values():
                bad |= error.reasons
            if bad:
                raise BadPicturesError(bad)  # so that whole_file discards the file
        return bad


def versions() -> str:
    """Return the versions on which decoded pixels depend, for names of cache files."""
    import PIL

    return f"v{VERSION}-pillow{PIL.__version__}"


def decode(arrays: Sequence[Pixels]) -> None:
    """Decode the arrays that have no cache file, and write the files.

    Raises:
        BadPicturesError: pictures cannot be read. It names all of them; arrays without bad pictures are written.
        UserError: there is not enough disk space, a file cannot be written, or a picture has changed.
    """
    folder = check_writable(cache_folder(), f"set {CACHE} to a writable folder, for decoded pictures")
    with _lock(folder):
        missing = [array for array in arrays if array.read() is None]  # another process may have written some
        if not missing:
            return
        n = sum(array.shape[0] for array in missing)
        size = sum(array.size for array in missing)
        if (free := shutil.disk_usage(folder).free) < size:
            raise UserError(
                f"decoded pictures need {size / 1e9:.2f} GB in {folder}, and {free / 1e9:.2f} GB are free",
                next_step=f"free disk space, or set {CACHE} to a folder on another disk",
            )
        count = counter(f"{n:,} pictures to decode, {size / 1e9:.2f} GB in {folder}", n)
        bad: dict[str, str] = {}
        for array in missing:
            bad |= array.write(count)
    if bad:
        raise BadPicturesError(bad, n)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock on decoding, and remove partial files of killed processes. Without file locks, continue without it.

    The lock is released when its process ends, also if it is killed.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    with suppress(OSError):  # the file system has no locks
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
    """Store facts about pictures, a JSON value, in the cache, if it is writable."""
    with suppress(UserError):
        write_whole(cache_folder() / f"{name}{ABOUT}", json.dumps(value).encode())


def read_about(name: str) -> Any:
    """Return the value that `keep_about` stored, or None."""
    try:
        return json.loads((cache_folder() / f"{name}{ABOUT}").read_bytes())
    except (OSError, ValueError):
        return None


def _files() -> list[Path]:
    """Return the files of the cache, including partial files that a killed process left."""
    return [path for end in (SUFFIX, ABOUT) for path in cache_folder().glob(f"*{end}*")]


def size() -> tuple[int, int]:
    """Return the number of files in the cache, and their bytes."""
    files = _files()
    return len(files), sum(path.stat().st_size for path in files)


def clear() -> tuple[int, int]:
    """Remove all files of the cache; return their number and bytes.

    Raises:
        OSError: a file cannot be removed.
    """
    removed = size()
    for path in _files():
        path.unlink(missing_ok=True)
    return removed
