"""What a strategy does besides its choice, as Python's audit events tell it (PEP 578): back doors, files, processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from sparsebench.strategy import Strategy

_FRAMES = {"tb_frame", "gi_frame", "cr_frame", "ag_frame"}
_LOOKS = {"gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._getframe", "sys._current_frames",
          "sys.setprofile", "sys.settrace"}  # fmt: skip
_CHANGES = {
    "os.chmod", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.exec",
    "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "socket.connect",
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_FOR_OTHERS = ("inspect",)
"""Modules of which a strategy may ask what it could ask itself."""
_CACHES = ("importlib", "torch._dynamo", "torch._inductor", "triton", "numba")
"""Modules that may write what they have compiled."""


class Event(NamedTuple):
    """Something that was done: in words, whether it is a look or a change, in which modules, the innermost first."""

    what: str
    looks: bool
    modules: tuple[str, ...]


AT_LOAD: list[Event] = []
"""What was done while strategies were loaded, where somebody watched it."""
_noted: list[Event] | None = None
_installed = False


@contextmanager
def watch() -> Iterator[list[Event]]:
    """Note what is done meanwhile, in any thread."""
    global _noted, _installed
    if not _installed:
        sys.addaudithook(_hook)
        _installed = True
    before, _noted = _noted, []
    noted = _noted
    try:
        yield noted
    finally:
        _noted = before


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global _noted
    if _noted is None:
        return
    if event == "open":
        if isinstance(arguments[0], int) or not (arguments[2] or 0) & _WRITING or arguments[0] == os.devnull:
            return
        what = f"opens {Path(os.fsdecode(arguments[0])).name} to write"
    elif event == "object.__getattr__":
        if arguments[1] not in _FRAMES:
            return
        what = arguments[1]
    elif event in _LOOKS or event in _CHANGES:
        what = event
    else:
        return
    noted, _noted = _noted, None  # what is done here is no matter
    noted.append(Event(what, event in _LOOKS or what in _FRAMES, _modules()))
    _noted = noted


def _modules() -> tuple[str, ...]:
    """Return the modules of the functions that are running, without this one."""
    modules, frame = [], sys._getframe(2)
    while frame is not None:
        modules.append(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(modules)


def _packages_of(strategy: Strategy) -> set[str]:
    """Return the packages, or modules in none, that the strategy's code is in."""
    packages = {cls.__module__.partition(".")[0] for cls in type(strategy).__mro__}
    return packages - {"sparsebench", "pydantic", "builtins"}


def back_doors(strategy: Strategy, events: list[Event]) -> list[str]:
    """Return by which back doors the strategy's own code looked for what its view does not show."""
    packages, names = _packages_of(strategy), set()
    for event in events:
        asking = next((name for name in event.modules if name not in _FOR_OTHERS), "")
        if event.looks and asking.partition(".")[0] in packages:
            names.add(event.what)
    return sorted(names)


def changes(strategy: Strategy, events: list[Event]) -> list[str]:
    """Return what the strategy did to files and processes, itself or through a library."""
    packages, names = _packages_of(strategy), set()
    for event in events:
        inner = [name.partition(".")[0] in packages for name in event.modules]
        if event.looks or True not in inner:
            continue
        through = event.modules[: inner.index(True)]
        if not any(name == cache or name.startswith(f"{cache}.") for name in through for cache in _CACHES):
            names.add(event.what)
    return sorted(names)


def written_bytes() -> int:
    """Return how many bytes this process has written so far, 0 where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.partition(":")[2]) for line in lines if line.startswith("wchar")), 0)
