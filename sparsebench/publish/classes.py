"""How many classes the data of a cell have, from its parameters and the labels of its test items."""

from __future__ import annotations

import numpy as np

from sparsebench.errors import UserError
from sparsebench.tasks.base import Task
from sparsebench.tasks.folder import Folder
from sparsebench.tasks.groups import GroupTask
from sparsebench.tasks.images import Composite, Spurious
from sparsebench.tasks.overfitting import Overfitting
from sparsebench.tasks.sources.known import CIFAR10, CIFAR100, DIGITS, SVHN
from sparsebench.tasks.spatial import Spatial

CLASSES = {DIGITS: 10, CIFAR10: 10, CIFAR100: 100, SVHN: 10}
IMAGENET = 1000


def classes_of(task: Task, labels: np.ndarray) -> tuple[int, ...]:
    """Return how many classes the data of a task can have, which is the size of the network's head.

    Args:
        task: its parameters say it, or name a known set of pictures.
        labels: (n,) of the test items, which say it of others: they have all classes, but for pictures that an ImageNet
            head is tested on.

    Raises:
        UserError: the labels do not say it.
    """
    seen = int(labels.max()) + 1
    if isinstance(task, Spurious | GroupTask | Overfitting | Spatial):
        return (2,)
    if isinstance(task, Folder):
        if task.labels == "imagenet":
            return (IMAGENET,)
        if task.test:
            raise UserError("how many classes there are is not known from a part of the pictures")
        return (seen,) if task.labels == "folders" else (seen, IMAGENET)
    if isinstance(known := getattr(task, "classes", None), int):
        return (known,)
    if isinstance(task, Composite) and task.images in CLASSES:
        return (CLASSES[task.images],)
    if seen == len(labels):
        raise UserError("how many classes there are is not known from so few test items")
    return (seen,)
