"""Standard streams that are closed or full, and what the system refuses: no traceback, and the right exit code."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any


class _Lenient(io.FileIO):
    """A descriptor that takes all and says nothing where it cannot be written: a run is not lost for its remarks."""

    def write(self, data: Any) -> int:
        """Write what can be written."""
        with suppress(OSError):
            return super().write(data)
        return len(data)


def _writes(encoding: str, errors: str) -> tuple[str, str]:
    """Return encoding and errors of a stream: of a shell that has ASCII alone what Python would take for it.

    Names of files are written as the bytes that they are then.
    """
    return ("utf-8", "surrogateescape") if codecs.lookup(encoding).name == "ascii" else (encoding, errors)


def open_streams() -> None:
    """Open standard streams that are closed, so that no other file has their numbers; let nothing fail of stderr.

    What the encoding of a stream cannot hold is replaced.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    if sys.stdout is None:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        encoding, errors = _writes(sys.stdout.encoding, "replace")
        sys.stdout.reconfigure(encoding=encoding, errors=errors)
    raw = io.BufferedWriter(_Lenient(2, "w", closefd=False))
    encoding, errors = _writes(getattr(sys.stderr, "encoding", "utf-8"), "backslashreplace")
    sys.stderr = io.TextIOWrapper(raw, encoding, errors, line_buffering=True, write_through=True)


def flush_output() -> str | None:
    """Write out what standard output holds; return why that is not possible, and drop it then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return refusal(error)
    return None


def refusal(error: BaseException) -> str | None:
    """Return what the system refused, in a line; None if an error is none of that."""
    if isinstance(error, OSError):
        names = [repr(os.fsdecode(name))[:200] for name in (error.filename, error.filename2) if isinstance(name, str)]
        hint = "; raise `ulimit -u`" if error.errno == errno.EAGAIN else ""
        return f"the system refuses: {', '.join([error.strerror or str(error), *names])}{hint}"
    if isinstance(error, MemoryError):
        return "the system refuses: not enough memory"
    return "the system refuses: no more threads; raise `ulimit -u`" if "start new thread" in str(error) else None
