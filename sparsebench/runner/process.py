"""Worker processes: the process that forks them, and how a run starts, asks, hears and ends them.

A fork that computes costs milliseconds where a fresh Python takes seconds to import torch, so the code of each
third-party strategy can have a process of its own. The server has imported what workers need. It only imports: it runs
no tensor operation, starts no thread and touches no device before it forks. Nothing imports `__main__`, so a run may be
a script without a main guard, a notebook or standard input.

The server takes requests on a socket, each with three descriptors: the worker's line to the run, a socket for its exit
code, and its log. A worker is ended, with all that it has started, when it is over, when the run closes the socket of
the code, or when the process ends that started the server, whose runs share it. On Linux whatever loses its parent
becomes the server's child, so nothing that a strategy forks outlives it. Elsewhere there is no safe fork: there a
server becomes the one worker that it is asked for.
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
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError
from sparsebench.records.record import Record
from sparsebench.runner.devices import environment, variables

M = TypeVar("M", bound=BaseModel)
OnBegin = Callable[[Sequence[str], float], None]
"""Told of the ids of cells that something begins for, and 0, or of one and the share of its training that is done."""
FORKS = sys.platform == "linux"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PRELOADED = ("sparsebench.runner.run_cell", "sparsebench.plugin.registry", "sparsebench.tasks.shipped",
             "sparsebench.models.vits", "timm", "torchvision")  # fmt: skip
PREFIX: list[str] = []
"""What stands before the command of a server, such as that of a sandbox."""
PATIENCE = 10.0
"""Seconds to wait for processes that were killed: one that the kernel holds may take for ever."""
STARTER = 1.0
"""Seconds between two looks whether who started the server is still there."""
START = 300.0
"""Seconds that a server may take to load, on a file system that is slow."""
LONGEST = 2**26
"""Bytes of the longest message: a strategy that finds the descriptor may write to it without end."""


class Message(BaseModel):
    """What a worker says. With nothing in it: it waits for cells.

    Attributes:
        at: ids of the cells that the worker begins something with; several are trained in one program.
        share: of the training of that one cell that is done; 0 where none is yet, or its end may come sooner.
        record: of one of the cells it was given.
        unfit: whether it takes no further cell, those it still has included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: tuple[str, ...] = ()
    share: float = 0.0
    record: Record | None = None
    unfit: bool = False


