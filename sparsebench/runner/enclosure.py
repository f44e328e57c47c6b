"""What strangers' processes have less of: variables, and, where the system can, network and files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_PREFIX: list[str] = []
"""What stands before the command of a worker, in this process."""
_KEPT = re.compile(
    r"PATH|HOME|TMPDIR|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|PYTHON(PATH|HOME|HASHSEED|WARNINGS)|VIRTUAL_ENV"
    r"|(CUDA|CUBLAS|NVIDIA|OMP|MKL|OPENBLAS|ATEN|TORCH|NUMBA|MPL)\w*|XDG_CACHE_HOME|HF_HOME|SPARSEBENCH_\w+"
)
"""Variables that libraries need; what else there is may be a token or a password."""


@cache
def no_network() -> tuple[str, ...]:
    """Return the command that runs another without network, which is tried; nothing where the system has none."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    command = unshare, "--map-root-user", "--net"
    tried = subprocess.run(
        [*command, sys.executable, "-c", ""], capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    return command if tried.returncode == 0 else ()


@cache
def has_sandbox() -> bool:
    """Say whether the system's `bwrap` can hide files, which is tried: many containers refuse."""
    if shutil.which("bwrap") is None:
        return False
    with tempfile.TemporaryDirectory() as room:
        command = [*_sandbox((), Path(room)), sys.executable, "-c", ""]
        tried = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    return tried.returncode == 0


def _sandbox(readable: Iterable[Path], room: Path) -> list[str]:
    """Return the command that runs another without network, in which only `room` can be written.

    Homes and temporary files are hidden, but for what is to be readable and what Python runs from.
    """
    hidden = [Path.home().resolve(), *(Path(name).resolve() for name in ("/tmp", "/var/tmp", "/run", room.parent))]
    python = map(Path, (sys.prefix, sys.base_prefix, *filter(None, sys.path)))
    caches = (Path(os.environ.get("HF_HOME", Path.home() / ".cache/huggingface"), "hub"), Path.home() / ".cache/torch")
    shown = dict.fromkeys(os.path.abspath(path) for path in (*python, *caches, *readable))
    # What holds a hidden folder would show all of that again.
    shown = {path: None for path in shown if not any(one.is_relative_to(path) for one in hidden)}
    tmpfs = [part for path in dict.fromkeys(hidden) if path.is_dir() for part in ("--tmpfs", str(path))]
    binds = [part for path in shown for part in ("--ro-bind-try", path, path)]
    return [
        shutil.which("bwrap") or "bwrap", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--die-with-parent",
        "--cap-drop", "ALL", "--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", *tmpfs, *binds,
        "--bind", str(room), str(room), "--dir", os.getcwd(), "--chdir", os.getcwd(),
    ]  # fmt: skip


def prefix() -> tuple[str, ...]:
    """Return what stands before the command of a worker that is started now."""
    return tuple(_PREFIX)


@contextmanager
def enclose(readable: Iterable[Path] = ()) -> Iterator[None]:
    """Start workers without network and with few variables for a while, and, where the system can, with few files.

    Args:
        readable: what they need besides Python and its libraries; they write temporary files alone.
    """
    before, place = dict(os.environ), tempfile.tempdir
    for name in before:
        if not _KEPT.fullmatch(name):
            del os.environ[name]
    with tempfile.TemporaryDirectory(prefix="sparsebench-") as made:
        room = Path(made).resolve()
        _PREFIX[:] = _sandbox(readable, room) if has_sandbox() else no_network()
        os.environ["TMPDIR"] = tempfile.tempdir = str(room)
        try:
            yield
        finally:
            _PREFIX.clear()
            tempfile.tempdir = place
            os.environ.pop("TMPDIR")
            os.environ.update(before)
