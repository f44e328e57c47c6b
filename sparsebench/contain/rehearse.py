"""A stranger's call made in a copy of this process first, so that one which ends its process ends a copy."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress

from sparsebench.contain.messages import identity
from sparsebench.contain.process import how_it_left

PATIENCE = 300.0
"""Seconds that a call may take: importing libraries from a slow disk takes some."""
LEAVING = 5.0
"""Seconds that a copy may take to end once nothing more is heard of it."""
WORDS = {b".": None, b"c": "closed the standard streams", b"k": "raised KeyboardInterrupt"}


def harm(call: Callable[[], object]) -> str | None:
    """Return what a call would do to this process, in words that go on after "it"; None if nothing.

    What else it raises, and what it returns, is none of that. Outside Linux nothing is tried.
    """
    if sys.platform != "linux":
        return None
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # it may be closed, or nobody's
            stream.flush()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, which a copy has not
        pid = os.fork()
    if pid == 0:
        _try(call, write)
    os.close(write)
    try:
        if not select.select([read], [], [], PATIENCE)[0]:
            return f"took more than {PATIENCE:g} s"
        word = os.read(read, 1)
        return WORDS.get(word, "broke the line of its answers") if word else how_it_left(_status(pid))
    finally:
        os.close(read)
        _end(pid)


def _try(call: Callable[[], object], write: int) -> None:
    """Make the call in the copy, say what became of it, and leave."""
    with suppress(BaseException):
        os.setsid()
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # threads of the process are not in its copy, which would wait for them
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        before, word = _streams(), b"."
        try:
            call()
        except KeyboardInterrupt:
            word = b"k"
        except BaseException:  # it will raise it again
            pass
        os.write(write, word if _streams() == before else b"c")
    os._exit(0)


def _streams() -> list[object]:
    descriptors = [identity(number) for number in range(3)]
    return [*descriptors, *(getattr(stream, "closed", None) for stream in (sys.stdout, sys.stderr))]


def _status(pid: int) -> int:
    """Return how the copy left, which is ended if it does not."""
    end = time.monotonic() + LEAVING
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return 0


def _end(pid: int) -> None:
    """End the copy, and what it has started in its session."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
