"""What a cell may take: seconds, memory, and a machine for itself."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass

from sparsebench.contain.exclusive import check
from sparsebench.errors import UserError
from sparsebench.planning.request import How

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
        exclusive: whether it has its machine, or its GPU, for itself; see `exclusive.turn`.
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
            check()
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
