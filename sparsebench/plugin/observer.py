"""The base class of observers, and the thread of each observer, so that one that hangs costs a bounded time."""

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
"""Seconds that an observer may take to open, for a record, and at the end of the program."""


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
    """Return the error for a shipped observer whose library is not installed."""
    return UserError(f"observer '{name}' is not installed", next_step=f"pip install 'sparsebench[{name}]'")


class ObserverThread:
    """A thread for all calls of one observer; some libraries allow an object only in the thread that opened it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function, or raise its exception.

        Raises:
            TimeoutError: the function takes longer than `PATIENCE`; later calls would wait for it.
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
            except BaseException as error:  # raised again in the thread of the caller
                answer.set_exception(error)


def leave_in_time(code: int) -> None:
    """End this process with an exit code after `PATIENCE` seconds, if threads or exit handlers hang."""

    def end() -> None:
        threading.Event().wait(PATIENCE)
        text = f"WARNING: a thread or exit handler of an observer or a plugin did not end in {PATIENCE:g} s; exiting\n"
        os.write(2, text.encode())
        os._exit(code)

    with suppress(RuntimeError):  # no thread can be started
        threading.Thread(target=end, daemon=True).start()
