"""What strangers' processes are given less of: variables of the environment, and, where the system can, the network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

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


def prefix() -> tuple[str, ...]:
    """Return what stands before the command of a worker that is started now."""
    return tuple(_PREFIX)


@contextmanager
def enclose() -> Iterator[None]:
    """Start workers without network and with few variables for a while."""
    before = dict(os.environ)
    for name in before:
        if not _KEPT.fullmatch(name):
            del os.environ[name]
    _PREFIX[:] = no_network()
    try:
        yield
    finally:
        _PREFIX.clear()
        os.environ.update(before)
