"""What drawings of test pictures are made of: pictures with their patches greyed and tinted, put on a sheet."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sparsebench import style

SIDE, BETWEEN, APART = 1.35, 0.07, 0.3
"""Inches: of a picture, between pictures that belong together, between those that do not."""
POINT = 0.6 / 72
"""Inches that a letter takes for each point of its size, at most."""
PIXELS, DPI = 256, 150
GONE = np.array([203, 208, 216])
MATTERS = np.array([250, 204, 21])


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
