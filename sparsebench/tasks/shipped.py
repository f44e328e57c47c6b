"""The tasks that come with sparsebench."""

from __future__ import annotations

from sparsebench import hookimpl
from sparsebench.tasks.base import Task
from sparsebench.tasks.folder import Folder
from sparsebench.tasks.groups import CelebA, Waterbirds
from sparsebench.tasks.images import Composite, Plain, Spurious
from sparsebench.tasks.patches import Patches


@hookimpl
def sparsebench_tasks() -> list[type[Task]]:
    """See `Hooks`."""
    return [Composite, Spurious, Plain, Waterbirds, CelebA, Folder, Patches]
