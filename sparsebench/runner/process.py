"""Worker processes, as who started them sees them: started, asked, heard and ended; and the memory they hold."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError
from sparsebench.plan.job import Job
from sparsebench.records.record import Record
from sparsebench.runner import enclosure, server

M = TypeVar("M", bound=BaseModel)


class Question(BaseModel):
    """What a run gives to a worker: cells, those of a batch may be trained in one program."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: tuple[Job, ...]


class Message(BaseModel):
    """One line. With nothing in it: the worker waits for cells.

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


def dump(message: BaseModel) -> str:
    """Return JSON in ASCII. Names of files may have bytes that the shell's encoding has not, which pydantic refuses."""
    return json.dumps(message.model_dump(mode="json"))


def load(kind: type[M], line: str | bytes) -> M:
    """Return what `dump` was given."""
    return kind.model_validate(json.loads(line))


class Line:
    """A worker's end of its line to who started it.

    Attributes:
        asked: yields what it is asked, until the line is closed.
    """

    def __init__(self, line: socket.socket):
        self.line, self.asked, self.pid = line, line.makefile("rb"), os.getpid()

    def say(self, message: BaseModel) -> None:
        """Send a message, unless this is a copy that a strategy made of the process."""
        if os.getpid() != self.pid:
            os._exit(0)
        self.line.sendall(message.model_dump_json().encode() + b"\n")


START = 300.0
"""Seconds that a server may take to load, on a file system that is slow."""
LOOK = 0.25
"""Seconds between two looks at how much a worker has printed."""
MOST_PRINTED = 2**20
"""Bytes that a log keeps of what a worker prints from one thing that it is given to the next."""
LONGEST_LINE = 2**26
"""Bytes of the longest message: a strategy that finds the descriptor may write to it without end."""


class Server:
    """The process from which workers are forked, see `server`; it is started when the first is, and anew if it is gone.

    Args:
        environment: its variables, and those of its workers.
    """

    def __init__(self, environment: Mapping[str, str]):
        self.environment, self.driver, self.python = environment, os.getpid(), (*enclosure.prefix(), sys.executable)
        self.users, self._lock = 0, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Say whether one that this process starts now would be like it."""
        python = *enclosure.prefix(), sys.executable
        return (self.environment, self.driver, self.python) == (environment, os.getpid(), python)

    def start(self, module: str, environment: Mapping[str, str], log: Path) -> Worker:
        """Return a new worker, which calls the module's `main` with its end of a line to here.

        Args:
            module: what is imported in it.
            environment: its own variables.
            log: where what it prints is added.

        Raises:
            UserError: the system refuses another process, or the log.
            EOFError: there is none; the log may say why.
        """
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise _not_started(log, error) from error
        line, its_line = socket.socketpair()
        status, its_status = socket.socketpair()
        request = {"module": module, "environment": dict(environment), "folder": os.getcwd()}
        try:
            with self._lock, its_line, its_status:
                try:
                    requests = self._load(file)
                    socket.send_fds(
                        requests, [json.dumps(request).encode()], [its_line.fileno(), its_status.fileno(), file]
                    )
                    if not (said := requests.recv(64)):
                        raise EOFError
                except BaseException:  # its next answer would be taken for that to the next request
                    self._end()
                    raise
            return Worker(int(said), line, status, log, file)
        except BaseException as error:
            for one in (line, status):
                one.close()
            os.close(file)
            if isinstance(error, OSError):
                if isinstance(error, ConnectionError | TimeoutError):
                    raise EOFError from error
                raise _not_started(log, error) from error
            raise

    def _load(self, log: int) -> socket.socket:
        """Start the process unless there is one that can start workers; return where it is asked for them."""
        if server.FORKS and self._requests and self._process is not None and self._process.poll() is None:
            return self._requests
        self._end()
        requests, its = socket.socketpair()
        self._requests = requests
        requests.settimeout(START)
        code = f"from sparsebench.runner.server import main; main({its.fileno()})"
        with its:
            self._process = subprocess.Popen(
                [*self.python, "-u", "-P", "-c", code], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=self.environment, pass_fds=[its.fileno()], start_new_session=True,
            )  # fmt: skip
        return requests

    def close(self) -> None:
        """End it and all its workers."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._process is not None and server.FORKS:
            try:
                self._process.wait(server.PATIENCE)
            except subprocess.TimeoutExpired:  # it was stopped, say; its workers end with it
                self._process.kill()
                self._process.wait()


_kept: Server | None = None
_keeping = threading.Lock()


@contextlib.contextmanager
def kept_server(environment: Mapping[str, str]) -> Iterator[Server]:
    """Lend the server of this process: what it has imported serves all runs that would start one like it.

    It ends with this process, or when none of its users is left and another has taken its place.
    """
    global _kept
    with _keeping:
        if _kept is None or not _kept.fits(environment):
            if _kept is not None and not _kept.users:
                _kept.close()
            _kept = Server(environment)
        lent = _kept
        lent.users += 1
    try:
        yield lent
    finally:
        with _keeping:
            lent.users -= 1
            if lent is not _kept and not lent.users:
                lent.close()


@atexit.register
def _end_kept() -> None:
    if _kept is not None:
        _kept.close()


