"""Backgrounds: pictures without classes. Training and test never share pixels."""

from __future__ import annotations

import zipfile
import zlib
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.lib.npyio import NpzFile

from sparsebench.errors import UserError
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.files import Locations, contents, fingerprint_of, read_square, square_of, squares_in
from sparsebench.tasks.sources.known import FLOWERS102, KNOWN, PHOTOS, dataset, of_scikit_learn

FOLDER, ARRAY = "pictures", "array"


def backgrounds(name: str, size: int, locations: Locations) -> Backgrounds:
    """Return a source of backgrounds of `size` x `size` pixels.

    Raises:
        UserError: it is not on this machine, or cannot be read.
    """
    return _backgrounds(name, size, locations.get(name))


def background_pixels(name: str, size: int, locations: Locations) -> tuple[cache.Pixels, ...]:
    """Return what is to be decoded of a user's own pictures; nothing of a known set."""
    kind, _, content = name.partition("-")
    if name not in locations or kind not in (FOLDER, ARRAY):
        return ()
    if kind == FOLDER:
        return (squares_in(locations[name], size, content)[1],)
    if cache.mapped(f"{ARRAY}-{content}-{size}-first") is not None:
        return ()
    return (_squares_of(locations[name], size, content),)


@lru_cache(maxsize=4)
def _backgrounds(name: str, size: int, root: Path | None) -> Backgrounds:
    if name == PHOTOS:
        return Photos(size)
    if root is None:
        raise UserError(f"the backgrounds '{name}' of this cell are not here", next_step="give --backgrounds")
    if name == FLOWERS102:
        return Flowers(root, size)
    kind, _, content = name.partition("-")
    return Array(root, size, content) if kind == ARRAY else Pictures(root, size, content)


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


class Pool(Backgrounds):
    """Pictures against a clean (black) canvas.

    Attributes:
        pools: (n, 3, size, size) uint8 of training, and of the test.
    """

    kinds = ("pictures", "clean")
    textured = (0,)
    pools: tuple[np.ndarray, np.ndarray]

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """See `Backgrounds.draw`."""
        pool = self.pools[test]
        chosen = pool[rng.integers(0, len(pool), len(kinds))]
        chosen[np.not_equal(kinds, 0)] = 0
        return chosen

    def split(self, pool: np.ndarray, root: Path) -> None:
        """Keep every fifth picture for tests only."""
        if len(pool) < 5:
            raise UserError(f"--backgrounds: {root} has too few pictures", got=len(pool), allowed="5 or more")
        fifth = np.arange(len(pool)) % 5 == 4
        self.pools = pool[~fifth], pool[fifth]


class Pictures(Pool):
    """A folder of pictures. Every fifth picture is for tests only."""

    def __init__(self, root: Path, size: int, content: str):
        self.split(squares_in(root, size, content)[1].array(), root)


class Flowers(Pool):
    """Oxford's 102 flowers (Nilsback & Zisserman 2008): the official training and validation splits, and the test's.

    The pictures have no official checksum: what is kept of them is named by their own.
    """

    kinds = ("flowers", "clean")

    def __init__(self, root: Path, size: int):
        folder = root / KNOWN[FLOWERS102].folder
        known = contents(folder)

        def read(path: str) -> np.ndarray:
            return read_square(Path(path), size, known.pictures.get(Path(path).relative_to(folder).as_posix(), ""))

        def squares(split: str) -> np.ndarray:
            data = dataset(FLOWERS102, root, split, loader=read)
            name = f"{FLOWERS102}-{known.fingerprint}-{split}-{size}-first"
            row = lambda i: data[i][0].transpose(2, 0, 1)  # noqa: E731
            return cache.Pixels(name, (len(data), 3, size, size), row).array()

        self.pools = np.concatenate([squares("train"), squares("val")]), squares("test")


class Array(Pool):
    """The pictures of the first array of an .npz file, as Karp et al. (2021) give theirs; every fifth is for tests.

    It is (n, height, width, 3): uint8, or real in [0, 1].
    """

    def __init__(self, path: Path, size: int, content: str):
        kept = cache.mapped(f"{ARRAY}-{content}-{size}-first")
        self.split(_squares_of(path, size, content).array() if kept is None else kept, path)


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


def _squares_of(path: Path, size: int, content: str) -> cache.Pixels:
    """Return (n, 3, size, size) of the pictures of an .npz file with that fingerprint."""
    pixels = read_array(path)
    if fingerprint_of(path) != content:
        raise UserError(f"{path} changed while the run was under way", next_step="run it again")
    return cache.Pixels(
        f"{ARRAY}-{content}-{size}-first", (len(pixels), 3, size, size), partial(square_of, pixels, size)
    )
