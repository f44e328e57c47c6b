"""Foregrounds, which are pictures with classes, and backgrounds, which are pictures without: locating and reading."""

from __future__ import annotations

import re
import unicodedata
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from sparsebench.errors import UserError
from sparsebench.tasks.sources import cache, known, masks
from sparsebench.tasks.sources.files import (
    Contents,
    Locations,
    check_unchanged,
    classes_in,
    contents,
    contents_of,
    fingerprint_of,
    listing,
    path_of,
    square,
)
from sparsebench.tasks.sources.known import (
    DIGITS,
    FLOWERS102,
    OFFICIAL,
    PHOTOS,
    SETS,
    SVHN,
    dataset,
    layout_of,
    names_for,
    of_scikit_learn,
    read,
    tables,
)

HELD_OUT = {DIGITS: ("3", "8"), SVHN: ("3", "8")}
FOLDER = "folder"
SCENES, ARRAY = "pictures", "array"
"""Prefixes of the names of the user's files: a folder with classes, a folder without classes, an .npz file."""
LAYOUT = "a folder with train/<class>/* and test/<class>/*"
DATA_ROOT = Path("data")
"""The default folder of official data sets."""
in_a_class = re.compile("(train|test)/[^/]+/").match
"""Whether a picture's path in a folder is in a class folder of a split."""


def locate_images(
    spec: str, data_root: Path | None = None, download: bool = False, skip_bad: bool = False
) -> tuple[str, Path | None]:
    """Return the name of an image source in cells, and its place.

    Args:
        spec: the name of a known set, or "folder:DIR", a folder of class folders, with the layout of a known set, or of
            pictures with masks.
        data_root: the folder of official data sets.
        download: whether missing official data sets may be downloaded, if torchvision can.
        skip_bad: whether unreadable pictures are left out; otherwise they are an error.

    Raises:
        UserError: `spec` is invalid, or the source does not exist.
    """
    kind, _, path = spec.partition(":")
    if spec in names_for("foregrounds"):
        return locate_official(spec, data_root, download)
    if spec in names_for("task"):
        return _locate_labelled((data_root or DATA_ROOT) / SETS[spec].folder, spec, skip_bad)
    if kind == FOLDER and path:
        folder = Path(path).expanduser()
        if masks.has_masks(folder):
            return masks.locate(folder, skip_bad)
        layout = layout_of(folder)
        return _locate_classes(folder, skip_bad) if layout is None else _locate_labelled(folder, layout, skip_bad)
    allowed = (
        f"{', '.join(names_for('foregrounds'))}, folder:DIR; for tasks of their own {', '.join(names_for('task'))}"
    )
    raise UserError("--images", got=f"'{spec}'", allowed=allowed)


def locate_backgrounds(
    spec: str, data_root: Path | None = None, download: bool = False, skip_bad: bool = False
) -> tuple[str, Path | None]:
    """Return the name of a background source in cells, and its place; see `locate_images`.

    Args:
        spec: the name of a known set, a folder of pictures, or an .npz file.
        data_root, download, skip_bad: see `locate_images`.
    """
    if spec in names_for("backgrounds"):
        return locate_official(spec, data_root, download)
    path = Path(spec).expanduser()
    if path.suffix == ".npz" and path.is_file():
        read_array(path)
        return f"{ARRAY}-{fingerprint_of(path)}", path
    if not path.is_dir():
        allowed = f"{', '.join(names_for('backgrounds'))}, a folder of pictures or an .npz file"
        raise UserError(f"--backgrounds: {path} is not a folder", allowed=allowed)
    return f"{SCENES}-{contents(listing(path), skip_bad=skip_bad).fingerprint}", path


def locate_official(name: str, data_root: Path | None, download: bool) -> tuple[str, Path | None]:
    """Return name and place of a known set. The place is None for sets that come with scikit-learn."""
    if name not in OFFICIAL:
        return name, None
    known.check(name, data_root or DATA_ROOT, download=download)
    return name, data_root or DATA_ROOT


def _locate_labelled(root: Path, kind: str, skip_bad: bool) -> tuple[str, Path]:
    """Return name and place of a set in its published layout, after checking its table and that all pictures exist."""
    if layout_of(root) != kind:
        raise UserError(
            f"{kind} is not in {root}",
            next_step=f"get it from {SETS[kind].source}, then give --images folder:DIR or put it into --data-root",
        )
    listed = listing(root)
    read(kind, SETS[kind].columns, listed)
    files = contents(replace(listed, others={}), tables(root, kind), skip_bad)
    return f"{kind}-{files.fingerprint}", root


def _locate_classes(root: Path, skip_bad: bool) -> tuple[str, Path]:
    for split in ("train", "test"):
        if not (root / split).is_dir():
            raise UserError(f"--images folder: {root / split} is not a folder", allowed=LAYOUT)
    listed = listing(root)
    _check_classes(listed)
    files = contents(listed, skip_bad=skip_bad, belongs=in_a_class)
    _check_classes(files)
    return f"{FOLDER}-{files.fingerprint}", root