def _not_started(log: Path, error: OSError) -> UserError:
    return UserError(f"a worker process with log {log} cannot be started: {error.strerror or error}")


class Worker:
    """A worker process, see `Server.start`."""

    def __init__(self, pid: int, line: socket.socket, status: socket.socket, log: Path, file: int):
        self.pid, self.log, self._line, self._status, self._file = pid, log, line, status, file
        self._read, self._left = bytearray(), cast(int | None, None)
        self._heard = self._size()

    def ask(self, line: bytes) -> None:
        """Give it a line to work on. If it is gone, `answer` will say so."""
        self._shorten_log()
        self._heard = self._size()
        with contextlib.suppress(OSError):
            self._line.sendall(line + b"\n")

    def answer(self, seconds: float, kind: type[M]) -> M | None:
        """Return its next message, of that kind, or None if there is none in that time.

        Raises:
            EOFError: it is gone.
            ValueError: what came is no message.
        """
        end = time.monotonic() + seconds
        length = self._read.find(b"\n")
        while length < 0:
            self._shorten_log()
            if not select.select([self._line], [], [], max(0.0, min(LOOK, end - time.monotonic())))[0]:
                if time.monotonic() >= end:
                    return None
                continue
            try:
                read = self._line.recv(2**16)
            except ConnectionError:
                read = b""
            if not read:
                raise EOFError
            before = len(self._read)
            self._read += read
            length = self._read.find(b"\n", before)
            if len(self._read) > LONGEST_LINE:
                raise ValueError("a line without end")
        line = bytes(self._read[:length])
        del self._read[: length + 1]
        try:
            return kind.model_validate_json(line)
        except ValueError:
            raise ValueError(f"{line[:60]!r}") from None

    def last_words(self) -> str:
        """Return the end of what it printed since it was last given something."""
        return os.pread(self._file, 4000, max(self._heard, self._size() - 4000)).decode(errors="replace")

    def held_over(self, limit: int) -> int:
        """Return what it holds of the memory, with all that it has started, if that is more than a limit, else 0."""
        return held_over([self.pid, *server.descendants(self.pid)], limit)

    def _size(self) -> int:
        return os.fstat(self._file).st_size

    def _shorten_log(self) -> None:
        """Leave only the end of what it printed since, if that is too much."""
        printed = self._size() - self._heard
        if printed > MOST_PRINTED:
            end = os.pread(self._file, MOST_PRINTED // 2, self._size() - MOST_PRINTED // 2)
            os.ftruncate(self._file, self._heard)
            os.write(self._file, b"[%d bytes are left out]\n" % (printed - len(end)) + end)

    def end(self, patience: float = 0.0) -> int:
        """End it, with all that it has started, unless it ends by itself in time; return how it left."""
        if self._left is None:
            code = self._code(patience) if patience else None
            if code is None:
                self.cut()
                self._code(server.PATIENCE + 5)
            self._left = 0 if code is None else code
            self._line.close()
            self._status.close()
            self._shorten_log()
        return self._left

    def _code(self, seconds: float) -> int | None:
        """Return how it left, None where it does not in time; if the server was killed, so was the worker."""
        self._status.settimeout(seconds)
        try:
            return int(self._status.recv(64) or -signal.SIGKILL)
        except TimeoutError:
            return None
        except OSError:
            return -signal.SIGKILL

    def __del__(self) -> None:
        os.close(self._file)

    def cut(self) -> None:
        """Have it ended with all that it has started, and do not wait."""
        with contextlib.suppress(OSError):
            self._status.shutdown(socket.SHUT_WR)
        if not server.FORKS:
            with contextlib.suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)


FAULTS = frozenset({
    signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP,
    signal.SIGXCPU, signal.SIGXFSZ, signal.SIGPIPE, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF,
})  # fmt: skip
"""Signals by which a process ends of itself: a fault, a limit or a timer of its own."""


def was_killed(code: int) -> bool:
    """Say whether an exit code tells of a signal that somebody else sent, as the kernel does that lacks memory."""
    return code < 0 and -code not in FAULTS


def how_it_left(code: int) -> str:
    """Return an exit code in words, which go on after "the worker"."""
    if code == 0:
        return "left the process with 0, or closed the line of its answers"
    if code > 0:
        return f"left the process with {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (perhaps the machine was out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def held_bytes(pids: Sequence[int]) -> int:
    """Return the bytes that processes hold together and nobody can take from them, what several share counted once.

    That is what was allocated, in memory or swapped out, without the pages of files, which the kernel may drop. It is
    what Linux says, 0 elsewhere.
    """
    return sum(_sum(pid, "smaps_rollup", "Pss_Anon", "Pss_Shmem", "SwapPss") for pid in pids)


def held_over(pids: Sequence[int], limit: float) -> int:
    """Return what processes hold together if it is more than a limit, else 0.

    What is quickly known, with files and with what they share, is never less: only if that is over the limit are all
    pages looked at.
    """
    if sum(_sum(pid, "status", "VmRSS", "VmSwap") for pid in pids) <= limit:
        return 0
    size = held_bytes(pids)
    return size if size > limit else 0


def forget_peak() -> None:
    """Begin to look anew for the most that this process holds."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
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
