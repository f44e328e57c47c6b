"""Python's garbage collector, held off."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Hold off the garbage collector where much is made that stays.

    It would look through all of that again and again: a fifth of the time in which modules are loaded.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
