"""Brings a task and no strategy."""

from typing import ClassVar

import sparsebench
from sparsebench.tasks.theory import Theory


class SmallTheory(Theory):
    """The theory task with few tokens."""

    name: ClassVar[str] = "small_theory"

    tokens: int = 20
    test: int = 20
    steps: int = 20


@sparsebench.hookimpl
def sparsebench_tasks():
    return [SmallTheory]
