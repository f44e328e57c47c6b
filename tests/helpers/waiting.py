"""Waiting for what must come: as soon as it is there, and long enough for the slowest machine."""

import time
from collections.abc import Callable

PATIENCE = 100.0
"""Seconds after which something never comes; less than what the samples that hang take in all."""


def soon(condition: Callable[[], object]) -> bool:
    """Say whether the condition becomes true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
