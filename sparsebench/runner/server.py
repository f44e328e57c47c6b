"""The process from which workers are forked: it has imported what they need, starts them and ends what they leave.

A fork that computes costs milliseconds where a fresh Python takes seconds to import torch, so the code of each
third-party strategy can have a process of its own. The server only imports: it runs no tensor operation, starts no
thread and touches no device before it forks. Nothing imports `__main__`, so a run may be a script without a main guard,
a notebook or standard input.

It takes requests on a socket, each with three descriptors: the worker's line to the run, a socket for its exit code,
and its log. A worker is ended, with all that it has started, when it is over, when the run closes the socket of the
code, or when the process ends that started the server, whose runs share it. On Linux whatever loses its parent becomes
the server's child, so nothing that a strategy forks outlives it. Elsewhere there is no safe fork: there a server
becomes the one worker that it is asked for.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

FORKS = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PRELOADED = ("sparsebench.runner.worker", "sparsebench.runner.run_cell", "sparsebench.plugin.registry",
             "sparsebench.tasks.shipped", "sparsebench.models.vits", "timm", "torchvision")  # fmt: skip
PATIENCE = 10.0
"""Seconds to wait for processes that were killed: one that the kernel holds may take for ever."""
LOOK = 1.0
"""Seconds between two looks whether who started the server is still there."""


def descendants(pid: int) -> list[int]:
    """Return the numbers of the living processes below a process; on Linux only."""
    pids, parents = [], [pid]
    while parents:
        children = _children(parents.pop())
        parents += children
        pids += [child for child in children if _read(f"/proc/{child}/stat").rpartition(b")")[2].split()[:1] != [b"Z"]]
    return pids


def _children(pid: int) -> list[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _read(path: str) -> bytes:
    with suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _prctl(option: int, value: int) -> None:
    if FORKS:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def serve(requests: socket.socket) -> None:
    """Start workers as they are asked for until the other end is closed; then end them all."""
    starter, workers = os.getppid(), dict[int, tuple[int, socket.socket]]()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    while True:
        waiting: list[Any] = [requests, *workers, *(status for _, status in workers.values())]
        ready = select.select(waiting, [], [], LOOK)[0]
        for handle, (pid, status) in list(workers.items()):
            if handle in ready or status in ready:
                del workers[handle]
                _end(pid, status, {pid for pid, _ in workers.values()})
                os.close(handle)
        if os.getppid() != starter or (requests in ready and not _start(requests, workers)):
            break
    for handle in list(workers):
        _end(*workers.pop(handle), {pid for pid, _ in workers.values()})


def _start(requests: socket.socket, workers: dict[int, tuple[int, socket.socket]]) -> bool:
    """Fork a worker, and say its number; return whether one was asked for."""
    request, descriptors, _, _ = socket.recv_fds(requests, 2**16, 3)
    if not request:
        return False
    line, status, log = descriptors
    _print_to(log)  # a fork that fails says so there
    server, pid = os.getpid(), os.fork()
    if pid == 0:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        for other in (requests.detach(), status, *workers, *(one.detach() for _, one in workers.values())):
            os.close(other)
        _become(request, line, log)
    _print_to(0)  # which is the null device
    os.close(line)
    os.close(log)
    workers[os.pidfd_open(pid)] = pid, socket.socket(fileno=status)
    requests.sendall(f"{pid}\n".encode())
    return True


def _print_to(descriptor: int) -> None:
    for stream in (1, 2):
        os.dup2(descriptor, stream)


def _become(request: bytes, line: int, log: int) -> None:
    """Be a worker, whose line leads elsewhere than what strategies print and read."""
    asked = json.loads(request)
    os.environ.update(asked["environment"])
    _print_to(log)
    os.close(log)
    code = 1
    try:
        os.chdir(asked["folder"])
        importlib.import_module(asked["module"]).main(socket.socket(fileno=line))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # nobody is there to raise it to
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _end(pid: int, status: socket.socket, others: set[int]) -> None:
    """End a worker, unless it is over, with all that it has started; say how it left.

    What has left its session and lost its parent is a child of this process by then, as what others have left may be: a
    process that a strategy means to go on beside it has no promise.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    _kill(pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    end = time.monotonic() + PATIENCE
    while (left := set(_children(os.getpid())) - others) and time.monotonic() < end:
        for stray in left:
            for one in (*descendants(stray), stray):
                _kill(one)
            with suppress(ChildProcessError):
                os.waitpid(stray, os.WNOHANG)
        time.sleep(0.002)
    with suppress(OSError):
        status.sendall(f"{code}\n".encode())
    status.close()


def main(descriptor: int) -> None:
    """Import what workers need, and serve."""
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    from sparsebench.collector import without_collector
    from sparsebench.runner import environment

    with without_collector():
        for name in PRELOADED:
            importlib.import_module(name)
        environment.describe()  # files are read, and nothing is computed
    if not FORKS:
        request, (line, _, log), _, _ = socket.recv_fds(requests, 2**16, 3)
        requests.sendall(f"{os.getpid()}\n".encode())
        _become(request, line, log)
    gc.collect()
    gc.freeze()  # pages that workers share stay shared
    serve(requests)
