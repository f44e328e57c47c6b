"""Foregrounds: pictures with classes, from scikit-learn, official files or a folder."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from sparsebench.errors import UserError
from sparsebench.tasks.sources import cache, known
from sparsebench.tasks.sources.files import Locations, located, square_of, squares_in
from sparsebench.tasks.sources.known import DIGITS, SVHN, names_for, of_scikit_learn

HELD_OUT = {DIGITS: ("3", "8"), SVHN: ("3", "8")}
FOLDER = "folder"
in_a_class = re.compile("(train|test)/[^/]+/").match
"""Says of the path of a picture in a folder whether it is in a class of a split."""


@dataclass(frozen=True)
class Foregrounds:
    """Pictures with classes. `train` and `test` map a class to (n, 3, size, size) uint8 arrays."""

    classes: tuple[str, ...]
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


def foregrounds(name: str, size: int, locations: Locations) -> Foregrounds:
    """Return the pictures of a source as squares of `size` pixels.

    Raises:
        UserError: they are not on this machine, or are of another kind.
    """
    return _foregrounds(name, size, None if name == DIGITS else located(name, locations))


def foreground_pixels(name: str, size: int, locations: Locations) -> tuple[cache.Pixels, ...]:
    """Return what is to be decoded of a user's own pictures; nothing of a known set, which holds no bad ones."""
    kind, _, content = name.partition("-")
    return (squares_in(located(name, locations), size, content, in_a_class)[1],) if kind == FOLDER else ()


@lru_cache(maxsize=4)
def _foregrounds(name: str, size: int, root: Path | None) -> Foregrounds:
    if root is None:
        return _digits(size)
    if name in names_for("foregrounds"):
        return _official(name, root, size)
    kind, _, content = name.partition("-")
    if kind != FOLDER:
        raise UserError(f"the images '{name}' are of a task of their own", allowed="foregrounds", next_step="--images")
    return _from_folder(root, size, content)


def _digits(size: int) -> Foregrounds:
    """Return scikit-learn's digits, 8x8, in two colours each. The first two thirds of a class train, the rest test."""
    from PIL import Image

    from sparsebench import seeds

    table = np.loadtxt(of_scikit_learn("data/digits.csv.gz"), delimiter=",")
    images, target = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)
    rng = seeds.generator("digits", "colours")
    ink, paper = rng.uniform(0.6, 1.0, (len(images), 3)), rng.uniform(0.0, 0.4, (len(images), 3))
    shade = np.stack(
        [np.asarray(Image.fromarray((x * 15.9).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC))
         for x in images]
    )[..., None] / 255  # fmt: skip
    coloured = (255 * (shade * ink[:, None, None] + (1 - shade) * paper[:, None, None])).astype(np.uint8)
    coloured = np.ascontiguousarray(coloured.transpose(0, 3, 1, 2))
    train, test = {}, {}
    for digit in range(10):
        group = coloured[target == digit]
        cut = len(group) * 2 // 3
        train[str(digit)], test[str(digit)] = group[:cut], group[cut:]
    return Foregrounds(tuple(train), train, test)


def _official(name: str, root: Path, size: int) -> Foregrounds:
    splits = []
    for split in ("train", "test"):
        data = known.dataset(name, root, split)
        if name == SVHN:
            pixels, labels, classes = data.data.transpose(0, 2, 3, 1), data.labels, tuple(map(str, range(10)))
        else:
            pixels, labels, classes = data.data, np.array(data.targets), tuple(data.classes)
        shape = len(pixels), 3, size, size
        squares = cache.Pixels(f"{name}-{split}-{size}-square", shape, partial(square_of, pixels, size)).array()
        splits.append({label: squares[labels == k] for k, label in enumerate(classes)})
    return Foregrounds(classes, *splits)


def _from_folder(root: Path, size: int, content: str) -> Foregrounds:
    """Return train/<class>/* and test/<class>/* of a folder with that fingerprint."""
    names, pixels = squares_in(root, size, content, in_a_class)
    squares = pixels.array()
    splits: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    start = 0
    for (split, name), n in Counter(tuple(name.split("/")[:2]) for name in names).items():
        splits[split][name] = squares[start : start + n]  # sorted by path, those of a class are neighbours
        start += n
    classes = tuple(sorted(splits["train"]))
    return Foregrounds(classes, *({name: splits[split][name] for name in classes} for split in ("train", "test")))
