"""One worker process, as who started it sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from sparsebench.contain import enclosure, keeper
from sparsebench.contain.messages import LINE_IS_CUT
from sparsebench.errors import UserError

M = TypeVar("M", bound=BaseModel)
LOOK = 0.25
"""Seconds between two looks at how much it has printed."""
MOST_PRINTED = 2**20
"""Bytes that a log keeps of what it prints from one thing that it is given to the next."""
LONGEST_LINE = 2**26
"""Bytes of the longest message: a strategy that finds the descriptor may write to it without end."""


class Worker:
    """A worker process and its keeper, which ends it with all that it has started.

    Args:
        command: the worker's.
        environment: its variables.
        log: where what it prints is added.

    Raises:
        UserError: the system refuses another process, or the log.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self.log, self._line, self._lock = log, bytearray(), threading.Lock()
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            self._heard = self._size()
            self.keeper = self._start(command, environment)
        except OSError as error:
            raise UserError(f"a worker process with log {log} cannot be started: {error.strerror or error}") from error

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        lifeline, self._lifeline = os.pipe()
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__, str(lifeline), *enclosure.prefix(), *command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._file, env=environment, pass_fds=[lifeline],
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)

    def ask(self, line: bytes) -> None:
        """Give it a line to work on. If it is gone, `answer` will say so."""
        assert self.keeper.stdin is not None
        self._shorten_log()
        self._heard = self._size()
        with contextlib.suppress(OSError):
            self.keeper.stdin.write(line + b"\n")
            self.keeper.stdin.flush()

    def answer(self, seconds: float, kind: type[M]) -> M | None:
        """Return its next message, of that kind, or None if there is none in that time.

        Raises:
            EOFError: it is gone.
            ValueError: what came is no message.
        """
        assert self.keeper.stdout is not None
        pipe, end = self.keeper.stdout.fileno(), time.monotonic() + seconds
        length = self._line.find(b"\n")
        while length < 0:
            self._shorten_log()
            if not select.select([pipe], [], [], max(0.0, min(LOOK, end - time.monotonic())))[0]:
                if time.monotonic() >= end:
                    return None
                continue
            if not (read := os.read(pipe, 2**16)):
                raise EOFError
            before = len(self._line)
            self._line += read
            length = self._line.find(b"\n", before)
            if len(self._line) > LONGEST_LINE:
                raise ValueError("a line without end")
        line = bytes(self._line[:length])
        del self._line[: length + 1]
        try:
            return kind.model_validate_json(line)
        except ValueError:
            raise ValueError(f"{line[:60]!r}") from None

    def processes(self) -> list[int]:
        """Return the numbers of the processes that run for it, its keeper left out."""
        return keeper.descendants(self.keeper.pid)

    def last_words(self) -> str:
        """Return the end of what it printed since it was last given something."""
        return os.pread(self._file, 4000, max(self._heard, self._size() - 4000)).decode(errors="replace")

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
        with contextlib.suppress(subprocess.TimeoutExpired):
            if patience:
                self.keeper.wait(patience)
        self.cut()
        assert self.keeper.stdin is not None and self.keeper.stdout is not None
        try:
            code = self.keeper.wait(keeper.PATIENCE + 5)
        except subprocess.TimeoutExpired:  # the keeper was stopped, say; its worker ends with it
            self.keeper.kill()
            code = self.keeper.wait()
        with contextlib.suppress(OSError):  # a last flush finds nobody
            self.keeper.stdin.close()
        self.keeper.stdout.close()
        self._shorten_log()
        return code

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was not opened
            os.close(self._file)

    def cut(self) -> None:
        """Tell the keeper to end everything, and do not wait."""
        with self._lock:
            lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)


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
    if code == LINE_IS_CUT:
        return f"left the process with {code}: perhaps the descriptor of its answers was closed or replaced"
    if code > 0:
        return f"left the process with {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (perhaps the machine was out of memory)" if code == -signal.SIGKILL else ""
    return f"was ended by {name}{hint}"
