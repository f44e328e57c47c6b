"""What an observer is, and the thread of its own in which it is called: one that hangs costs a bounded time."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError

if TYPE_CHECKING:
    from sparsebench.records.record import Record

See = Callable[["Record"], None]
T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that an observer may take for a record, to be opened, or to let the program end."""


class Observer(BaseModel):
    """Receives each record that a run has stored. Subclass it, name it, and write `open`.

    Fields of the class are its parameters, as for a strategy.

    Attributes:
        name: the name for --observe.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    name: ClassVar[str]

    def open(self, out: Path) -> See:
        """Return the function that is called with each record, in the process that stores them.

        If a cell is run again, its record comes again, with the same `cell_id`. If the function raises an exception,
        there is one warning, and the function is not called again.

        Args:
            out: the run's folder.

        Raises:
            UserError: the observer cannot be turned on; no cell has been run.
        """
        raise NotImplementedError(f"observer '{self.name}' has no method `open`")


def missing_library(name: str) -> UserError:
    """Return the error for a shipped observer without its library."""
    return UserError(f"observer '{name}' is not installed", next_step=f"pip install 'sparsebench[{name}]'")


class ObserverThread:
    """A thread for the calls of one observer: what a library opens in a thread it may want to be used there only."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def call(self, function: Callable[[], T]) -> T:
        """Return what a call returns, or raise what it raises.

        Raises:
            TimeoutError: it takes longer than an observer may; later calls would wait for it.
        """
        if self._thread.ident is None:
            self._thread.start()
        answer: Future[T] = Future()
        self._calls.put((function, answer))
        if wait([answer], PATIENCE).not_done:
            raise TimeoutError(f"no answer in {PATIENCE:g} s")
        return answer.result()

    def _work(self) -> None:
        while True:
            function, answer = self._calls.get()
            try:
                answer.set_result(function())
            except BaseException as error:  # raised again in the thread that asked
                answer.set_exception(error)


def leave_in_time(code: int) -> None:
    """Have this process end with a code if it does not do so by itself: threads or exit handlers may hang."""

    def end() -> None:
        threading.Event().wait(PATIENCE)
        text = f"WARNING: something that an observer or a plugin left did not end in {PATIENCE:g} s and is cut off\n"
        os.write(2, text.encode())
        os._exit(code)

    with suppress(RuntimeError):  # the system allows no thread
        threading.Thread(target=end, daemon=True).start()
