"""Whether a worker may take another cell, or a cell has left something behind that the next one would meet."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence

import torch

from sparsebench.contain.keeper import descendants
from sparsebench.contain.memory import held_bytes, held_over
from sparsebench.contain.messages import identity
from sparsebench.contain.process_state import FUNCTIONS, changes, values
from sparsebench.text import few

GROWTH = 2**30
"""Bytes that a worker may hold between cells, beyond what it held before its first."""

SHOWN = 5
"""Names of what was changed that are told."""

ORDINARY = {
    "StrategyError", "DivergedError", "UnsupportedError", "UserError", "NotReadyError", "ArithmeticError",
    "AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError",
    "NotImplementedError", "RecursionError", "StopIteration", "TypeError", "UnboundLocalError", "ValueError",
    "ZeroDivisionError",
}  # fmt: skip
"""Failures that leave a process as it was: what the harness found, and slips of whoever wrote the strategy. After any
other nobody knows. torch's own, RuntimeError, is a slip too, but on CUDA may be the last word of a device."""


class Health:
    """Compares this process after a cell with what it was before the first.

    Attributes:
        changed: what the cells so far have changed of the whole process, by name.

    Args:
        descriptors: numbers of the descriptors that it needs.
        device: where its cells are.
        keeper: number of the process to which children come that have lost their parents.
    """

    def __init__(self, descriptors: Sequence[int], device: str, keeper: int):
        self.descriptors, self.keeper = descriptors, keeper
        self.ordinary = ORDINARY | ({"RuntimeError"} if device == "cpu" else set())
        self.before, self.files, self.threads = values(), self._files(), set(threading.enumerate())
        self.processes = {os.getpid(), *descendants(keeper)}
        self.held = held_bytes([os.getpid()])
        self.changed: list[str] = []

    def watch_functions(self) -> None:
        """Compare functions too from now on, which takes milliseconds: strangers' code is about to be loaded."""
        if FUNCTIONS.name not in self.before:
            self.before |= values([FUNCTIONS])

    def trouble(self, failure: str | None) -> str:
        """Return what is wrong after a cell that failed with an exception of that name, or with none; or ""."""
        self.changed = changes(self.before)
        if failure is not None and failure not in self.ordinary:
            return f"a cell failed with {failure}"
        if other := [*self.changed, *(["descriptors"] if self._files() != self.files else [])]:
            return f"a cell has changed {names_of_changes(other)}"
        if [t for t in threading.enumerate() if t not in self.threads and not isinstance(t, threading._DummyThread)]:
            return "a cell has left threads"
        if set(descendants(self.keeper)) - self.processes:
            return "a cell has left processes"
        return "a cell has left memory that is not free" if self._grew() else ""

    def _files(self) -> list[tuple[int, int] | None]:
        return [identity(number) for number in self.descriptors]

    def _grew(self) -> bool:
        me, most = [os.getpid()], self.held + GROWTH
        if not held_over(me, most):
            return False
        gc.collect()
        return held_over(me, most) > 0


def names_of_changes(names: Sequence[str]) -> str:
    """Return some names as a text: the first few, and how many more there are."""
    return few(names, SHOWN)


def device_is_lost(device: str) -> bool:
    """Say whether a CUDA device answers nothing but errors from now on, in this process."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
