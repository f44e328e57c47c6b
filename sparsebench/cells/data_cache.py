"""Data that several cells have in common, drawn once."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch

from sparsebench import seeds
from sparsebench.records.cell import Cell
from sparsebench.tasks.base import Data, Locations, Task

MOST = 2**26
"""Bytes of data that are kept; the largest tests of the suites quick and embedded are a fifth of that."""


class Drawn:
    """What a process drew last, for the next cell with the same data: every cell is given a copy of its own.

    Drawing is up to a quarter of a short cell of tokens, and a twentieth of a test of a trained network on pictures.
    What is mapped from a file is not kept: a copy would have to read all of it.
    """

    def __init__(self) -> None:
        self.draw = ""
        self.data: Data | None = None

    def of(self, task: Task, cell: Cell, locations: Locations) -> Data:
        """Return the data of a cell; a task that draws from torch's own generator gives each cell the same, too."""
        if self.data is not None and self.draw == cell.draw:
            return copy.deepcopy(self.data)
        self.data = None  # its memory, before there is more
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of("draw", cell.draw))
            data = task.draw(cell.n_train, cell.repetition, locations)
        if _size(data) > MOST:
            return data
        self.draw, self.data = cell.draw, data
        return copy.deepcopy(data)


def _size(data: Data) -> float:
    """Return the bytes of all arrays; infinity where one is mapped from a file."""
    splits = [split for split in (data.train, data.test, data.validation) if split is not None]
    held = [value for of in (data, *splits) for value in vars(of).values() if isinstance(value, np.ndarray)]
    return math.inf if any(isinstance(array, np.memmap) for array in held) else sum(array.nbytes for array in held)
