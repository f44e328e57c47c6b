"""What processes hold of the memory, as Linux says; 0 elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress


def held_bytes(pids: Sequence[int]) -> int:
    """Return the bytes that processes hold together and nobody can take from them, what several share counted once.

    That is what was allocated, in memory or swapped out, without the pages of files, which the kernel may drop.
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
