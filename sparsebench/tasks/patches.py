"""The task `patches`: a probe predicts the class of each patch of a composite whose object has a random outline."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Locations, Task
from sparsebench.tasks.images import CANVAS, Composite, paste

FOREGROUND = 6
"""Side of the object's square in patches, for trained weights whose patches determine the sizes."""
WAVES, STRENGTH = 5, 0.3
"""Number of the waves of an outline, and the standard deviation of the first one's amplitude."""
BACKGROUND_NAME = "background"


def blob(side: int, rng: np.random.Generator) -> np.ndarray:
    """Return (side, side) booleans: the inside of a random smooth outline that just fits into the square.

    The outline has the distance 1 + the sum of WAVES cosines of the angle from the middle, and at least a tenth of it.
    The wave of k periods has a random phase, and a normal amplitude with deviation STRENGTH / k.
    """
    waves = np.arange(1, WAVES + 1)
    size, phase = rng.normal(0, STRENGTH / waves), rng.uniform(0, 2 * np.pi, WAVES)

    def radius(angle: np.ndarray) -> np.ndarray:
        return np.maximum(0.1, 1 + np.cos(waves * angle[..., None] + phase) @ size)

    around = np.linspace(-np.pi, np.pi, 360)
    reach = (radius(around) * np.maximum(np.abs(np.cos(around)), np.abs(np.sin(around)))).max()
    y, x = np.mgrid[:side, :side] - (side - 1) / 2
    return np.asarray(np.hypot(x, y) * reach <= radius(np.arctan2(y, x)) * side / 2)


class Patches(Composite):
    """Composites with the class of each patch: that of the object, or background. For the track probe only.

    The object's picture is cut out by a random smooth outline and pasted anywhere, so that no box is an answer. A patch
    has the class that most of its pixels have.
    """

    name: ClassVar[str] = "patches"

    head: Literal["dense", "own"] = Field(
        "dense",
        description="the linear head. dense: learned on the tokens of the network without a strategy, one head for "
        "all strategies; own: learned on the tokens with the strategy, one for each",
    )
    fill: Literal["membership", "nearest"] = Field(
        "membership",
        description="features of patches that were not kept. membership: those of the token that contains the patch, "
        "and for a dropped patch those of the nearest patch that has a token; nearest: those of the nearest kept patch",
    )

    def check(self) -> None:
        """See `Task.check`."""
        super().check()
        if self.permuted:
            raise UserError(f"task '{self.name}' has no permuted patches", next_step="leave permuted out")

    def with_patch(self, patch: int | None) -> Task:
        """See `Task.with_patch`: the canvas has 12 x 12 patches, and the object's square 6 x 6 of them."""
        if patch is None:
            return self
        sizes = {"canvas": CANVAS * patch, "foreground": FOREGROUND * patch, "patch": patch}
        return self.model_copy(update={name: size for name, size in sizes.items() if name not in self.model_fields_set})

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`."""
        data = super().draw(n_train, repetition, locations)
        return replace(data, patch_classes=(BACKGROUND_NAME, *data.classes))

    def _paste(
        self, canvas: np.ndarray, pictures: np.ndarray, labels: np.ndarray, rng: np.random.Generator, step: int
    ) -> dict[str, np.ndarray]:
        """See `ImageTask._paste`: only the pixels inside of an outline are pasted, and get the class of the object."""
        background = canvas.copy()
        boxes = paste(canvas, pictures, rng, step)
        segments = np.zeros((len(canvas), *canvas.shape[2:]), dtype=np.uint8)
        for image, behind, classes, label, (top, left, side, _) in zip(
            canvas, background, segments, labels, boxes, strict=True
        ):
            inside = np.zeros(classes.shape, dtype=bool)
            inside[top : top + side, left : left + side] = blob(side, rng)
            image[:, ~inside] = behind[:, ~inside]
            classes[inside] = label + 1
        return {"segments": segments}
