"""How a run is asked to come to its end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ECHO = 0.3
"""Seconds after an interrupt in which another is the same one: a program's starter may hand on its own."""


class Stop:
    """Once asked for, an engine starts no more cells, and ends when those under way have their records.

    Args:
        on_ask: called when it is asked for, in the middle of anything: in a signal handler.
    """

    def __init__(self, on_ask: Callable[[], None] | None = None):
        self.asked = False
        self._tell = [] if on_ask is None else [on_ask]

    def tell(self, whom: Callable[[], None]) -> None:
        """Have one more called when it is asked for."""
        self._tell.append(whom)

    def ask(self) -> None:
        """Ask for it."""
        self.asked = True
        for tell in self._tell:
            tell()

    @contextmanager
    def on_interrupt(self) -> Iterator[None]:
        """For a while let the first SIGINT ask for it, and later ones do what they did before.

        Only where SIGINT raises KeyboardInterrupt so far: in the main thread, and if nobody else handles it.
        """
        before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield
            return

        first = 0.0

        def handle(number: int, frame: FrameType | None) -> None:
            nonlocal first
            if not self.asked:
                first = time.monotonic()
                self.ask()
            elif time.monotonic() - first >= ECHO:
                before(number, frame)

        signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
