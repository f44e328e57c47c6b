"""Brings a task of pictures: which way the stripes in one of their corners run."""

from typing import ClassVar

import numpy as np
from pydantic import Field

import sparsebench
from sparsebench import seeds
from sparsebench.measure.metrics import MetricKind
from sparsebench.tasks.base import Data, Split
from sparsebench.tasks.images import PictureTask


class Stripes(PictureTask):
    """Pictures of noise with a striped square, whose stripes run across or down."""

    name: ClassVar[str] = "stripes"
    metrics: ClassVar[tuple[MetricKind, ...]] = (
        MetricKind("hesitation", "loss", "spread of the losses of the test pictures", title="hesitation, sd"),
    )

    canvas: int = Field(32, ge=16, description="pixels of a side")
    test: int = Field(20, gt=0, description="test pictures")
    epochs: int = Field(1, gt=0, description="passes over the training pictures")

    def draw(self, n_train, repetition, locations):
        return Data(self._split("train", n_train, repetition), self._split("test", self.test, repetition), ("-", "|"))

    def measure(self, items, test):
        return {"hesitation": items.losses.std()}

    def known_classes(self, locations):
        return ("-", "|")

    def _split(self, split, n, repetition):
        rng = seeds.generator(self.name, self.canvas, split, repetition)
        side = self.canvas // 2
        inputs = rng.integers(0, 256, (n, 3, self.canvas, self.canvas), dtype=np.uint8)
        labels, corners = rng.integers(0, 2, n), rng.integers(0, 2, (n, 2)) * side
        stripes = np.tile(np.arange(side) % 4 < 2, (side, 1)) * np.uint8(255)
        for picture, label, (top, left) in zip(inputs, labels, corners, strict=True):
            picture[:, top : top + side, left : left + side] = stripes if label else stripes.T
        boxes = np.concatenate([corners, np.full((n, 2), side)], axis=1)
        return Split(inputs, labels, np.zeros(n, dtype=np.int64), boxes=boxes)


@sparsebench.hookimpl
def sparsebench_tasks():
    return [Stripes]
