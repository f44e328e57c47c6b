"""Find the running processes of a folder, or with an environment variable."""

import os
from collections.abc import Callable
from pathlib import Path


def _pids_where(condition: Callable[[Path], bool]) -> list[int]:
    """Return the ids of the processes whose folder in /proc fulfils a condition. Skip processes that end meanwhile."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if condition(folder):
                pids.append(int(folder.name))
        except OSError:
            continue
    return pids


def workers_of(out: Path) -> list[int]:
    """Return the ids of the processes whose standard output is a file in the folder, such as a run's workers."""
    return _pids_where(lambda folder: os.readlink(folder / "fd/1").startswith(f"{out.resolve()}/"))


def processes_of(out: Path) -> list[int]:
    """Return the ids of the processes whose command names the folder, or whose standard output is a file in it."""
    return _pids_where(lambda folder: os.fsencode(out) in (folder / "cmdline").read_bytes()) + workers_of(out)


def processes_in(variable: str) -> list[int]:
    """Return the ids of the processes that were started with the environment variable NAME=VALUE."""
    return _pids_where(lambda folder: variable.encode() in (folder / "environ").read_bytes().split(b"\0"))