class Line(Connection):
    """A worker's end of its line: what it is asked comes pickled by `recv`, what it answers goes as JSON.

    A strategy's code may answer in its place, so nothing that comes from a worker is unpickled.
    """

    def __init__(self, descriptor: int):
        super().__init__(descriptor)
        self.pid = os.getpid()

    def say(self, message: BaseModel) -> None:
        """Send a message, unless this is a copy that a strategy made of the process."""
        if os.getpid() != self.pid:
            os._exit(0)
        self.send_bytes(message.model_dump_json().encode())


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
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # which ends a server that has no workers yet, see `_end_server`
    while True:
        waiting: list[Any] = [requests, *workers, *(status for _, status in workers.values())]
        ready = select.select(waiting, [], [], STARTER)[0]
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
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        for other in (requests.detach(), status, *workers, *(end.detach() for _, end in workers.values())):
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
    spec = json.loads(request)
    os.environ.update(spec["environment"])
    _print_to(log)
    os.close(log)
    code = 1
    try:
        os.chdir(spec["folder"])
        importlib.import_module(spec["module"]).main(Line(line))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except EOFError:  # its line was closed: it is done
        code = 0
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
    while (strays := set(_children(os.getpid())) - others) and time.monotonic() < end:
        for stray in strays:
            for child in (*descendants(stray), stray):
                _kill(child)
            with suppress(ChildProcessError):
                os.waitpid(stray, os.WNOHANG)
        time.sleep(0.002)
    with suppress(OSError):
        status.sendall(f"{code}\n".encode())
    status.close()


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Import the modules that workers need, and serve."""
    requests = socket.socket(fileno=descriptor)
    requests.set_inheritable(False)
    gc.disable()  # it would look through all that is imported again and again
    for name in modules:
        importlib.import_module(name)
    environment()  # files are read, and nothing is computed
    gc.enable()
    if not FORKS:
        request, (line, _, log), _, _ = socket.recv_fds(requests, 2**16, 3)
        requests.sendall(f"{os.getpid()}\n".encode())
        _become(request, line, log)
    gc.collect()
    gc.freeze()  # pages that workers share stay shared
    serve(requests)
    os._exit(0)  # nothing is left to do, and the interpreter takes a third of a second to unload all that


class Server:
    """The process from which workers are forked; it is started when the first is, and anew if it is gone.

    It ends with all its workers when nobody has this object any more, or with this process.

    Args:
        environment: its variables, and those of its workers.
        python: the command that starts Python.
    """

    def __init__(self, environment: Mapping[str, str], python: Sequence[str] = (sys.executable,)):
        self.environment, self._python, self._lock = environment, python, threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self.close: Callable[[], object] = lambda: None

    def begin(self) -> None:
        """Let it load what workers need while its user does something else; the first that it starts waits for that."""
        if FORKS:
            with self._lock:
                self._load(subprocess.DEVNULL)

    def start(self, module: str, environment: Mapping[str, str], log: Path) -> Worker:
        """Return a new worker, which calls the module's `main` with its `Line` to here.

        Args:
            module: what is imported in it.
            environment: its own variables.
            log: where what it prints is added.

        Raises:
            UserError: the system refuses another process, or the log.
            EOFError: there is none; the log may say why.
        """
        request = {"module": module, "environment": dict(environment), "folder": os.getcwd()}
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as stack, log.open("ab") as file, self._lock:
                (line, child_line), (status, child_status) = socket.socketpair(), socket.socketpair()
                for end in (line, child_line, status, child_status):
                    stack.enter_context(end)
                try:
                    requests = self._load(file.fileno())
                    descriptors = [child_line.fileno(), child_status.fileno(), file.fileno()]
                    socket.send_fds(requests, [json.dumps(request).encode()], descriptors)
                    if not (pid := requests.recv(64)):
                        raise EOFError
                except BaseException:  # its next answer would be taken for that to the next request
                    self.close()
                    raise
                return Worker(int(pid), Connection(line.detach()), status.dup(), log)
        except (ConnectionError, TimeoutError) as error:
            raise EOFError from error
        except OSError as error:
            raise UserError(f"a worker process with log {log} cannot be started: {error.strerror or error}") from error

    def _load(self, log: int) -> socket.socket:
        """Start the process unless there is one that can start workers; return where it is asked for them."""
        if self._running is not None and self._running[0].poll() is None:
            return self._running[1]
        self.close()
        requests, child = socket.socketpair()
        requests.settimeout(START)
        code = f"from sparsebench.runner.process import main; main({child.fileno()}, {PRELOADED})"
        with child:
            process = subprocess.Popen(
                [*self._python, "-u", "-P", "-c", code], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=self.environment, pass_fds=[child.fileno()], start_new_session=True,
            )  # fmt: skip
        if FORKS:
            self._running = process, requests
            self.close = weakref.finalize(self, _end_server, process, requests)
        return requests


def _end_server(process: subprocess.Popen[bytes], requests: socket.socket) -> None:
    """End a server and all its workers."""
    requests.close()
    process.terminate()  # while it loads; later it ends as the socket is closed, once its workers have ended
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:  # it was stopped, say; its workers end with it
        process.kill()
        process.wait()


@lru_cache(maxsize=1)
def _server(environment: tuple[tuple[str, str], ...], python: tuple[str, ...], pid: int) -> Server:
    return Server(dict(environment), python)


def server() -> Server:
    """Return the server of this process: what it has imported serves all runs that would start one like it."""
    return _server(tuple(variables().items()), (*PREFIX, sys.executable), os.getpid())


class Worker:
    """A worker process, see `Server.start`."""

    def __init__(self, pid: int, line: Connection, status: socket.socket, log: Path):
        self.pid, self.log, self._line, self._status = pid, log, line, status
        self._exit_code: int | None = None
        self._mark = 0

    def ask(self, item: object) -> None:
        """Give it something to work on. If it is gone, `answer` will say so."""
        with suppress(OSError):
            self._mark = self.log.stat().st_size
        with suppress(OSError):
            self._line.send(item)

    def answer(self, seconds: float, kind: type[M]) -> M | None:
        """Return its next message, of that kind, or None if there is none in that time.

        Raises:
            EOFError: it is gone.
            ValueError: what came is no message.
        """
        try:
            data = self._line.recv_bytes(LONGEST) if self._line.poll(seconds) else None
        except OSError as error:
            if self._line.readable:  # it ended, if in the middle of a message
                raise EOFError from error
            raise ValueError(str(error)) from error  # a message that is too long, after which none is read
        try:
            return None if data is None else kind.model_validate_json(data)
        except ValueError:
            raise ValueError(repr(data)[:60]) from None

    def last_words(self) -> str:
        """Return the end of what it printed since it was last given something."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(self._mark, file.seek(0, os.SEEK_END) - 4000))
            return file.read().decode(errors="replace")
        return ""

    def end(self, patience: float = 0.0) -> int:
        """End it, with all that it has started, unless it ends by itself in time; return how it left."""
        if self._exit_code is None:
            code = self._code(patience)
            if code is None:
                self.cut()
                self._code(PATIENCE + 5)
            self._exit_code = code or 0
            self._line.close()
            self._status.close()
        return self._exit_code

    def _code(self, seconds: float) -> int | None:
        """Return how it left, None where it does not in time; if the server was killed, so was the worker."""
        if not select.select([self._status], [], [], seconds)[0]:
            return None
        with suppress(OSError):
            return int(self._status.recv(64) or -signal.SIGKILL)
        return -signal.SIGKILL

    def cut(self) -> None:
        """Have it ended with all that it has started, and do not wait."""
        with suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)
        if not FORKS:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


def exit_text(code: int) -> str:
    """Return an exit code in words, which go on after "the worker"."""
    if code == 0:
        return "left the process with 0, or closed the line of its answers"
    if code > 0:
        return f"left the process with {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (perhaps the machine was out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def memory_over(pids: Sequence[int], limit: float) -> int:
    """Return the bytes that processes hold together and nobody can take from them if these are more than a limit, or 0.

    That is what was allocated, in memory or swapped out, without the pages of files, which the kernel may drop; what
    several share is counted once. It is what Linux says, 0 elsewhere. What is quickly known, with files and with what
    they share, is never less: only if that is over the limit are all pages looked at.
    """
    if sum(_sum(pid, "status", "VmRSS", "VmSwap") for pid in pids) <= limit:
        return 0
    size = sum(_sum(pid, "smaps_rollup", "Pss_Anon", "Pss_Shmem", "SwapPss") for pid in pids)
    return size if size > limit else 0


def forget_peak() -> None:
    """Begin to look anew for the most that this process holds."""
    with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
        file.write("5")


def peak() -> int:
    """Return the most bytes of memory that this process has had since, the pages of files included; 0 if unknown."""
    return _sum(os.getpid(), "status", "VmHWM")


def _sum(pid: int, name: str, *keys: str) -> int:
    """Return the sum of some lines of /proc/PID/NAME in bytes; 0 if the process is gone."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return 0
    return 1024 * sum(int(lines[key].split()[0]) for key in keys if key in lines)
