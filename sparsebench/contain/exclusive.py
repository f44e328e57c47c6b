"""One cell at a time on a machine, whoever runs it there: what is timed is timed alone."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sparsebench.errors import UserError

LOOK = 0.2
"""Seconds between two looks whether it is one's turn."""
ALONE = {True: "alone on its machine", False: "alone on its GPU"}
BESIDE = "perhaps beside other cells"


def check() -> None:
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
