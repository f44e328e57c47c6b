"""Which processes run for a folder, or with a variable."""

import os
from collections.abc import Callable
from pathlib import Path


def _that(holds: Callable[[Path], bool]) -> list[int]:
    """Return the numbers of the processes of whose folders in /proc something holds; one that is gone is none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if holds(folder):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def workers_of(out: Path) -> list[int]:
    """Return the numbers of the processes that print to a file in the folder, as a run's workers do."""
    return _that(lambda folder: os.readlink(folder / "fd/1").startswith(f"{out.resolve()}/"))


def processes_of(out: Path) -> list[int]:
    """Return the numbers of the processes whose command names the folder, or that print to a file in it."""
    return _that(lambda folder: os.fsencode(out) in (folder / "cmdline").read_bytes()) + workers_of(out)


def processes_in(variable: str) -> list[int]:
    """Return the numbers of the processes that began with NAME=VALUE among their variables."""
    return _that(lambda folder: variable.encode() in (folder / "environ").read_bytes().split(b"\0"))
