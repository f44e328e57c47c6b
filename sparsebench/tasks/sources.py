"""Where pictures come from: foregrounds with classes, backgrounds without. Read lazily, once a process."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsebench.errors import UserError
from sparsebench.tasks.base import Locations

PICTURES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
DIGITS, CIFAR10, PHOTOS = "digits", "cifar10", "photos"
HELD_OUT = {DIGITS: ("3", "8")}


@dataclass(frozen=True)
class Foregrounds:
    """Pictures with classes. `train` and `test` map a class to (n, size, size, 3) uint8 arrays."""

    classes: tuple[str, ...]
    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]


def locate_images(spec: str, data_root: Path | None, download: bool) -> tuple[str, Path | None]:
    """Return the name that a cell has for an image source, and where it lies.

    Args:
        spec: "digits", "cifar10" or "folder:DIR", as the user gave it.
        data_root: where torchvision's official CIFAR-10 files lie.
        download: whether they may be fetched.

    Raises:
        UserError: the source is not one of these, or is not there.
    """
    kind, _, path = spec.partition(":")
    if spec == DIGITS:
        return spec, None
    if spec == CIFAR10:
        root = data_root or Path("data")
        _cifar10(root, train=True, download=download)
        return spec, root
    if kind == "folder" and path:
        root = Path(path).expanduser()
        for split in ("train", "test"):
            if not (root / split).is_dir():
                raise UserError(
                    f"--images folder: {root / split} is not a folder",
                    allowed="a folder with train/<class>/* and test/<class>/*",
                )
        _check_classes(root)
        return f"folder-{fingerprint(root)}", root
    raise UserError("--images", got=f"'{spec}'", allowed="digits, cifar10, folder:DIR")


def locate_backgrounds(spec: str) -> tuple[str, Path | None]:
    """Return the name that a cell has for a background source ("photos" or a folder), and where it lies."""
    if spec == PHOTOS:
        return spec, None
    root = Path(spec).expanduser()
    if not root.is_dir():
        raise UserError(f"--backgrounds: {root} is not a folder", allowed="photos, or a folder of pictures")
    return f"pictures-{fingerprint(root)}", root


def pictures_in(root: Path) -> list[Path]:
    """Return the pictures below a folder, sorted by their path in it."""
    found = (p for p in root.rglob("*") if p.suffix.lower() in PICTURES and p.is_file())
    return sorted(found, key=lambda p: p.as_posix())


def fingerprint(root: Path) -> str:
    """Return a short hash of the names and contents of a folder's pictures: the same wherever the folder lies."""
    digest = hashlib.sha256()
    found = pictures_in(root)
    if not found:
        raise UserError(f"{root} holds no pictures", allowed=sorted(PICTURES))
    try:
        for path in found:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(root).as_posix()}\0{content}\n".encode())
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}", next_step="mend or remove it") from error
    return digest.hexdigest()[:12]


def _check_classes(root: Path) -> None:
    """Raise UserError unless train and test have the same classes, two or more, and a picture in each."""
    names = [sorted(p.name for p in (root / split).iterdir() if p.is_dir()) for split in ("train", "test")]
    if names[0] != names[1]:
        odd = sorted(set(names[0]) ^ set(names[1]))
        raise UserError(f"{root}: train and test have different classes", got=odd)
    if len(names[0]) < 2:
        raise UserError(f"{root}: too few classes", got=names[0], allowed="2 or more folders in train and test")
    for folder in (root / split / name for split in ("train", "test") for name in names[0]):
        if not any(p.suffix.lower() in PICTURES for p in folder.rglob("*")):
            raise UserError(f"{folder} holds no pictures", allowed="at least one in each class")


def foregrounds(name: str, size: int, locations: Locations) -> Foregrounds:
    """Return the pictures of a source as squares of `size` pixels."""
    return _foregrounds(name, size, locations.get(name))


@lru_cache(maxsize=4)
def _foregrounds(name: str, size: int, root: Path | None) -> Foregrounds:
    if name == DIGITS:
        return _digits(size)
    if root is None:
        raise UserError(f"the images '{name}' of this cell are not on this machine", next_step="give --images")
    if name == CIFAR10:
        return _from_torchvision(root, size)
    return _from_folder(root, size)


def backgrounds(name: str, size: int, locations: Locations) -> Backgrounds:
    """Return a source of backgrounds of `size` x `size` pixels."""
    return _backgrounds(name, size, locations.get(name))


@lru_cache(maxsize=4)
def _backgrounds(name: str, size: int, root: Path | None) -> Backgrounds:
    if name == PHOTOS:
        return Photos(size)
    if root is None:
        raise UserError(f"the backgrounds '{name}' of this cell are not here", next_step="give --backgrounds")
    return Pictures(root, size)


class Backgrounds:
    """Backgrounds of two kinds, for the spurious task; training and test never share pixels.

    Attributes:
        kinds: the names of the two kinds.
        textured: the kinds that show something, from which the composite task draws.
    """

    kinds: tuple[str, str]
    textured: tuple[int, ...]

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """Return (n, size, size, 3) uint8 backgrounds of the (n,) kinds, 0 or 1."""
        raise NotImplementedError


