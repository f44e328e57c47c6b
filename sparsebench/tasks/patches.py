"""The task `patches`: a probe predicts the class of each patch, of composites or of pictures with masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.measure.patches import BACKGROUND, IGNORE
from sparsebench.tasks.base import Data, Locations, Split, Task
from sparsebench.tasks.images import CANVAS, Composite, paste
from sparsebench.tasks.sources.cache import Pixels
from sparsebench.tasks.sources.files import path_of
from sparsebench.tasks.sources.known import PHOTOS
from sparsebench.tasks.sources.masks import LARGEST, MASKED, MOST_NUMBERS, MaskedPictures, table_of

FOREGROUND, CANVAS_OF_MASKS = 6, 16
"""Sides in patches of an object's square, and of pictures with masks, for weights whose patches determine the sizes."""
WAVES, STRENGTH = 5, 0.3
"""Number of the waves of an outline, and the standard deviation of the first one's amplitude."""
BACKGROUND_NAME, OBJECT_NAME = "background", "object"
MOST_CLASSES = IGNORE - 1
"""Number of classes of objects that composites can have beside the background."""
ONE_CLASS = "picture"
"""The class of all pictures with masks."""


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
    """Images with the class of each patch: that of an object, or background. For the track probe only.

    They are composites, or a folder of pictures with masks, see `sources.masks`. In composites the object's picture is
    cut out by a random smooth outline and pasted anywhere, so that no box is an answer. Of pictures and masks only the
    middle squares are used. A patch has the class that most of its pixels have.
    """

    name: ClassVar[str] = "patches"
    reads_masks: ClassVar[bool] = True

    head: Literal["dense", "own"] = Field(
        "dense",
        description="the linear head. dense: learned on the tokens of the network without a strategy, one head for "
        "all strategies; own: learned on the tokens with the strategy, one for each",
    )
    objects: Literal["classes", "one"] = Field(
        "classes", description="classes of objects; one: all are of one class, and only told from the background"
    )
    fill: Literal["membership", "nearest"] = Field(
        "membership",
        description="features of patches that were not kept. membership: those of the token that contains the patch, "
        "and for a dropped patch those of the nearest patch that has a token; nearest: those of the nearest kept patch",
    )

    background: int = Field(
        0, ge=-1, le=LARGEST, description="of masks: the number of the background; -1: all numbers are objects"
    )
    ignore: int = Field(
        IGNORE, ge=-1, lt=MOST_NUMBERS, description="of masks: the number of pixels that are not judged; -1: none"
    )
    largest: int = Field(LARGEST, ge=1, le=LARGEST, description="of masks: larger numbers are an error")
    split: float = Field(
        0.5,
        gt=0,
        lt=1,
        description="of pictures with masks, without folders for training and test: share to learn from, other "
        "pictures in each repetition",
    )

    @property
    def has_masks(self) -> bool:
        """Whether its images are pictures with masks."""
        return self.images.startswith(f"{MASKED}-")

    def check(self) -> None:
        """See `Task.check`."""
        super().check()
        if self.permuted:
            raise UserError(f"task '{self.name}' has no permuted patches", next_step="leave permuted out")

    def with_patch(self, patch: int | None) -> Task:
        """See `Task.with_patch`: the canvas has 12 x 12 patches, and the object's square 6 x 6 of them.

        Pictures with masks have 16 x 16 patches.
        """
        if patch is None:
            return self
        sizes = {"canvas": CANVAS * patch, "foreground": FOREGROUND * patch, "patch": patch}
        if self.has_masks:  # nothing is pasted, so the foreground is the whole image
            canvas = self.canvas if "canvas" in self.model_fields_set else CANVAS_OF_MASKS * patch
            return self.model_copy(update={"canvas": canvas, "foreground": canvas, "patch": patch})
        return self.model_copy(update={name: size for name, size in sizes.items() if name not in self.model_fields_set})

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`."""
        if self.has_masks:
            return self._draw_masked(n_train, repetition, locations)
        data = super().draw(n_train, repetition, locations)
        objects = data.classes if self.objects == "classes" else (OBJECT_NAME,)
        return replace(data, patch_classes=(BACKGROUND_NAME, *objects))

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
            classes[inside] = label + 1 if self.objects == "classes" else 1
        return {"segments": segments}

    def _masked(self, locations: Locations) -> MaskedPictures:
        return MaskedPictures(self.images, path_of(self.images, locations))

    def _table(self) -> np.ndarray:
        """Return the (MOST_NUMBERS,) class of each number of a mask."""
        table = table_of(self.background, self.ignore)
        if self.objects == "one":
            table[(table != BACKGROUND) & (table != IGNORE)] = 1
        return table

    def _choose(self, n_train: int, repetition: int, locations: Locations) -> tuple[list[str], list[str]]:
        """Return the sorted paths of training and test pictures with masks."""
        pictures = self._masked(locations)
        order = seeds.generator("patches", self.images, repetition, "test").permutation(pictures.test)
        first = len(order) - self._count_of_test(pictures)  # the pictures before it are for training
        train = list(order[:first])
        if pictures.train:
            train = list(seeds.generator("patches", self.images, repetition, "train").permutation(pictures.train))
        return sorted(map(str, train[:n_train])), sorted(map(str, order[first : first + self.test]))

    def _count_of_test(self, pictures: MaskedPictures) -> int:
        """Return the number of pictures with masks that are not for training."""
        every = len(pictures.test)
        return every if pictures.train else every - max(1, min(every - 1, round(self.split * every)))

    def for_probe(self, locations: Locations, skip_bad: bool = False) -> tuple[Task, Mapping[str, Path]]:
        """See `Task.for_probe`: masks are checked, and at most all pictures are for the test."""
        if not self.has_masks:
            self._check_classes(locations)
            return super().for_probe(locations, skip_bad)
        pictures = self._masked(locations)
        pictures.check_numbers(self.largest, self.background, self.ignore)
        if self.backgrounds not in ("", PHOTOS):
            raise UserError("pictures with masks are not pasted on backgrounds", next_step="leave --backgrounds out")
        return self.model_copy(update={"backgrounds": "", "test": min(self.test, self._count_of_test(pictures))}), {}

    def _check_classes(self, locations: Locations) -> None:
        """Raise UserError if there are more classes of objects than the pixels of composites can tell apart."""
        count = len(self.known_classes(locations))
        if self.objects == "classes" and count > MOST_CLASSES:
            raise UserError(
                f"task '{self.name}' cannot tell the objects of so many classes apart",
                got=f"{count} classes",
                allowed=f"at most {MOST_CLASSES}",
                next_step="set objects=one, or remove folders of classes",
            )

    def training_counts(self, locations: Locations) -> np.ndarray | None:
        """See `Task.training_counts`."""
        if not self.has_masks:
            return super().training_counts(locations)
        pictures = self._masked(locations)
        return np.array([len(pictures.train) or len(pictures.test) - self._count_of_test(pictures)])

    def known_classes(self, locations: Locations) -> tuple[str, ...]:
        """See `Task.known_classes`. Pictures with masks are of one class, as only their patches differ."""
        return (ONE_CLASS,) if self.has_masks else super().known_classes(locations)

    def pictures(self, n_train: int, repetition: int, locations: Locations) -> Sequence[Pixels]:
        """See `Task.pictures`."""
        if not self.has_masks:
            return super().pictures(n_train, repetition, locations)
        pictures, table = self._masked(locations), self._table()
        chosen = [names for names in self._choose(n_train, repetition, locations) if names]
        return [
            *(pictures.pixels(names, self.canvas) for names in chosen),
            *(pictures.segments(names, self.canvas, table) for names in chosen),
        ]

    def _draw_masked(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """Return the data of pictures with masks."""
        pictures, table = self._masked(locations), self._table()
        place_of = {name: place for place, name in enumerate(pictures.mask_of)}
        splits = []
        for names in self._choose(n_train, repetition, locations):
            none = np.zeros(len(names), dtype=np.int64)
            splits.append(
                Split(
                    pictures.pixels(names, self.canvas).array(),
                    labels=none,
                    groups=none,
                    mask=self.mask,
                    foregrounds=np.array([place_of[name] for name in names], dtype=np.int64),
                    segments=pictures.segments(names, self.canvas, table).array()[:, 0],
                )
            )
        numbers = pictures.check_numbers(self.largest, self.background, self.ignore)
        number_of = {int(table[number]): str(number) for number in numbers} | {BACKGROUND: BACKGROUND_NAME}
        if self.objects == "one":
            number_of = {BACKGROUND: BACKGROUND_NAME, 1: OBJECT_NAME}
        patch_classes = tuple(number_of.get(k, "") for k in range(1 + max(number_of)))
        return Data(splits[0], splits[1], (ONE_CLASS,), patch_classes=patch_classes)
