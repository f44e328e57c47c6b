"""Test pictures as they are drawn: which, what of them matters, and sheets of them with patches greyed and tinted."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsebench.errors import UserError
from sparsebench.plan.plan import Plan
from sparsebench.plugin.registry import Registry
from sparsebench.runner.prepare import Prepared
from sparsebench.stats import style
from sparsebench.tasks.base import Data, Split

SIDE, BETWEEN, APART, LEFT, BELOW = 1.35, 0.07, 0.3, 1.0, 0.26
"""Inches: of a picture, between pictures that belong together, between those that do not, of the left margin, and below
each picture."""
POINT = 0.6 / 72
"""Inches that a letter takes for each point of its size, at most."""
PIXELS, DPI = 256, 150
GONE = np.array([203, 208, 216])
MATTERS = np.array([250, 204, 21])


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


class Ink(NamedTuple):
    """How an area is marked: its outline has the (3,) RGB colour, and the share `strength` of its inside."""

    colour: np.ndarray
    strength: float = 0.25

    @property
    def line(self) -> tuple[float, float, float]:
        """The colour of the outline as matplotlib has it."""
        red, green, blue = (self.colour / 255).tolist()
        return red, green, blue


def rgb(colour: str) -> np.ndarray:
    """Return the (3,) RGB of a colour of the style sheet, from 0 to 255."""
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])


def tint(
    picture: np.ndarray,
    matters: np.ndarray,
    area: np.ndarray | None = None,
    grid: tuple[int, int] = (1, 1),
    inks: Mapping[int, Ink] | None = None,
) -> np.ndarray:
    """Return a picture, enlarged, with what matters outlined and with what became of its patches.

    Args:
        picture: (height, width, 3) uint8.
        matters: (height, width) booleans.
        area: (N,) which area each patch is in, -1 for one that is greyed; None for all as they were.
        grid: (rows, columns) of the patches.
        inks: of the areas that are outlined and tinted, patches of one together.
    """
    height, width = matters.shape
    scale = max(1, -(-PIXELS // height))
    large = _enlarge(picture, scale, scale)
    line = max(1, large.shape[0] // 64)
    if area is not None:
        areas = _enlarge(area.reshape(grid), scale * height // grid[0], scale * width // grid[1])
        large[areas < 0] = (large[areas < 0] + 7.0 * GONE) / 8
        outlined = _edges(areas, line)
        for number, ink in (inks or {}).items():
            inside = areas == number
            large[inside] = (1 - ink.strength) * large[inside] + ink.strength * ink.colour
            large[inside & outlined] = ink.colour
    large[_edges(_enlarge(matters, scale, scale).astype(int), line) & _enlarge(matters, scale, scale)] = MATTERS
    return large


def _enlarge(values: np.ndarray, down: int, across: int) -> np.ndarray:
    return values.repeat(down, axis=0).repeat(across, axis=1)


def _edges(areas: np.ndarray, line: int) -> np.ndarray:
    """Return which pixels of (height, width) numbered areas are within `line` pixels of another area or the rim."""
    wide = np.pad(areas, line, constant_values=-2)
    height, width = areas.shape
    ends = ((0, line), (2 * line, line), (line, 0), (line, 2 * line))
    return np.logical_or.reduce([wide[y : y + height, x : x + width] != areas for y, x in ends])


def wrap(text: str, width: float, size: int) -> str:
    """Return the text on as many lines as `width` inches make it need."""
    return textwrap.fill(text, max(4, int(width / (POINT * size))))


class Sheet:
    """A figure under a title, on which things have places in inches from the top left corner."""

    def __init__(self, title: str, width: float, height: float):
        lines = wrap(title, width - 0.3, 10)
        self.below = 0.17 * lines.count("\n")
        self.width, self.height = width, height + self.below
        self.figure = style.new(self.width, self.height, DPI)
        self.text(0.15, 0.22 - self.below / 2, lines, 10, ha="left", weight="bold")

    def text(self, x: float, y: float, text: str, size: int, **how: Any) -> None:
        """Write a text, centred there unless told otherwise."""
        aligned = {"ha": "center", "va": "center", **how}
        self.figure.text(
            x / self.width, 1 - (y + self.below) / self.height, text, fontsize=size, parse_math=False, **aligned
        )

    def picture(self, x: float, y: float, pixels: np.ndarray) -> None:
        """Put a picture there with its top left corner."""
        place = (x / self.width, 1 - (y + self.below + SIDE) / self.height, SIDE / self.width, SIDE / self.height)
        axis = self.figure.add_axes(place)
        axis.imshow(pixels)
        axis.set_axis_off()

    def first_column(self, scene: Scene, top: float) -> None:
        """Put the pictures themselves below each other, with what each is beside it."""
        self.text(LEFT + SIDE / 2, top - 0.06, "the picture", 7, va="bottom")
        for row, name in enumerate(scene.names):
            y = top + row * (SIDE + BELOW)
            self.text(LEFT - 0.1, y + SIDE / 2, wrap(name, LEFT - 0.2, 8), 8, ha="right")
            self.picture(LEFT, y, tint(scene.pictures[row], scene.matters[row]))
