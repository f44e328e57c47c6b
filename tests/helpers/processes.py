"""Which processes run for a folder, or with a variable."""

import os
from pathlib import Path


def processes_of(out: Path, word: bytes = b"") -> list[int]:
    """Return the numbers of the processes whose command names the folder and has the word in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if word in command and os.fsencode(out) in command:
            found.append(int(folder.name))
    return found


def processes_in(variable: str) -> list[int]:
    """Return the numbers of the processes that began with NAME=VALUE among their variables."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if variable.encode() in environment.split(b"\0"):
            found.append(int(folder.name))
    return found
