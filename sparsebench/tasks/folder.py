"""Trained weights, tested as they are on a folder of pictures: nothing is trained, no mask of relevance is known."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from sparsebench import seeds, sources
from sparsebench.errors import UserError
from sparsebench.sources import imagenet
from sparsebench.sources.files import REFUSED, Bad
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task

IMAGENET = 1000
"""Classes of an ImageNet head."""

Resize = Literal["short", "squash"]
Filter = Literal["bicubic", "bilinear"]
MOST_RESIZED = 2**24
"""Pixels of what a picture is resized to as a whole, before the middle is cut out of it."""
USUAL = {"canvas": 224, "crop": 0.9, "resize": "short", "filter": "bicubic"}
"""How pictures are cut where the model does not say it."""
LAYOUT = "a folder with val/<class>/*, test/<class>/* or <class>/*"


def locate(spec: str, bad: Bad = REFUSED) -> tuple[str, Path]:
    """Return the name that a cell has for folder:DIR, from the contents of the pictures, and where these lie.

    `bad` says what is to be done about pictures that cannot be read.

    Raises:
        UserError: another source, no such folder, no classes, or one without pictures.
    """
    kind, _, path = spec.partition(":")
    if kind != "folder" or not path:
        raise UserError("--images of a test of trained weights", got=f"'{spec}'", allowed="folder:DIR")
    root = test_folder_of(Path(path).expanduser())
    folders, names = class_folders(root), sources.names_in(root)
    _check_full(folders, names)
    found = sources.contents(root, names, bad=bad)
    _check_full(folders, list(found.pictures))
    return f"folder-{found.fingerprint}", root


def _check_full(folders: Sequence[Path], names: Sequence[str]) -> None:
    """Raise UserError for a class without pictures."""
    full = {name.partition("/")[0] for name in names}
    for folder in folders:
        if folder.name not in full:
            raise UserError(f"{folder} holds no pictures", allowed="at least one in each class")


def test_folder_of(root: Path) -> Path:
    """Return the folder of the classes: val or test in the given one where they are there, else that itself."""
    return next((root / split for split in ("val", "test") if (root / split).is_dir()), root)


def class_folders(root: Path) -> list[Path]:
    """Return the folders of the classes, sorted by name.

    Raises:
        UserError: there are fewer than two.
    """
    if not root.is_dir():
        raise UserError(f"--images folder: {root} is not a folder", allowed=LAYOUT)
    folders = sorted((p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name)
    if len(folders) < 2:
        raise UserError(f"{root}: too few classes", got=[p.name for p in folders], allowed=f"2 or more: {LAYOUT}")
    return folders


def read_cropped(
    path: Path, canvas: int, crop: float, resize: Resize = "short", filter: Filter = "bicubic",
    sha256: str | None = None,
) -> np.ndarray:  # fmt: skip
    """Return a picture as (canvas, canvas, 3) uint8, as networks are tested on ImageNet.

    The short side becomes canvas / crop pixels, or with "squash" both sides do; then the middle is cut out. Of a
    picture so long that this would take much memory the middle alone is resized, which is the same but for rounding.
    The file must have that SHA-256.
    """
    from PIL import Image

    rgb, how = sources.read_rgb(path, sha256), Image.Resampling[filter.upper()]
    side = int(canvas / crop)
    width, height = (side if resize == "squash" else int(side * length / min(rgb.size)) for length in rgb.size)
    left, top = round((width - canvas) / 2), round((height - canvas) / 2)
    if width * height <= MOST_RESIZED:
        return np.asarray(rgb.resize((width, height), how).crop((left, top, left + canvas, top + canvas)))
    across, down = rgb.width / width, rgb.height / height  # pixels of the picture in one of what it becomes
    box = left * across, top * down, (left + canvas) * across, (top + canvas) * down
    return np.asarray(rgb.resize((canvas, canvas), how, box))


def cropped(
    content: str, root: Path, names: Sequence[str], canvas: int, crop: float, resize: Resize = "short",
    filter: Filter = "bicubic",
) -> sources.Pixels:  # fmt: skip
    """Return (n, 3, canvas, canvas) pixels of some pictures of a folder with that fingerprint; see `read_cropped`.

    Raises:
        UserError: the folder has not that content any more.
    """
    known = sources.contents_of(content, root).pictures

    def row(i: int) -> np.ndarray:
        return read_cropped(root / names[i], canvas, crop, resize, filter, known[names[i]]).transpose(2, 0, 1)

    which = hashlib.sha256(os.fsencode("\0".join(names))).hexdigest()[:12]
    name = f"{content}-{which}-{canvas}-crop-{crop}-{resize}-{filter}-first"
    return sources.Pixels(name, (len(names), 3, canvas, canvas), row)


class Folder(Task):
    """Trained weights, tested as they are on a folder of pictures.

    It is DIR/val/<class>/*, DIR/test/<class>/* or DIR/<class>/*, whichever is there first. Pictures are cut as
    the model's trained weights want it, as timm has that for the name of the model, unless it is said here; the cells
    have the numbers. Which tokens matter is not known: there are no selection metrics, and oracles are unsupported.
    """

    name: ClassVar[str] = "folder"
    inputs: ClassVar[Inputs] = "images"
    default_model: ClassVar[str] = "timm"
    trains: ClassVar[bool] = False

    images: str = Field("", description="the pictures: given by --images folder:DIR")
    canvas: int = Field(0, ge=0, description="side of the image in pixels; 0 for the model's own")
    crop: float = Field(
        0.0, ge=0, le=1, description="side of the image over the short side of the picture; 0 for the model's own"
    )
    resize: Resize | Literal[""] = Field(
        "", description="short: the shape stays; squash: it becomes a square; the model's own unless given"
    )
    filter: Filter | Literal[""] = Field("", description="of the resizing; the model's own unless given")
    test: int = Field(0, ge=0, description="test images, drawn in each repetition; 0 for all")
    labels: Literal["auto", "imagenet", "folders"] = Field(
        "auto",
        description="imagenet: folders are named after classes of ImageNet-1k, by WordNet id or name; "
        "folders: they are the head's classes, in the order of their names; auto: imagenet where all are so named",
    )

    def class_counts(self, labels: np.ndarray) -> tuple[int, ...]:
        """See `Task.class_counts`; pictures that an ImageNet head is tested on need not be of all its classes."""
        if self.labels == "imagenet":
            return (IMAGENET,)
        if self.test:
            raise UserError("how many classes there are is not known from a part of the pictures")
        seen = int(labels.max()) + 1
        return (seen,) if self.labels == "folders" else (seen, IMAGENET)

    def check(self) -> None:
        """See `Task.check`."""
        if not self.images.startswith("folder-"):
            raise UserError("task 'folder' tests on your own pictures", next_step="give --images folder:DIR")

    def with_cut(self, cut: Mapping[str, Any]) -> Folder:
        """See `Task.with_cut`: what is not said of how pictures are cut is the model's."""
        left = {key: value for key, value in (USUAL | dict(cut)).items() if not getattr(self, key)}
        try:
            return type(self).model_validate(self.model_dump() | left)
        except ValueError as error:
            raise UserError(
                f"task 'folder' cannot cut pictures as the model wants them: {left}",
                next_step="give canvas, crop, resize and filter",
            ) from error

    def recipe(self) -> Recipe:
        """See `Task.recipe`: no step is taken."""
        return Recipe("cross-entropy", "adamw", lr=0.0, batch=1, epochs=0, steps=0)

    def known_classes(self, locations: Locations) -> tuple[str, ...]:
        """See `Task.known_classes`."""
        return self._classes(class_folders(self._root(locations)))[0]

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`."""
        chosen, names = self._chosen(repetition, locations)
        classes, numbers = self._classes([self._root(locations) / name for name in names])
        number = dict(zip(names, numbers, strict=True))
        images = self._pixels(chosen, locations).array()
        labels = np.array([number[name.partition("/")[0]] for name in chosen], dtype=np.int64)
        test = Split(images, labels, np.zeros_like(labels))
        return Data(Split(images[:0], labels[:0], labels[:0]), test, classes)

    def pictures(self, n_train: int, repetition: int, locations: Locations) -> Sequence[sources.Pixels]:
        """See `Task.pictures`."""
        return (self._pixels(self._chosen(repetition, locations)[0], locations),)

    def _chosen(self, repetition: int, locations: Locations) -> tuple[list[str], list[str]]:
        """Return the paths of the pictures that are tested on, and the names of all folders of classes, in order."""
        known = sources.contents_of(self._content, self._root(locations)).pictures
        in_classes = sorted(name.partition("/") for name in known if "/" in name)
        every = ["".join(parts) for parts in in_classes]
        chosen = [every[i] for i in self._choose(len(every), repetition)]
        return chosen, list(dict.fromkeys(folder for folder, _, _ in in_classes))

    def _pixels(self, names: Sequence[str], locations: Locations) -> sources.Pixels:
        """Return those pictures, cut as the task has it."""
        cut = self.with_cut({}).model_dump(include=set(USUAL))
        return cropped(self._content, self._root(locations), names, **cut)

    @property
    def _content(self) -> str:
        return self.images.partition("-")[2]

    def _root(self, locations: Locations) -> Path:
        if self.images not in locations:
            raise UserError(
                f"the images '{self.images}' of this cell are not on this machine", next_step="give --images"
            )
        return locations[self.images]

    def _choose(self, count: int, repetition: int) -> np.ndarray:
        """Return which pictures are tested on, in rising order."""
        if self.test > count:
            raise UserError("test of task 'folder'", got=self.test, allowed=f"at most the {count} pictures there are")
        if self.test == 0:
            return np.arange(count)
        return np.sort(seeds.generator(self.name, self.images, repetition).permutation(count)[: self.test])

    def _classes(self, folders: list[Path]) -> tuple[tuple[str, ...], list[int]]:
        """Return the classes of the head, and the number of each folder's."""
        names = tuple(folder.name for folder in folders)
        if self.labels == "folders":
            return names, list(range(len(names)))
        numbers = imagenet.numbers_of(names)
        known = [number for number in numbers if number is not None]
        if len(known) < len(names):
            if self.labels == "auto":
                return names, list(range(len(names)))
            strange = [name for name, number in zip(names, numbers, strict=True) if number is None]
            raise UserError(
                "labels=imagenet: folders that are named after no class of ImageNet-1k, or after two",
                got=strange[:5], allowed="WordNet ids, or class names",
            )  # fmt: skip
        if twice := [name for name, number in zip(names, known, strict=True) if known.count(number) > 1]:
            raise UserError("folders named after the same class of ImageNet-1k", got=twice)
        return imagenet.classes(), known
