"""The worker's end of the line to who started it: JSON, one message a line."""

from __future__ import annotations

import json
import os
from typing import TypeVar

from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)
LINE_IS_CUT = 78
"""Exit code of a worker that finds the descriptor of its answers closed or replaced."""


def identity(descriptor: int) -> tuple[int, int] | None:
    """Return which file a descriptor leads to, as its device and its number there; None if to none."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def dump(message: BaseModel) -> str:
    """Return JSON in ASCII. Names of files may have bytes that the shell's encoding has not, which pydantic refuses."""
    return json.dumps(message.model_dump(mode="json"))


def load(kind: type[M], line: str | bytes) -> M:
    """Return what `dump` was given."""
    return kind.model_validate(json.loads(line))


class Line:
    """The worker's end of its line to who started it, out of the way of what strategies print and read.

    Standard output goes to the log, and standard input is empty.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.jobs, self.answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        self.goes_to = identity(self.answers.fileno())

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Numbers of the descriptors that the worker needs."""
        return 0, 1, 2, self.jobs.fileno(), self.answers.fileno()

    def say(self, message: BaseModel) -> None:
        """Send a message, unless this is a copy that a strategy made of the process, or the line is cut."""
        if os.getpid() != self.pid:
            os._exit(0)
        if identity(self.answers.fileno()) != self.goes_to:
            os._exit(LINE_IS_CUT)
        self.answers.write(message.model_dump_json().encode() + b"\n")
        self.answers.flush()