def _check_classes(files: Contents) -> None:
    """Raise UserError unless train and test have the same classes, at least two, each with a picture."""
    train, test = (classes_in(files, LAYOUT, split) for split in ("train", "test"))
    if odd := sorted({*train} ^ {*test}):
        alike = len({unicodedata.normalize("NFC", name) for name in odd}) < len(odd)
        raise UserError(
            f"{files.root}: train and test have different classes",
            got=[ascii(name) for name in odd] if alike else odd,
            next_step="some differ in their Unicode normalisation alone: rename them" if alike else None,
        )


LOCATED = {
    "images": locate_images,
    "backgrounds": locate_backgrounds,
    "pretrain_images": locate_images,
}
"""The parameters of tasks that name pictures, with the functions that locate these."""


@dataclass(frozen=True)
class Foregrounds:
    """Pictures with classes. `train` and `test` map a class to (n, 3, size, size) uint8 arrays."""

    classes: tuple[str, ...]
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


def foregrounds(name: str, size: int, locations: Locations) -> Foregrounds:
    """Return the pictures of a source as squares of `size` pixels.

    Raises:
        UserError: the source is not on this machine.
    """
    return _foregrounds(name, size, None if name == DIGITS else path_of(name, locations))


def classes_of(name: str, locations: Locations) -> tuple[str, ...]:
    """Return the classes of a source of foregrounds, without decoding its pictures.

    Raises:
        UserError: the source is not on this machine.
    """
    if name in (DIGITS, SVHN):
        return tuple(map(str, range(10)))
    root = path_of(name, locations)
    if name in OFFICIAL:
        return tuple(dataset(name, root, "test").classes)
    return tuple(sorted({path.split("/")[1] for path in contents_of(name, root).pictures if in_a_class(path)}))


def folder_pixels(name: str, size: int, root: Path) -> tuple[list[str], cache.Pixels]:
    """Return the sorted paths of the pictures in a user's folder, and their (n, 3, size, size) pixels.

    In a folder with classes, pictures outside class folders are left out.
    """
    folder = contents_of(name, root)
    names = [path for path in folder.pictures if name.startswith(SCENES) or in_a_class(path)]
    return names, folder.pixels(names, size)


@lru_cache(maxsize=4)
def _foregrounds(name: str, size: int, root: Path | None) -> Foregrounds:
    if root is None:
        return _digits(size)
    if name in names_for("foregrounds"):
        return _official(name, root, size)
    names, pixels = folder_pixels(name, size, root)
    squares, start = pixels.array(), 0
    splits: dict[str, dict[str, np.ndarray]] = {"train": {}, "test": {}}
    for (split, label), n in Counter(tuple(path.split("/")[:2]) for path in names).items():
        splits[split][label] = squares[start : start + n]  # pictures of a class are adjacent, since paths are sorted
        start += n
    classes = tuple(sorted(splits["train"]))
    train = {label: splits["train"][label] for label in classes}
    test = {label: splits["test"][label] for label in classes}
    return Foregrounds(classes, train, test)


def _digits(size: int) -> Foregrounds:
    """Return scikit-learn's 8 x 8 digits, each in two colours. The first two thirds of each class are for training."""
    from PIL import Image

    from sparsebench import seeds

    table = np.loadtxt(of_scikit_learn("data/digits.csv.gz"), delimiter=",")
    images = table[:, :-1].reshape(-1, 8, 8)
    target = table[:, -1].astype(int)
    rng = seeds.generator("digits", "colours")
    ink, paper = rng.uniform(0.6, 1.0, (len(images), 3)), rng.uniform(0.0, 0.4, (len(images), 3))
    resized = []
    for image in images:
        grey = Image.fromarray((image * 15.9).astype(np.uint8))
        resized.append(np.asarray(grey.resize((size, size), Image.Resampling.BICUBIC)))
    shade = np.stack(resized)[..., None] / 255
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
            pixels = data.data.transpose(0, 2, 3, 1)
            labels = data.labels
            classes = tuple(map(str, range(10)))
        else:
            pixels = data.data
            labels = np.array(data.targets)
            classes = tuple(data.classes)
        squares = _squares(f"{name}-{split}", pixels, size)
        splits.append({label: squares[labels == k] for k, label in enumerate(classes)})
    return Foregrounds(classes, *splits)


def _squares(name: str, pixels: np.ndarray, size: int) -> np.ndarray:
    """Return (n, 3, size, size) uint8, middle squares of (n, height, width, 3) pictures: uint8, or floats in [0, 1]."""
    from PIL import Image

    def row(i: int) -> np.ndarray:
        picture = pixels[i] if pixels.dtype == np.uint8 else (pixels[i] * 255).round().astype(np.uint8)
        return square(Image.fromarray(picture), size).transpose(2, 0, 1)

    return cache.Pixels(f"{name}-{size}-square", (len(pixels), 3, size, size), row).array()


