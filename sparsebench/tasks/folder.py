"""The task `folder`: tests trained weights on a folder of pictures, without training and without known relevance."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError, few
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task
from sparsebench.tasks.groups import LEAST_OF_CLASS, shares
from sparsebench.tasks.sources.cache import Pixels
from sparsebench.tasks.sources.files import (
    Contents,
    check_unchanged,
    classes_in,
    contents,
    contents_of,
    fingerprint_of,
    listing,
    path_of,
    read_rgb,
)
from sparsebench.tasks.sources.labels import BY_FILE, FILE, MOST_CLASSES, Numbered, number, read_file

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

log = logging.getLogger(__name__)

Resize = Literal["short", "squash"]
Filter = Literal["bicubic", "bilinear"]
LONG = 50
"""Aspect ratio above which only the middle of a picture is resized: the whole resized picture could take gigabytes."""
USUAL = {"canvas": 224, "crop": 0.9, "resize": "short", "filter": "bicubic"}
"""How pictures are cut if neither the task nor the model says it."""
SPLITS = ("val", "test")
"""Subfolders with test pictures, in order of priority."""
LAYOUT = "a folder with val/<class>/*, test/<class>/* or <class>/*"
HALF = 0.5
"""The share of the pictures that a probe learns from, if there is no folder of training pictures."""


def locate(spec: str, skip_bad: bool = False) -> tuple[str, Path]:
    """Return the name of folder:DIR in cells, a hash of the pictures, and the path of the class folders.

    Args:
        spec: the argument of --images.
        skip_bad: whether pictures that cannot be read are left out; otherwise they are an error.

    Raises:
        UserError: another source, no such folder, no classes, or a class without pictures.
    """
    kind, _, path = spec.partition(":")
    if kind != "folder" or not path:
        raise UserError("--images of task 'folder'", got=f"'{spec}'", allowed="folder:DIR")
    listed = _test_folder_of(Path(path).expanduser())
    classes_in(listed, LAYOUT)
    folder = contents(listed, skip_bad=skip_bad, belongs=lambda path: "/" in path)
    classes_in(folder, LAYOUT)
    return f"folder-{folder.fingerprint}", listed.root


def _test_folder_of(root: Path) -> Contents:
    """Return the listing of the folder with the classes: the first of root/val and root/test with a picture, or root.

    Raises:
        UserError: root is not a folder, or it has val or test, without pictures.
    """
    if not root.is_dir():
        raise UserError(f"--images folder: {root} is not a folder", allowed=LAYOUT)
    splits = [root / split for split in SPLITS if (root / split).is_dir()]
    for split in splits:
        if (listed := listing(split)).pictures:
            empty = [path.name for path in splits[: splits.index(split)]]
            return replace(listed, others={**({"folders without pictures": empty} if empty else {}), **listed.others})
    if splits:
        raise UserError(f"{splits[0]} holds no pictures", allowed=LAYOUT)
    return listing(root)


def cut_out(rgb: Picture, canvas: int, crop: float, resize: Resize = "short", filter: Filter = "bicubic") -> np.ndarray:
    """Return a picture as (canvas, canvas, 3) uint8, cut as is usual for tests on ImageNet.

    The short side is resized to canvas / crop pixels, or with "squash" both sides; then the middle is cut out.
    """
    from PIL import Image

    side = int(canvas / crop)
    method = Image.Resampling[filter.upper()]
    width, height = (side if resize == "squash" else int(side * length / min(rgb.size)) for length in rgb.size)
    left, top = round((width - canvas) / 2), round((height - canvas) / 2)
    if resize == "short" and max(rgb.size) > LONG * min(rgb.size):
        x, y = (max(0, length // 2 - 2 * min(rgb.size)) for length in rgb.size)  # the same at both ends
        middle = rgb.crop((x, y, rgb.width - x, rgb.height - y))
        return cut_out(middle, canvas, crop, resize, filter)
    return np.asarray(rgb.resize((width, height), method).crop((left, top, left + canvas, top + canvas)))


def _train_folder_of(root: Path) -> Path | None:
    """Return the folder train beside the folder of the test pictures; None without pictures there."""
    train = root.parent / "train"
    is_there = root.name in SPLITS and train.is_dir()
    return train if is_there and _pictures_in(train) else None


@cache
def _pictures_in(root: Path) -> list[str]:
    """Return the paths of the pictures below a folder, listed once in a process: ImageNet has a million."""
    return list(listing(root).pictures)


@cache
def _warn_of_copies(test: str, test_root: Path, train: str, train_root: Path) -> None:
    """Warn once in a process if test pictures are among the training pictures, byte for byte."""
    learned = {*contents_of(train, train_root).pictures.values()}
    tested = contents_of(test, test_root).pictures
    copies = [name for name, sha256 in tested.items() if sha256 in learned]
    if copies:
        log.warning(
            "%s: %d of %d test pictures are training pictures of %s too, so probes know their classes: %s",
            test_root,
            len(copies),
            len(tested),
            train_root,
            few(copies, width=60),
        )


@cache
def _compare_orders(root: Path, numbered: Numbered, folders: tuple[str, ...]) -> None:
    """Warn if sorted folders, which are numbered by their names, are not in the order of their numbers.

    The warning comes once in a process, not for each file of weights.
    """
    if list(numbered.numbers) != sorted(numbered.numbers):
        log.warning(
            "%s: class folders %s are the classes of the head by their numbers; if the head was trained with "
            "torchvision's ImageFolder, which sorts names (%s), give --task folder:labels=names, else labels=numbers",
            root,
            few(numbered.classes),
            few(folders),
        )


class Folder(Task):
    """Tests trained weights on a folder of pictures, without training.

    The pictures are DIR/val/<class>/*, DIR/test/<class>/* or DIR/<class>/*, in this order of priority. By default
    pictures are cut as timm states it for the model's weights. Cells store the resulting sizes and filter. Relevant
    tokens are not known: there are no selection metrics, and oracles are unsupported.
    """

    name: ClassVar[str] = "folder"
    inputs: ClassVar[Inputs] = "images"
    default_model: ClassVar[str] = "timm"
    trains: ClassVar[bool] = False
    added: ClassVar[frozenset[str]] = frozenset({"classes", "head", "among", "choose_on", "train", "split"})

    images: str = Field("", description="the pictures: given by --images folder:DIR")
    canvas: int = Field(0, ge=0, description="side of the image in pixels; 0: as in the model")
    crop: float = Field(
        0.0, ge=0, le=1, description="side of the image over the short side of the picture; 0: as in the model"
    )
    resize: Resize | Literal[""] = Field(
        "", description="short: keeps the aspect ratio; squash: makes a square; default: as in the model"
    )
    filter: Filter | Literal[""] = Field("", description="filter for resizing; default: as in the model")
    test: int = Field(0, ge=0, description="number of test images, sampled in each repetition; 0 for all")
    labels: Literal["auto", "imagenet", "numbers", "names", "file"] = Field(
        "auto",
        description="assigns folders to classes of the head. imagenet: by WordNet ids or names of ImageNet-1k; "
        "numbers: by their names; names: in the order in which Python and torchvision sort them; file: as classes "
        "says; auto: by the names and the head, or an error",
    )
    classes: str = Field(
        "",
        description="file with the head's classes: one name per line, or JSON: a list, or an object of name to number",
    )
    among: Literal["head", "folders"] = Field(
        "head",
        description="classes that a test can predict: all of the head, or those with a folder, as usual for ImageNet-A "
        "and ImageNet-R",
    )
    choose_on: Literal["", "test"] = Field(
        "",
        description="test: schedule=auto may use the test pictures, without their labels; default: those of DIR/train, "
        "or those that test=N does not draw",
    )
    head: int = Field(0, ge=0, le=MOST_CLASSES, description="number of classes of the head; 0: as in the weights")

    train: str = Field("", description="training pictures of a probe: those of DIR/train; set by sparsebench")
    split: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="share of the pictures of each class that a probe learns from, other ones in each repetition; 0: "
        "DIR/train, or half of the pictures without this folder",
    )

    @property
    def reads_head(self) -> bool:
        """See `Task.reads_head`."""
        return not (self.train or self.split)

    def class_count(self, labels: np.ndarray) -> int:
        """See `Task.class_count`: the parameter `head`, which cells store."""
        return self.head or super().class_count(labels)

    def draws_test(self) -> bool:
        """See `Task.draws_test`: without `test`, each repetition tests all pictures."""
        return self.test > 0 or self.split > 0

    def check(self) -> None:
        """See `Task.check`."""
        if not self.images.startswith("folder-"):
            raise UserError("task 'folder' tests on your own pictures", next_step="give --images folder:DIR")
        if self.labels not in ("auto", "file") and self.classes:
            raise UserError(
                f"labels={self.labels} and classes={self.classes} number class folders twice", next_step="leave one out"
            )
        if self.labels == "file" and not self.classes:
            raise UserError("labels=file: no file is given", next_step=f"give {BY_FILE}")

    def with_cut(self, cut: Mapping[str, Any]) -> Folder:
        """See `Task.with_cut`: the model determines the parameters of the cut that are not given."""
        defaults = {key: value for key, value in (USUAL | dict(cut)).items() if not getattr(self, key)}
        try:
            return type(self).model_validate(self.model_dump() | defaults)
        except ValueError as error:
            raise UserError(
                "task 'folder' cannot cut pictures as the model requires",
                got=defaults,
                next_step="give canvas, crop, resize and filter",
            ) from error

    def locate(self) -> tuple[Folder, Mapping[str, Path]]:
        """See `Task.locate`: locates the file with the classes."""
        if not self.classes:
            return self, {}
        path = Path(self.classes).expanduser()
        read_file(path)
        name = f"{FILE}-{fingerprint_of(path)}"
        return self.model_copy(update={"labels": "file", "classes": name}), {name: path.absolute()}

    def with_classes(self, head: int | None, locations: Locations) -> Folder:
        """See `Task.with_classes`."""
        if self.head and head not in (None, self.head):
            raise UserError(
                "task 'folder': wrong head", got=f"head={self.head}", allowed=str(head), next_step="leave it out"
            )
        folders = self._folders(locations)
        numbered = self._number(folders, head, locations)
        if self.labels == "auto" and numbered.labels == "numbers" and len(folders) == len(numbered.classes):
            _compare_orders(path_of(self.images, locations), numbered, tuple(folders))
        return self.model_copy(update={"labels": numbered.labels, "head": len(numbered.classes)})

    def for_probe(self, locations: Locations, skip_bad: bool = False) -> tuple[Folder, Mapping[str, Path]]:
        """See `Task.for_probe`: the pictures of DIR/train, or without it a share of the pictures of each class.

        The classes of a probe are the class folders, sorted by name.
        """
        root = path_of(self.images, locations)
        classes = tuple(self._folders(locations))
        of_cell = self.head == len(classes) and not self.reads_head  # a cell's task has this already
        if not of_cell and (self.labels not in ("auto", "names") or self.classes or self.head):
            raise UserError(
                "a probe learns the class folders, and needs no classes of a head",
                got=f"labels={self.labels}",
                next_step="leave labels, classes and head out",
            )
        if self.train and not of_cell:
            raise UserError("the training pictures of a probe", got=f"train={self.train}", next_step="leave train out")
        probed = self.model_copy(update={"labels": "names", "head": len(classes)})
        train = _train_folder_of(root)
        if train is None or self.split:
            probed = probed.model_copy(update={"split": self.split or HALF, "train": ""})
            places: dict[str, Path] = {}
        else:
            files = contents(listing(train), skip_bad=skip_bad, belongs=lambda path: "/" in path)
            if odd := sorted({*classes_in(files, LAYOUT)} ^ {*classes}):
                raise UserError(f"{train} and {root} have different classes", got=odd)
            probed = probed.model_copy(update={"train": f"folder-{files.fingerprint}"})
            places = {probed.train: train}
            _warn_of_copies(self.images, root, probed.train, train)
        counts = probed.training_counts({**locations, **places})
        if counts.min() < LEAST_OF_CLASS:
            raise UserError(
                f"{root}: a probe needs {LEAST_OF_CLASS} training pictures of each class",
                got=f"{counts.min()} of '{classes[int(counts.argmin())]}'",
                next_step="add pictures, or remove the class",
            )
        return probed, places

    def training_counts(self, locations: Locations) -> np.ndarray:
        """See `Task.training_counts`."""
        if self.train:
            return np.array([len(names) for names in self._folders(locations, self.train).values()])
        counts = np.array([len(names) for names in self._folders(locations).values()])
        return np.minimum(np.rint(self.split * counts), counts - 1).astype(int)

    def recipe(self) -> Recipe:
        """See `Task.recipe`: no training steps."""
        return Recipe("cross-entropy", "adamw", lr=0.0, batch=1, epochs=0, steps=0)

    def known_classes(self, locations: Locations) -> tuple[str, ...]:
        """See `Task.known_classes`."""
        return self._number(self._folders(locations), None, locations).classes

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`."""
        chosen, folders, foregrounds = self._choose(repetition, locations)
        classes, numbers = self._number(folders, None, locations)[1:]
        number_of = dict(zip(folders, numbers, strict=True))
        images = self._pixels(chosen, locations).array()
        labels = np.array([number_of[name.partition("/")[0]] for name in chosen], dtype=np.int64)
        # Numbers of pictures matter only if repetitions draw some of them: several may then draw the same picture.
        draws = self.draws_test()
        test = Split(images, labels, np.zeros_like(labels), foregrounds=foregrounds if draws else None)
        among = np.array(numbers) if self.among == "folders" else None
        train = Split(images[:0], labels[:0], labels[:0])
        if n_train:
            names = self._training_pictures(n_train, repetition, locations)
            drawn = np.array([number_of[name.partition("/")[0]] for name in names], dtype=np.int64)
            pixels = self._pixels(names, locations, self.train or self.images).array()
            train = Split(pixels, drawn, np.zeros_like(drawn))
        return Data(train, test, classes, among=among)

    def _training_pictures(self, n: int, repetition: int, locations: Locations) -> list[str]:
        """Return the sorted paths of n training pictures of a probe, with the shares of the classes."""
        if self.train:
            folders = self._folders(locations, self.train)
            available = [
                list(seeds.generator("train", self.train, repetition, folder).permutation(names))
                for folder, names in folders.items()
            ]
        else:
            available = [names[:count] for names, count in self._shuffled(repetition, locations)]
        sizes = shares(np.array([len(names) for names in available]), n, LEAST_OF_CLASS)
        return sorted(str(name) for names, size in zip(available, sizes, strict=True) for name in names[:size])

    def _shuffled(self, repetition: int, locations: Locations) -> list[tuple[list[str], int]]:
        """Return the pictures of each class in random order, and how many of the first are training pictures."""
        shuffled = []
        counts = self.training_counts(locations)
        for (folder, names), count in zip(self._folders(locations).items(), counts, strict=True):
            order = seeds.generator("split", self.images, repetition, folder).permutation(len(names))
            shuffled.append(([names[i] for i in order], int(count)))
        return shuffled

    def _number(self, folders: Iterable[str], head: int | None, locations: Locations) -> Numbered:
        """Return the class of each folder; `head` is the number of classes of the head, used if the cell has none."""
        file = None
        if self.classes:
            check_unchanged(path := path_of(self.classes, locations, BY_FILE), self.classes)
            file = read_file(path)
        try:
            return number(list(folders), "auto" if self.labels == "file" else self.labels, self.head or head, file)
        except UserError as error:
            raise UserError(f"{path_of(self.images, locations)}: {error}") from error

    def pictures(self, n_train: int, repetition: int, locations: Locations) -> Sequence[Pixels]:
        """See `Task.pictures`."""
        test = self._pixels(self._choose(repetition, locations)[0], locations)
        if not n_train:
            return (test,)
        names = self._training_pictures(n_train, repetition, locations)
        return test, self._pixels(names, locations, self.train or self.images)

    def schedule_images(self, count: int, repetition: int, locations: Locations) -> tuple[Split, str]:
        """See `Task.schedule_images`: pictures of DIR/train, or pictures that the test does not use."""
        root, names, source = self._schedule_pictures(repetition, locations)
        order = seeds.generator("schedule", self.name, self.images, repetition).permutation(len(names))[:count]
        cut = self.with_cut({}).model_dump(include=set(USUAL))
        size = cut.pop("canvas")
        pictures = [cut_out(read_rgb(root / names[i]), size, **cut).transpose(2, 0, 1) for i in order]
        labels = np.zeros(len(pictures), dtype=np.int64)
        return Split(np.stack(pictures), labels, np.zeros_like(labels)), source

    def check_schedule_images(self, locations: Locations) -> None:
        """See `Task.check_schedule_images`."""
        self._schedule_pictures(0, locations)

    def _schedule_pictures(self, repetition: int, locations: Locations) -> tuple[Path, list[str], str]:
        """Return a folder, the paths in it of the pictures on which schedules may be chosen, and which these are."""
        root = path_of(self.images, locations)
        chosen, *_ = self._choose(repetition, locations)
        if self.choose_on == "test":
            return root, chosen, "test pictures, without labels"
        train = None if self.split else _train_folder_of(root)
        if train is not None:
            return train, _pictures_in(train), "pictures of the folder train"
        in_test = set(chosen)
        others = [name for names in self._folders(locations).values() for name in names if name not in in_test]
        if not others:
            raise UserError(
                f"schedule=auto needs pictures other than the test's, and {root} has none",
                next_step=f"put some into {(root.parent if root.name in SPLITS else root) / 'train'}, test fewer with "
                "--task folder:test=N, or allow the test pictures without their labels with "
                "--task folder:choose_on=test",
            )
        return root, others, "pictures that the test does not use"

    def _folders(self, locations: Locations, images: str = "") -> dict[str, list[str]]:
        """Return the paths of the pictures by class folder, both sorted; `images` are the test pictures by default."""
        folders: dict[str, list[str]] = {}
        images = images or self.images
        pictures = contents_of(images, path_of(images, locations)).pictures
        for folder, inside, name in sorted(name.partition("/") for name in pictures):
            if inside:
                folders.setdefault(folder, []).append(f"{folder}/{name}")
        return folders

    def _choose(self, repetition: int, locations: Locations) -> tuple[list[str], list[str], np.ndarray]:
        """Return the paths of the test pictures, all class folders, and the numbers of the test pictures."""
        folders = self._folders(locations)
        paths = [name for names in folders.values() for name in names]
        chosen = np.arange(len(paths))
        if self.split:
            learned = {name for names, count in self._shuffled(repetition, locations) for name in names[:count]}
            chosen = np.array([i for i in chosen if paths[i] not in learned])
        if self.test > (count := len(chosen)):
            raise UserError("test of task 'folder'", got=self.test, allowed=f"at most {count}, the number of pictures")
        if self.test:
            order = seeds.generator(self.name, self.images, repetition).permutation(count)
            chosen = np.sort(chosen[order[: self.test]])
        return [paths[i] for i in chosen], list(folders), chosen

    def _pixels(self, names: Sequence[str], locations: Locations, images: str = "") -> Pixels:
        """Return the pictures of these names, cut by the task's parameters; see `_folders`."""
        cut = self.with_cut({}).model_dump(include=set(USUAL))
        size = cut.pop("canvas")
        method = "-".join(f"{key}-{value}" for key, value in cut.items())
        images = images or self.images
        folder = contents_of(images, path_of(images, locations))
        return folder.pixels(names, size, partial(cut_out, **cut), method)
