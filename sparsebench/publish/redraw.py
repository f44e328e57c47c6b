"""Test items of embedded tasks drawn again: their labels, groups and pictures are in no forger's hands."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparsebench import sources
from sparsebench.errors import UserError
from sparsebench.measure.scores import Items
from sparsebench.publish.folder import plain
from sparsebench.records.cell import canonical, digest
from sparsebench.records.record import Record
from sparsebench.tasks.base import Data, Split, Task
from sparsebench.tasks.images import ImageTask
from sparsebench.tasks.overfitting import Overfitting
from sparsebench.tasks.sparse_tokens import SparseTokens
from sparsebench.tasks.spatial import Spatial
from sparsebench.tasks.theory import Theory

TRAINING = 2
"""Training samples that are drawn beside: each split has generators of its own, so the test items hang on none."""
MOST_NUMBERS, ALL_NUMBERS = 2**27, 2**31
"""Of one draw, and of all of a submission: a stranger's parameters say how large it is."""
BY_GROUP = "accuracy: "


class Redraw:
    """Test items of a submission's cells, each task and repetition drawn once.

    Attributes:
        left: names of the tasks whose items were not drawn, as their pictures are not part of sparsebench, or are many.
    """

    def __init__(self) -> None:
        self.left: set[str] = set()
        self._drawn: dict[str, tuple[Split, tuple[str, ...]] | None] = {}
        self._numbers = 0

    def differences(self, record: Record, items: Items, task: Task) -> Iterator[str]:
        """Yield what of a record's test items is not what its task draws.

        Raises:
            UserError: its task cannot be drawn with these parameters.
        """
        key = digest([record.cell.task.model_dump(mode="json"), record.cell.repetition])
        if key not in self._drawn:
            data = self._draw(task, record.cell.repetition)
            self._drawn[key] = None if data is None else (_items(data.test), data.group_names)
        drawn = self._drawn[key]
        if drawn is None:
            self.left.add(plain(task.name, 40))
            return
        test, groups = drawn
        for name, reported, made in (
            ("labels", items.labels, test.labels),
            ("groups", items.groups, test.groups),
            ("foregrounds", items.foregrounds, test.foregrounds),
        ):
            if reported is not None and made is not None and not np.array_equal(reported, made):
                yield f"its test items have other {name} than task '{task.name}' draws"
        reported_groups = {name.removeprefix(BY_GROUP) for name in record.metrics if name.startswith(BY_GROUP)}
        if reported_groups and reported_groups != set(groups):
            yield f"its groups are not those of task '{task.name}'"

    def _draw(self, task: Task, repetition: int) -> Data | None:
        size = _size(task)
        if size is None or size > MOST_NUMBERS or self._numbers + size > ALL_NUMBERS:
            return None
        self._numbers += size
        try:
            return task.draw(TRAINING, repetition, {})
        except (ArithmeticError, ValueError, LookupError, MemoryError) as error:
            raise UserError(f"task '{task.name}' cannot be drawn: {plain(error)}", got=canonical(repetition)) from error


def _items(test: Split) -> Split:
    """Return what is compared, without the inputs."""
    return Split(np.empty((len(test.labels), 0)), test.labels, test.groups, foregrounds=test.foregrounds)


def _size(task: Task) -> int | None:
    """Return about how many numbers a draw makes, or None of a task that needs files."""
    if isinstance(task, Theory | Spatial):
        shared = task.d * (task.patterns * task.set_size if isinstance(task, Theory) else task.feature + 1)
        return (task.test + TRAINING) * task.tokens * task.d + shared * task.d
    if isinstance(task, Overfitting | SparseTokens):
        return (task.test + TRAINING) * task.tokens * task.d
    if isinstance(task, ImageTask) and (task.images, task.backgrounds) == (sources.DIGITS, sources.PHOTOS):
        canvas, foreground = task.canvas**2, task.foreground**2
        return 3 * ((task.test + TRAINING) * canvas + 1797 * foreground)
    return None