def backgrounds(name: str, size: int, locations: Locations) -> Photos | Pool:
    """Return a source of backgrounds of `size` x `size` pixels.

    Raises:
        UserError: the source is not on this machine, or cannot be read.
    """
    return _backgrounds(name, size, None if name == PHOTOS else path_of(name, locations, "--backgrounds"))


@lru_cache(maxsize=4)
def _backgrounds(name: str, size: int, root: Path | None) -> Photos | Pool:
    if root is None:
        return Photos(size)
    if name == FLOWERS102:
        return _flowers(root, size)
    if name.startswith(SCENES):
        pool = folder_pixels(name, size, root)[1].array()
    else:
        pixels = read_array(root)
        check_unchanged(root, name)
        pool = _squares(name, pixels, size)
    if len(pool) < 5:
        raise UserError(f"--backgrounds: {root} has too few pictures", got=len(pool), allowed="5 or more")
    fifth = np.arange(len(pool)) % 5 == 4
    return Pool((pool[~fifth], pool[fifth]))


def _flowers(root: Path, size: int) -> Pool:
    """Return Oxford's 102 flowers (Nilsback & Zisserman 2008); the training pool includes the validation split.

    The pictures have no official checksum, so their cache files are named by their hash.
    """
    folder = root / SETS[FLOWERS102].folder
    pictures = contents(listing(folder))

    def squares(*splits: str) -> np.ndarray:
        paths = [path for split in splits for path, _ in dataset(FLOWERS102, root, split, loader=Path)]
        return pictures.pixels([path.relative_to(folder).as_posix() for path in paths], size).array()

    return Pool((squares("train", "val"), squares("test")), ("flowers", "clean"))


class Photos:
    """Crops of scikit-learn's two photographs. The left three fifths of each are for training, the rest for the test.

    A source of backgrounds has two kinds, for the spurious task. The composite task draws from the kinds in `textured`,
    which are not empty. Here each photograph is a kind. Training and test never share pixels.
    """

    kinds: tuple[str, str] = ("flower", "china")
    textured: tuple[int, ...] = (0, 1)

    def __init__(self, size: int):
        from PIL import Image

        self.size, self.photos = size, []
        for kind in self.kinds:
            photo: Image.Image = Image.open(of_scikit_learn(f"images/{kind}.jpg"))
            # Height 3.4 times the crop: large enough for many crops, small enough that a crop shows structure.
            scale = 3.4 * size / photo.height
            photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BOX)
            cut = photo.width * 3 // 5
            pixels = np.asarray(photo)
            self.photos.append((pixels[:, :cut], pixels[:, cut:]))

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """Return (n, 3, size, size) uint8 backgrounds of the (n,) kinds, 0 or 1."""
        out = np.empty((len(kinds), 3, self.size, self.size), dtype=np.uint8)
        for row, kind in zip(out, kinds, strict=True):
            photo = self.photos[kind][test]
            top, left = (rng.integers(0, side - self.size + 1) for side in photo.shape[:2])
            row[:] = photo[top : top + self.size, left : left + self.size].transpose(2, 0, 1)
        return out


@dataclass(frozen=True)
class Pool:
    """A source of backgrounds with the kinds picture and clean (black) canvas; see `Photos`.

    Attributes:
        pools: (n, 3, size, size) uint8 for training, and for the test. Of a user's pictures every fifth is for the
            test.
    """

    pools: tuple[np.ndarray, np.ndarray]
    kinds: tuple[str, str] = ("pictures", "clean")
    textured: tuple[int, ...] = (0,)

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """See `Photos.draw`."""
        pool = self.pools[test]
        chosen = pool[rng.integers(0, len(pool), len(kinds))]
        chosen[np.not_equal(kinds, 0)] = 0
        return chosen


def read_array(path: Path) -> np.ndarray:
    """Return the first array of an .npz file.

    Raises:
        UserError: the file cannot be read, or the array is not (n, height, width, 3) of uint8 or of floats in [0, 1].
    """
    try:
        with path.open("rb") as file, NpzFile(file) as archive:
            pixels = archive[archive.files[0]] if archive.files else np.empty(0)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read as an .npz file ({error})", next_step="repair or replace it") from error
    of_bytes = pixels.dtype == np.uint8
    real = pixels.dtype.kind == "f"
    shaped = pixels.ndim == 4 and pixels.shape[3] == 3 and 0 not in pixels.shape
    if not (shaped and (of_bytes or (real and pixels.min() >= 0 and pixels.max() <= 1))):
        span = f", {pixels.min():g} to {pixels.max():g}" if shaped and real else ""
        raise UserError(
            f"{path}: its first array holds no pictures",
            got=f"{pixels.dtype} of shape {pixels.shape}{span}",
            allowed="(n, height, width, 3) of uint8, or of floats in [0, 1]",
        )
    return pixels
