"""Strangers' calls in threads of their own, so that one that hangs costs a bounded time."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that an observer may take for a record, to be opened, or to let the program end."""


class Aside:
    """A thread for the calls of one observer: what a library opens in a thread it may want to be used there only."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def call(self, what: Callable[[], T]) -> T:
        """Return what a call returns, or raise what it raises.

        Raises:
            TimeoutError: it takes longer than an observer may; later calls would wait for it.
        """
        if self._thread.ident is None:
            self._thread.start()
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked.put((what, answer))
        try:
            value, error = answer.get(timeout=PATIENCE)
        except queue.Empty:
            raise TimeoutError(f"no answer in {PATIENCE:g} s") from None
        if error is not None:
            raise error
        return cast(T, value)

    def _work(self) -> None:
        while True:
            what, answer = self._asked.get()
            try:
                answer.put((what(), None))
            except BaseException as error:  # raised again in the thread that asked
                answer.put((None, error))


def leave_in_time(code: int) -> None:
    """Have this process end with a code if it does not do so by itself: threads or exit handlers may hang."""

    def end() -> None:
        threading.Event().wait(PATIENCE)
        text = f"WARNING: something that an observer or a plugin left did not end in {PATIENCE:g} s and is cut off\n"
        os.write(2, text.encode())
        os._exit(code)

    with suppress(RuntimeError):  # the system allows no thread
        threading.Thread(target=end, daemon=True).start()