class Photos(Backgrounds):
    """Crops of scikit-learn's two photographs, a kind each: the left three fifths train, the rest tests."""

    kinds = ("flower", "china")
    textured = (0, 1)

    def __init__(self, size: int):
        from PIL import Image
        from sklearn.datasets import load_sample_image

        self.size, self.photos = size, []
        for kind in self.kinds:
            photo = Image.fromarray(load_sample_image(f"{kind}.jpg"))
            # Height 3.4 times the crop: large enough for many crops, small enough that a crop shows a structure.
            scale = 3.4 * size / photo.height
            photo = photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.BOX)
            cut = photo.width * 3 // 5
            pixels = np.asarray(photo)
            self.photos.append((pixels[:, :cut], pixels[:, cut:]))

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """See `Backgrounds.draw`."""
        out = np.empty((len(kinds), self.size, self.size, 3), dtype=np.uint8)
        for row, kind in zip(out, kinds, strict=True):
            photo = self.photos[kind][test]
            top, left = (rng.integers(0, side - self.size + 1) for side in photo.shape[:2])
            row[:] = photo[top : top + self.size, left : left + self.size]
        return out


class Pictures(Backgrounds):
    """A folder of pictures against a clean (black) canvas. Every fifth picture is for tests only."""

    kinds = ("pictures", "clean")
    textured = (0,)

    def __init__(self, root: Path, size: int):
        pool = np.stack([read_square(path, size) for path in pictures_in(root)])
        if len(pool) < 5:
            raise UserError(f"--backgrounds: {root} has too few pictures", got=len(pool), allowed="5 or more")
        self.size, fifth = size, np.arange(len(pool)) % 5 == 4
        self.pools = (pool[~fifth], pool[fifth])

    def draw(self, rng: np.random.Generator, kinds: np.ndarray, *, test: bool) -> np.ndarray:
        """See `Backgrounds.draw`."""
        pool = self.pools[test]
        chosen = pool[rng.integers(0, len(pool), len(kinds))]
        return np.where(np.equal(kinds, 0)[:, None, None, None], chosen, np.uint8(0))


def _digits(size: int) -> Foregrounds:
    """Return scikit-learn's digits, 8x8, in two colours each. The first two thirds of a class train, the rest test."""
    from PIL import Image
    from sklearn.datasets import load_digits

    from sparsebench import seeds

    bunch = load_digits()
    rng = seeds.generator("digits", "colours")
    ink, paper = rng.uniform(0.6, 1.0, (len(bunch.images), 3)), rng.uniform(0.0, 0.4, (len(bunch.images), 3))
    shade = np.stack(
        [np.asarray(Image.fromarray((x * 15.9).astype(np.uint8)).resize((size, size), Image.Resampling.BICUBIC))
         for x in bunch.images]
    )[..., None] / 255  # fmt: skip
    coloured = (255 * (shade * ink[:, None, None] + (1 - shade) * paper[:, None, None])).astype(np.uint8)
    train, test = {}, {}
    for digit in range(10):
        mine = coloured[bunch.target == digit]
        cut = len(mine) * 2 // 3
        train[str(digit)], test[str(digit)] = mine[:cut], mine[cut:]
    return Foregrounds(tuple(train), train, test)


def _cifar10(root: Path, *, train: bool, download: bool):  # type: ignore[no-untyped-def]
    from torchvision.datasets import CIFAR10 as Official  # noqa: N811

    try:
        with warnings.catch_warnings():
            # torchvision 0.29 reads CIFAR-10 in a way that numpy 2.4 announces the end of; nothing a user can mend.
            warnings.simplefilter("ignore")
            return Official(str(root), train=train, download=download)
    except RuntimeError as error:
        raise UserError(
            f"CIFAR-10 is missing or corrupt in {root} ({error})",
            next_step="give --data-root DIR with cifar-10-batches-py in it, or --download to fetch it (170 MB)",
        ) from error
    except OSError as error:
        raise UserError(f"CIFAR-10 cannot be read or fetched into {root} ({error})") from error


def _from_torchvision(root: Path, size: int) -> Foregrounds:
    splits = []
    for is_train in (True, False):
        official = _cifar10(root, train=is_train, download=False)
        pixels, targets = _resized(official.data, size), np.array(official.targets)
        splits.append({name: pixels[targets == k] for k, name in enumerate(official.classes)})
    return Foregrounds(tuple(splits[0]), *splits)


def _resized(pixels: np.ndarray, size: int) -> np.ndarray:
    """Return (n, size, size, 3) from (n, height, width, 3) uint8 pictures."""
    from PIL import Image

    return np.stack([np.asarray(Image.fromarray(x).resize((size, size), Image.Resampling.BILINEAR)) for x in pixels])


def _from_folder(root: Path, size: int) -> Foregrounds:
    names = sorted(p.name for p in (root / "train").iterdir() if p.is_dir())
    train, test = (
        {name: np.stack(list(_class_pictures(root / split / name, size))) for name in names}
        for split in ("train", "test")
    )
    return Foregrounds(tuple(train), train, test)


def _class_pictures(folder: Path, size: int) -> Iterator[np.ndarray]:
    found = pictures_in(folder)
    if not found:
        raise UserError(f"{folder} holds no pictures", allowed="at least one in each class")
    for path in found:
        yield read_square(path, size)


def read_square(path: Path, size: int) -> np.ndarray:
    """Return the middle square of a picture as (size, size, 3) uint8; grey and palette pictures become RGB."""
    from PIL import Image

    rgb = read_rgb(path)
    side = min(rgb.size)
    left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
    square = rgb.crop((left, top, left + side, top + side))
    return np.asarray(square.resize((size, size), Image.Resampling.BILINEAR))


def read_rgb(path: Path) -> Any:
    """Return a picture of any size in RGB, see `_rgb`; UserError names one that cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return _rgb(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"{path} cannot be read as a picture ({error})", next_step="mend or remove it") from error


def _rgb(picture: Any) -> Any:
    """Return a picture in RGB: transparency is dropped, 16-bit grey keeps its shades."""
    from PIL import Image

    if picture.mode.startswith("I"):
        shades = np.asarray(picture, dtype=np.float64) / 257
        return Image.fromarray(shades.clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")
