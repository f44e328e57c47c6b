"""What a cell may take: seconds, memory, and a machine for itself."""

from __future__ import annotations

import math
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparsebench.errors import UserError
from sparsebench.plan.request import How

LOOK = 0.2
"""Seconds between two looks whether it is one's turn."""
ALONE = {True: "alone on its machine", False: "alone on its GPU"}
BESIDE = "perhaps beside other cells"


def check_locks() -> None:
    """Raise UserError where files cannot be locked, or the machine's is none."""
    try:
        import fcntl  # noqa: F401
    except ImportError as error:
        raise UserError(
            "--exclusive locks files, which this system cannot", got=os.name, allowed="Linux, macOS",
            next_step="give --jobs 1, and start nothing else",
        ) from error  # fmt: skip
    os.close(_open(_path("machine")))


def timing(device: str, exclusive: bool) -> str:
    """Return what a record says of how it was timed."""
    return ALONE[device == "cpu"] if exclusive else BESIDE


@contextmanager
def turn(device: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Wait for one's turn and have it: no other turn at the same time on this machine, or on this GPU.

    A cell on the CPU has the machine for itself, one on a GPU that GPU, with no cell on the CPU beside it. Turns end
    with the process, however it ends. They are known to those who have the same folder for temporary files.

    Args:
        device: "cpu" or "cuda:i".
        on_wait: called now and then meanwhile.
    """
    import fcntl

    if device == "cpu":
        with _lock("machine", fcntl.LOCK_EX, on_wait):
            yield
        return
    import torch

    gpu = str(torch.cuda.get_device_properties(device).uuid)
    with _lock("machine", fcntl.LOCK_SH, on_wait), _lock(gpu, fcntl.LOCK_EX, on_wait):
        yield


@contextmanager
def _lock(name: str, kind: int, on_wait: Callable[[], None]) -> Iterator[None]:
    import fcntl

    file = _open(_path(name))
    try:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                on_wait()
                time.sleep(LOOK)
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a copy of this process may have the file open too
        os.close(file)


def _path(name: str) -> Path:
    return Path(tempfile.gettempdir()) / f"sparsebench-{name}.lock"


def _open(path: Path) -> int:
    """Return a descriptor of the file, made for all users if it was not there.

    Raises:
        UserError: something else has its name, which anybody may give to anything.
    """
    how = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            file = os.open(path, how)  # with O_CREAT Linux refuses the files of others in /tmp
        except FileNotFoundError:
            file = os.open(path, how | os.O_CREAT, 0o644)
            os.fchmod(file, 0o644)
    except OSError as error:
        raise _unfit(path, error.strerror or str(error)) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _unfit(path, "no regular file")
    return file


def _unfit(path: Path, why: str) -> UserError:
    return UserError(f"--exclusive cannot lock {path}", got=why, next_step="remove it, or set TMPDIR")


TIMEOUT = 6 * 3600.0
"""Seconds that a cell may take unless told otherwise: many times what any cell of the suites here does, and a strategy
that hangs costs a worker's night rather than the run."""

CHECKPOINT: float = How.checkpoint
"""Seconds between checkpoints of a cell."""

GIB = 2**30
LEAST_MEMORY = GIB // 2
"""Bytes; a worker that has loaded the libraries has most of it."""

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": GIB,
          "tib": 2**40, "k": 2**10, "m": 2**20, "g": GIB, "t": 2**40}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What a cell may take before it is killed; 0 is without limit.

    Attributes:
        timeout: seconds.
        memory: bytes, of a worker and all that it has started, the libraries included.
        exclusive: whether it has its machine, or its GPU, for itself; see `turn`.
    """

    timeout: float = TIMEOUT
    memory: int = 0
    exclusive: bool = False

    @classmethod
    def parse(
        cls, timeout: float | str | None, memory: float | str | None, workers: int, exclusive: bool = False
    ) -> Limits:
        """Return the limits that a user asks for; None leaves the default.

        Raises:
            UserError: no such limit, or there is no worker process, which alone can be killed; files cannot be locked.
        """
        if exclusive:
            check_locks()
        for option, asked in (("--timeout", timeout), ("--memory-limit", memory)):
            if asked is not None and not workers:
                raise UserError(
                    f"{option} needs a worker process: only that can be killed", next_step="give --jobs 1 or more"
                )
        seconds = TIMEOUT if timeout is None else _number("--timeout", timeout, _SECONDS, "30, 10m, 1.5h, 0 for none")
        size = _number("--memory-limit", memory or 0, _BYTES, "4GiB, 800MB, 0 for none")
        if 0 < size < LEAST_MEMORY:
            raise UserError("--memory-limit", got=str(memory), allowed=f"{shown_size(LEAST_MEMORY)} or more, or 0")
        if size and sys.platform != "linux":
            raise UserError("--memory-limit: only Linux says what processes take", next_step="leave it out")
        return cls(seconds, int(size), exclusive)


def _number(option: str, asked: float | str, units: dict[str, int], allowed: str) -> float:
    """Return a number with its unit as a number of seconds or bytes."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", str(asked).strip().lower(), re.ASCII)
    if match is None or match[2] not in units or not math.isfinite(number := float(match[1]) * units[match[2]]):
        raise UserError(option, got=f"'{asked}'", allowed=allowed)
    return number


def shown_size(size: float) -> str:
    """Return a number of bytes for people."""
    return f"{size / GIB:.2f} GiB"


def shown_time(seconds: float) -> str:
    """Return a number of seconds for people."""
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"
