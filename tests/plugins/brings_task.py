"""Brings a task and no strategy."""

import sparsebench
from sparsebench.tasks.images import Composite


class Small(Composite):
    """The composite task with small pictures, trained from its first step."""

    name = "small"

    canvas: int = 16
    foreground: int = 8
    test: int = 20
    epochs: int = 1
    pretrain_epochs: int = 0


@sparsebench.hookimpl
def sparsebench_tasks():
    return [Small]
