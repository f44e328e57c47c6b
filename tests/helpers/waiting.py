"""Wait until a condition holds, long enough for the slowest machine."""

import time
from collections.abc import Callable

PATIENCE = 100.0
"""Maximum seconds to wait; less than the samples that hang take in total."""


def soon(condition: Callable[[], object]) -> bool:
    """Return whether the condition becomes true in time."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
