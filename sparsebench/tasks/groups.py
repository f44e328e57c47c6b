"""Published data sets in which the label is correlated with an attribute, read from the user's folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Locations, Split
from sparsebench.tasks.images import PictureTask
from sparsebench.tasks.sources.cache import Pixels
from sparsebench.tasks.sources.files import Contents, path_of
from sparsebench.tasks.sources.known import CELEBA, SETS, WATERBIRDS, labelled_pictures

if TYPE_CHECKING:
    import pandas as pd

TRAIN, VALIDATION, TEST = 0, 1, 2
OF = {TRAIN: "training", VALIDATION: "validation", TEST: "test"}
LEAST_OF_CLASS = 2
"""Fewest training images of a class for a probe."""


class GroupTask(PictureTask):
    """Pictures with a label and an attribute; groups are (label, attribute), as in Sagawa et al. 2020.

    The middle square of each picture is resized (bilinear) to the canvas. Relevant patches are not known: there are no
    selection metrics, and oracles are unsupported.
    """

    default_model: ClassVar[str] = "timm"
    official: ClassVar[bool] = True

    images: str = Field("", description="the set, as --images locates it")
    canvas: int = Field(224, gt=0, description="side of the image in pixels")
    test: int = Field(0, ge=0, description="test images, with the shares of the groups; 0 for the whole test split")

    def class_count(self, labels: np.ndarray) -> int:
        """See `Task.class_count`."""
        return 2

    def columns(self) -> tuple[str, str]:
        """Return the columns of the set's table that are the label and the attribute."""
        label, attribute = SETS[self.name].columns
        return label, attribute

    def names(self) -> tuple[tuple[str, str], tuple[str, ...]]:
        """Return the names of the classes, and of the groups in the order (0, 0), (0, 1), (1, 0), (1, 1)."""
        raise NotImplementedError(f"task '{self.name}' must define names()")

    def check(self) -> None:
        """See `Task.check`."""
        super().check()
        if not self.images.startswith(f"{self.name}-"):
            raise UserError(
                f"task '{self.name}' needs its own images",
                got=f"'{self.images}'" if self.images else None,
                next_step=f"give --images {self.name} with --data-root, or --images folder:DIR",
            )

    def check_located(self, locations: Locations) -> None:
        """See `Task.check_located`: each group must have training and test pictures."""
        if self.images not in locations:
            return
        _, table = self._read(locations)
        for number in (TRAIN, TEST):
            counts = np.bincount(table["group"][table["split"] == number], minlength=4)
            if 0 in counts:
                name = self.names()[1][int(counts.argmin())]
                raise UserError(
                    f"{locations[self.images]}: its {OF[number]} split has no picture of '{name}'",
                    next_step="use a table with pictures of each group, since accuracy is measured for each group",
                )

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`: a sample of a split keeps the shares of its groups, and each repetition draws its own.

        The data have the official validation split if the recipe uses validation.
        """
        splits = {}
        for number, (pixels, rows) in self._parts(n_train, repetition, locations).items():
            splits[number] = Split(pixels.array(), np.array(rows["label"]), np.array(rows["group"]))
        return Data(splits[TRAIN], splits[TEST], *self.names(), validation=splits.get(VALIDATION))

    def pictures(self, n_train: int, repetition: int, locations: Locations) -> Sequence[Pixels]:
        """See `Task.pictures`."""
        return [pixels for pixels, _ in self._parts(n_train, repetition, locations).values()]

    def _read(self, locations: Locations) -> tuple[Contents, pd.DataFrame]:
        return labelled_pictures(self.name, self.images, path_of(self.images, locations), self.columns())

    def _parts(self, n_train: int, repetition: int, locations: Locations) -> dict[int, tuple[Pixels, pd.DataFrame]]:
        """Return the drawn pictures of each split, and their rows of the table."""
        folder, table = self._read(locations)
        splits = {number: table[table["split"] == number] for number in OF}
        sizes = {TRAIN: n_train, TEST: self.test}
        if (self.validation or self.patience) and len(splits[VALIDATION]):
            sizes[VALIDATION] = 0
        parts = {number: self._part(splits[number], number, n, repetition) for number, n in sizes.items()}
        return {number: (folder.pixels(list(rows["file"]), self.canvas), rows) for number, rows in parts.items()}

    def _part(self, rows: pd.DataFrame, number: int, n: int, repetition: int) -> pd.DataFrame:
        """Return n random rows of a split in their order, or all rows if n is 0."""
        if n in (0, len(rows)):
            return rows
        counts = np.bincount(rows["group"], minlength=4)
        if not len(counts) <= n <= len(rows):
            raise UserError(
                f"task '{self.name}': images of the {OF[number]} split",
                got=n,
                allowed=f"{len(counts)}, one for each group, to {len(rows)}, all pictures",
            )
        rng = seeds.generator(self.name, self.images, *self.columns(), repetition, number)
        lines = [
            rng.permutation(rows.index[rows["group"] == group])[:share] for group, share in enumerate(shares(counts, n))
        ]
        return rows.loc[np.sort(np.concatenate(lines))]


def shares(counts: np.ndarray, n: int, least: int = 1) -> np.ndarray:
    """Return how many of n each group gets: in proportion to `counts`, by largest remainders, but at least `least`.

    Args:
        counts: (G,) sizes of the groups, each at least `least`.
        n: from G times `least` to the sum of the counts.
        least: the smallest number.
    """
    exact = counts * (n / counts.sum())
    out = np.maximum(np.floor(exact), least).astype(np.int64)
    while (missing := n - int(out.sum())) != 0:
        step = 1 if missing > 0 else -1
        room = (out < counts) if step > 0 else (out > least)
        out[np.where(room, step * (exact - out), -np.inf).argmax()] += step
    return out


class Waterbirds(GroupTask):
    """Land and water birds on land and water (Sagawa et al. 2020), read from the published folder."""

    name: ClassVar[str] = WATERBIRDS

    def names(self) -> tuple[tuple[str, str], tuple[str, ...]]:
        """See `GroupTask.names`."""
        birds = "landbird", "waterbird"
        return birds, tuple(f"{bird} on {place}" for bird in birds for place in ("land", "water"))


class CelebA(GroupTask):
    """Faces with two of the forty attributes of CelebA (Liu et al. 2015), as in Sagawa et al. 2020."""

    name: ClassVar[str] = CELEBA

    target: str = Field(SETS[CELEBA].columns[0], description="the attribute that is the label")
    confounder: str = Field(SETS[CELEBA].columns[1], description="the attribute that goes with it")

    def check(self) -> None:
        """See `Task.check`."""
        super().check()
        if self.target == self.confounder:
            raise UserError("celeba: target and confounder are one attribute", got=self.target)

    def columns(self) -> tuple[str, str]:
        """See `GroupTask.columns`."""
        return self.target, self.confounder

    def names(self) -> tuple[tuple[str, str], tuple[str, ...]]:
        """See `GroupTask.names`."""
        classes = f"not {self.target}", self.target
        return classes, tuple(f"{name}, {of}" for name in classes for of in (f"not {self.confounder}", self.confounder))
