"""Flipping and shifting training images in batches on the device, with the boxes of what matters.

The random numbers belong to the sample and the pass, so that a sample looks the same whatever batch it is in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench import seeds
from sparsebench.tasks.base import covered


class Moves(NamedTuple):
    """What is done to each of B images: shifted with zeros coming in, then mirrored.

    Attributes:
        down, right: (B,) pixels, negative for up and left.
        mirrored: (B,) booleans.
    """

    down: Tensor
    right: Tensor
    mirrored: Tensor


def draw(items: Tensor, visit: int, stream: int, *, flip: bool, shift: int) -> Moves:
    """Return the moves of the (B,) items in pass `visit`: up to `shift` pixels, one image in two mirrored."""
    u = seeds.uniform(seeds.mix(seeds.mix(items, stream), visit), 3)
    pixels = (u[:, :2] * (2 * shift + 1)).long() - shift
    return Moves(pixels[:, 0], pixels[:, 1], (u[:, 2] < 0.5) & flip)


def move_images(images: Tensor, moves: Moves, shift: int) -> Tensor:
    """Return the moved images (B, channels, height, width), by one indexed read of the padded batch."""
    B, channels, height, width = images.shape
    padded = F.pad(images, (shift,) * 4)
    row, column = (torch.arange(side, device=images.device) for side in (height, width))
    columns = torch.where(moves.mirrored[:, None], width - 1 - column, column) + (shift - moves.right[:, None])
    rows = row + (shift - moves.down[:, None])
    place = rows[:, :, None] * padded.shape[3] + columns[:, None, :]
    read = padded.flatten(2).gather(2, place.view(B, 1, -1).expand(B, channels, -1))
    return read.view(images.shape)


def move_boxes(boxes: Tensor, moves: Moves, width: int) -> Tensor:
    """Return the moved boxes (B, 4), top, left, height, width, of images `width` pixels wide; they may stick out."""
    top, left, rows, columns = boxes.unbind(1)
    left = left + moves.right
    left = torch.where(moves.mirrored, width - left - columns, left)
    return torch.stack([top + moves.down, left, rows, columns], dim=1)


def relevance(boxes: Tensor, height: int, width: int, grid: tuple[int, int]) -> Tensor:
    """Return (B, N) float32, the share of each patch that its box covers; `Split.relevance_on` for a batch."""
    parts = [torch.arange(count, device=boxes.device, dtype=torch.float64) for count in grid]
    return covered(boxes.double(), height, width, parts).float()


@dataclass(frozen=True, eq=False)
class Augmentation:
    """How the images of a split are changed in training.

    Attributes:
        stream: the seed of its random numbers.
        flip, shift: see `Recipe`.
        boxes: (n, 4) of what matters in the images of the split, on their device; None where nobody knows.
        grid: (rows, columns) of the patches.
    """

    stream: int
    flip: bool
    shift: int
    boxes: Tensor | None
    grid: tuple[int, int]

    def __call__(self, images: Tensor, rows: Tensor, visit: int) -> tuple[Tensor, Tensor | None]:
        """Return the (B, 3, height, width) images of those rows as pass `visit` shows them, and their relevance."""
        moves = draw(rows, visit, self.stream, flip=self.flip, shift=self.shift)
        height, width = images.shape[2:]
        moved = move_images(images, moves, self.shift)
        if self.boxes is None:
            return moved, None
        return moved, relevance(move_boxes(self.boxes[rows], moves, width), height, width, self.grid)
