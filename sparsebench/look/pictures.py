"""Test pictures as they are shown: which, and what of them matters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparsebench.cells.prepare import Prepared
from sparsebench.errors import UserError
from sparsebench.planning.planner import Plan
from sparsebench.plugin.registry import Registry
from sparsebench.tasks.base import Data, Split


@dataclass(frozen=True)
class Scene:
    """What is to be drawn, of n test pictures.

    Attributes:
        title: task, model, and how they were trained.
        grid: (rows, columns) of the patches.
        pictures: (n, height, width, 3) uint8.
        matters: (n, height, width) booleans, what matters to the label.
        names: what each is: its group, or its class.
        labels: (n,) class numbers; `classes` their names.
    """

    title: str
    grid: tuple[int, int]
    pictures: np.ndarray
    matters: np.ndarray
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]


def check_pictures(plan: Plan, registry: Registry) -> None:
    """Raise UserError unless the task of a plan gives pictures."""
    task = registry.task(plan.jobs[-1].cell.task.name)
    if task.inputs != "images":
        allowed = [cls.name for cls in registry.tasks() if cls.inputs == "images"]
        raise UserError("this needs a task of pictures", got=f"'{task.name}'", allowed=allowed)


def scene(cell: Prepared, rows: np.ndarray) -> Scene:
    """Return those pictures of the test split of a cell."""
    data, test, grid = cell.data, cell.data.test, cell.network.grid
    assert grid is not None
    groups = len(data.group_names) > 1
    kinds, names = (test.groups, data.group_names) if groups else (test.labels, data.classes)
    pictures = test.inputs[rows].transpose(0, 2, 3, 1)
    share = cell.test.relevance
    relevant = None if share is None else share[torch.from_numpy(rows)].cpu().numpy() > 0
    of = cell.cell
    return Scene(
        f"{of.task.name}, {of.model.name}, {of.n_train} training samples", grid, pictures,
        matters(test, rows, relevant, grid), [names[kind] for kind in kinds[rows]], test.labels[rows], data.classes,
    )  # fmt: skip


def spread(data: Data, n: int) -> np.ndarray:
    """Return at most n test items, the first ones of each group or else of each class, group by group."""
    kinds = data.test.groups if len(data.group_names) > 1 else data.test.labels
    turn = np.empty(len(kinds), int)
    for kind in np.unique(kinds):
        turn[kinds == kind] = np.arange((kinds == kind).sum())
    chosen = np.lexsort((kinds, turn))[:n]
    return chosen[np.argsort(kinds[chosen], kind="stable")]


def matters(split: Split, rows: np.ndarray, relevant: np.ndarray | None, grid: tuple[int, int]) -> np.ndarray:
    """Return (n, height, width) booleans, the boxes of what matters; patches of which some does where that is all.

    Nothing does where nobody knows what.

    Args:
        split: of pictures.
        rows: (n,) which of them.
        relevant: (n, N) which patches matter, or None.
        grid: (rows, columns) of the patches.
    """
    height, width = split.inputs.shape[-2:]
    if relevant is None:
        return np.zeros((len(rows), height, width), dtype=bool)
    if split.boxes is None or split.order is not None:
        patches = relevant.reshape(len(rows), *grid)
        return patches.repeat(height // grid[0], axis=1).repeat(width // grid[1], axis=2)
    top, left, tall, wide = split.boxes[rows].T[:, :, None]
    inside = [(low <= np.arange(length)) & (np.arange(length) < low + size)
              for low, size, length in ((top, tall, height), (left, wide, width))]  # fmt: skip
    return inside[0][:, :, None] & inside[1][:, None, :]
