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
from sparsebench.tasks.base import coverage


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
    """Return the moved images (B, channels, height, width); they need not be contiguous.

    Whole images are copied, which is several times as fast as reading pixel by pixel through an index.
    """
    both = torch.stack([images, images.flip(3)], dim=1).flatten(0, 1)
    number = torch.arange(len(images), device=images.device)
    images = both.index_select(0, 2 * number + moves.mirrored)
    if shift == 0:
        return images
    right = torch.where(moves.mirrored, -moves.right, moves.right)  # mirrored first, then shifted
    # Rows share the zeros between them, so that a shift is one offset into all the pixels of a padded image.
    channels, height, width = images.shape[1:]
    above, line = shift + 1, width + shift
    padded = F.pad(images, (0, shift, above, shift))
    image, plane = padded.stride()[:2]
    length = (channels - 1) * plane + (height - 1) * line + width
    windows = padded.as_strided((padded.numel() - length + 1, length), (1, 1))
    read = windows.index_select(0, number * image + (above - moves.down) * line - right)
    return read.as_strided(images.shape, (length, plane, line, 1))


def move_boxes(boxes: Tensor, moves: Moves, width: int) -> Tensor:
    """Return the moved boxes (B, 4), top, left, height, width, of images `width` pixels wide; they may stick out."""
    top, left, rows, columns = boxes.unbind(1)
    left = left + moves.right
    left = torch.where(moves.mirrored, width - left - columns, left)
    return torch.stack([top + moves.down, left, rows, columns], dim=1)


def relevance(boxes: Tensor, height: int, width: int, grid: tuple[int, int]) -> Tensor:
    """Return (B, N) float32, the share of each patch that its box covers; `Split.relevance_on` for a batch."""
    parts = [torch.arange(count, device=boxes.device, dtype=torch.float64) for count in grid]
    return coverage(boxes.double(), height, width, parts).float()


@dataclass(eq=False)
class Augmentation:
    """How the images of a split are changed in training.

    Attributes:
        items: (n,) the numbers of all its samples, on their device.
        stream: the seed of its random numbers.
        flip, shift: see `Recipe`.
        boxes: (n, 4) of what matters in the images of the split, on their device; None where nobody knows.
        grid: (rows, columns) of the patches.
    """

    items: Tensor
    stream: int
    flip: bool
    shift: int
    boxes: Tensor | None
    grid: tuple[int, int]
    _drawn: tuple[int, Moves, Tensor | None] | None = None

    def __call__(self, images: Tensor, rows: Tensor, visit: int) -> tuple[Tensor, Tensor | None]:
        """Return the (B, 3, height, width) images of those rows as pass `visit` shows them, and their relevance."""
        height, width = images.shape[2:]
        if self._drawn is None or self._drawn[0] != visit:
            self._drawn = visit, *self._draw(visit, height, width)
        _, moves, relevant = self._drawn
        moved = move_images(images, Moves(*(each[rows] for each in moves)), self.shift)
        return moved, None if relevant is None else relevant.index_select(0, rows)

    def _draw(self, visit: int, height: int, width: int) -> tuple[Moves, Tensor | None]:
        """Return the moves and the relevance of all samples: at once they cost little more than those of one batch."""
        moves = draw(self.items, visit, self.stream, flip=self.flip, shift=self.shift)
        if self.boxes is None:
            return moves, None
        return moves, relevance(move_boxes(self.boxes, moves, width), height, width, self.grid)
