"""The tasks that come with sparsebench."""

from __future__ import annotations

from sparsebench import hookimpl
from sparsebench.tasks import groups, images
from sparsebench.tasks.base import Task
from sparsebench.tasks.folder import Folder

SHIPPED: tuple[type[Task], ...] = (*images.SHIPPED, *groups.SHIPPED, Folder)


@hookimpl
def sparsebench_tasks() -> list[type[Task]]:
    """See `Hooks`."""
    return list(SHIPPED)
