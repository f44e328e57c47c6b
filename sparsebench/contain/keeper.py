"""Starts a process and ends it, with everything it started, when it is over, when asked to, or when its starter ends.

Between a run and each of its workers stands such a keeper. It runs none of a strategy's code, so that neither a worker
that holds the interpreter's lock nor one that forks, ignores signals or begins a session of its own can keep it from
its work: on Linux whatever loses its parent becomes the keeper's child. It is run as a file, with the standard library
only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

PATIENCE = 10.0
"""Seconds to wait for processes that were killed: one that the kernel holds may take for ever."""


def descendants(pid: int) -> list[int]:
    """Return the numbers of the living processes below a process; on Linux only."""
    pids, parents = [], [pid]
    while parents:
        children = _children(parents.pop())
        parents += children
        pids += [child for child in children if not _is_zombie(child)]
    return pids


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _is_zombie(pid: int) -> bool:
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[:1] in ([], [b"Z"])


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; on Linux only."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def main(lifeline: int, command: list[str]) -> None:
    """Run a command until it is over or the lifeline is closed at its other end; then leave as it left.

    Args:
        lifeline: a descriptor to read from.
        command: program and arguments. It has this process's standard input and output for itself.
    """
    os.set_inheritable(lifeline, False)
    starter = os.getppid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken = _wake_on_children()
    child = os.posix_spawn(command[0], command, os.environ)
    os.close(0)
    os.close(1)
    status = None
    while status is None and os.getppid() == starter:
        ready, _, _ = select.select([lifeline, woken], [], [], 1.0)
        with suppress(BlockingIOError):
            os.read(woken, 4096)
        status = _reap(child)
        if lifeline in ready:
            break
    with suppress(ProcessLookupError, PermissionError):
        if status is None:
            os.kill(child, signal.SIGKILL)
    _end_all()
    _leave_as(0 if status is None else os.waitstatus_to_exitcode(status))


def _wake_on_children() -> int:
    """Return a descriptor that can be read from when a child has ended."""
    woken, wake = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return woken


def _reap(child: int) -> int | None:
    """Take note of all children that have ended; return the status of one if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def _end_all() -> None:
    """Kill every descendant. A child of one that is killed becomes a child of this process and is met again."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _leave_as(code: int) -> None:
    """Leave with an exit code, or by the signal that it stands for."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
