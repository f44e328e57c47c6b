"""The tasks that come with sparsebench."""

from __future__ import annotations

from sparsebench.hooks import hookimpl
from sparsebench.tasks import groups, images
from sparsebench.tasks.base import Task
from sparsebench.tasks.folder import Folder
from sparsebench.tasks.overfitting import Overfitting
from sparsebench.tasks.sparse_tokens import SparseTokens
from sparsebench.tasks.spatial import Spatial
from sparsebench.tasks.theory import Theory

SHIPPED: tuple[type[Task], ...] = (Theory, Overfitting, Spatial, SparseTokens, *images.SHIPPED, *groups.SHIPPED, Folder)


@hookimpl
def sparsebench_tasks() -> list[type[Task]]:
    """See `Hooks`."""
    return list(SHIPPED)
