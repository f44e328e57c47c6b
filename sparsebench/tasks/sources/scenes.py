"""Backgrounds: pictures without classes. Training and test never share pixels."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from sparsebench.errors import UserError
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.files import (
    Locations,
    contents,
    fingerprint_of,
    located,
    pixels_of,
    square_of,
    squares_in,
)  # fmt: skip
from sparsebench.tasks.sources.known import FLOWERS102, KNOWN, PHOTOS, dataset, of_scikit_learn

FOLDER, ARRAY = "pictures", "array"


def backgrounds(name: str, size: int, locations: Locations) -> Backgrounds:
    """Return a source of backgrounds of `size` x `size` pixels.

    Raises:
        UserError: it is not on this machine, or cannot be read.
    """
    return _backgrounds(name, size, None if name == PHOTOS else located(name, locations, "--backgrounds"))


def background_pixels(name: str, size: int, locations: Locations) -> tuple[cache.Pixels, ...]:
    """Return what is to be decoded of a user's own pictures; nothing of a known set."""
    return () if name in (PHOTOS, FLOWERS102) else (_own(name, size, located(name, locations, "--backgrounds")),)


@lru_cache(maxsize=4)
def _backgrounds(name: str, size: int, root: Path | None) -> Backgrounds:
    if root is None:
        return Photos(size)
    if name == FLOWERS102:
        return _flowers(root, size)
    pool = _own(name, size, root).array()
    if len(pool) < 5:
        raise UserError(f"--backgrounds: {root} has too few pictures", got=len(pool), allowed="5 or more")
    fifth = np.arange(len(pool)) % 5 == 4
    return Pool((pool[~fifth], pool[fifth]))


def _own(name: str, size: int, root: Path) -> cache.Pixels:
    """Return (n, 3, size, size) pixels of a user's pictures: of a folder, or of an .npz file as Karp et al. have it."""
    kind, _, content = name.partition("-")
    if kind == FOLDER:
        return squares_in(root, size, content)[1]
    name = f"{name}-{size}-square"
    if (kept := cache.mapped(name)) is not None:
        return cache.Pixels(name, kept.shape, kept.__getitem__)
    pixels = read_array(root)
    if fingerprint_of(root) != content:
        raise UserError(f"{root} changed while the run was under way", next_step="run it again")
    return cache.Pixels(name, (len(pixels), 3, size, size), partial(square_of, pixels, size))


def _flowers(root: Path, size: int) -> Pool:
    """Return Oxford's 102 flowers (Nilsback & Zisserman 2008): the training and validation splits, and the test's.

    The pictures have no official checksum: what is kept of them is named by their own.
    """
    folder = root / KNOWN[FLOWERS102].folder
    found = contents(folder)

    def squares(*splits: str) -> np.ndarray:
        paths = [path for split in splits for path, _ in dataset(FLOWERS102, root, split, loader=Path)]
        return pixels_of(folder, found, [path.relative_to(folder).as_posix() for path in paths], size).array()

    return Pool((squares("train", "val"), squares("test")), ("flowers", "clean"))


class Backgrounds:
    """Backgrounds of two kinds, for the spurious task; training and test never share pixels.

    Attributes:
        kinds: the names of the two kinds.
        textured: the kinds that show something, from which the composite task draws.
    """

    kinds: tuple[str, str]
    textured: tuple[int, ...]

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """Return (n, 3, size, size) uint8 backgrounds of the (n,) kinds, 0 or 1."""
        raise NotImplementedError


class Photos(Backgrounds):
    """Crops of scikit-learn's two photographs, a kind each: the left three fifths train, the rest tests."""

    kinds = ("flower", "china")
    textured = (0, 1)

    def __init__(self, size: int):
        from PIL import Image

        self.size, self.photos = size, []
        for kind in self.kinds:
            photo: Image.Image = Image.open(of_scikit_learn(f"images/{kind}.jpg"))
            # Height 3.4 times the crop: large enough for many crops, small enough that a crop shows a structure.
            scale = 3.4 * size / photo.height
            photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BOX)
            cut = photo.width * 3 // 5
            pixels = np.asarray(photo)
            self.photos.append((pixels[:, :cut], pixels[:, cut:]))

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """See `Backgrounds.draw`."""
        out = np.empty((len(kinds), 3, self.size, self.size), dtype=np.uint8)
        for row, kind in zip(out, kinds, strict=True):
            photo = self.photos[kind][test]
            top, left = (rng.integers(0, side - self.size + 1) for side in photo.shape[:2])
            row[:] = photo[top : top + self.size, left : left + self.size].transpose(2, 0, 1)
        return out


@dataclass(frozen=True)
class Pool(Backgrounds):
    """Pictures against a clean (black) canvas.

    Attributes:
        pools: (n, 3, size, size) uint8 of training, and of the test; of a user's every fifth picture is of the test.
    """

    pools: tuple[np.ndarray, np.ndarray]
    kinds: tuple[str, str] = ("pictures", "clean")
    textured = (0,)

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """See `Backgrounds.draw`."""
        pool = self.pools[test]
        chosen = pool[rng.integers(0, len(pool), len(kinds))]
        chosen[np.not_equal(kinds, 0)] = 0
        return chosen


def read_array(path: Path) -> np.ndarray:
    """Return the first array of an .npz file.

    Raises:
        UserError: it cannot be read, or is not (n, height, width, 3) of uint8, or of real numbers in [0, 1].
    """
    try:
        with path.open("rb") as file, NpzFile(file) as archive:
            pixels = archive[archive.files[0]] if archive.files else np.empty(0)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} cannot be read as an .npz file ({error})", next_step="mend or replace it") from error
    allowed = "(n, height, width, 3) of uint8, or of real numbers in [0, 1]"
    if pixels.ndim != 4 or pixels.shape[3] != 3 or 0 in pixels.shape:
        raise UserError(f"{path}: its first array holds no pictures", got=f"shape {pixels.shape}", allowed=allowed)
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind != "f":
        raise UserError(f"{path}: the pixels of its first array", got=str(pixels.dtype), allowed=allowed)
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):
        raise UserError(f"{path}: the pixels of its first array", got=f"{low:g} to {high:g}", allowed=allowed)
    return pixels
