"""Pictures in files: which there are, what is in them, and how one becomes a square of pixels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebench.errors import UserError
from sparsebench.sources import cache
from sparsebench.sources.listing import formats, names_in, suffixes

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Locations = Mapping[str, Path]
"""Where each named image set lies on this machine. Names are in the cell, places are not."""
MOST_PIXELS = 2**26
"""Of one picture."""
DIGITS = 12
"""Hexadecimal digits of a fingerprint."""


def _some_names(root: Path) -> list[str]:
    names = names_in(root)
    if not names:
        raise UserError(f"{root} holds no pictures", allowed=sorted(suffixes()))
    return names


def fingerprint(root: Path, also: Sequence[str] = ()) -> str:
    """Return a short hash of the names and contents of a folder's pictures, and of the files `also` in it.

    It is the same wherever the folder lies.
    """
    return short(contents(root, also))


def contents(root: Path, also: Sequence[str] = ()) -> dict[str, str]:
    """Return the SHA-256 of each file that a fingerprint is of, by its path in the folder."""
    return {name: hashlib.sha256(read_bytes(root / name)).hexdigest() for name in [*also, *_some_names(root)]}


def short(hashes: Mapping[str, str]) -> str:
    """Return the fingerprint of such contents."""
    digest = hashlib.sha256()
    for name, sha256 in hashes.items():
        digest.update(os.fsencode(f"{name}\0{sha256}\n"))
    return digest.hexdigest()[:DIGITS]


@lru_cache(maxsize=4)
def contents_of(content: str, root: Path, also: tuple[str, ...] = ()) -> Mapping[str, str]:
    """Return the contents that have a fingerprint, by which each file that is read can be checked.

    Raises:
        UserError: the folder has others now.
    """
    hashes = contents(root, also)
    if short(hashes) != content:
        raise _change_error(f"the pictures in {root}")
    return hashes


def _change_error(what: str) -> UserError:
    return UserError(f"{what} changed while the run was under way", next_step="run it again")


def fingerprint_of(path: Path) -> str:
    """Return a short hash of one file's content."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    except OSError as error:
        raise _unreadable(path, error) from error


def squares_in(
    root: Path, size: int, content: str, wanted: Callable[[str], object] = lambda name: True
) -> tuple[list[str], np.ndarray]:
    """Return the wanted pictures of a folder, sorted by their path in it, and (n, 3, size, size) uint8 of them.

    Args:
        root: the folder.
        size: side of the squares in pixels.
        content: the folder's fingerprint when the run began.
        wanted: says of a path in the folder, "/" between its parts, whether it is one of them.

    Raises:
        UserError: there are none, one cannot be read, or they are not those that the run began with.
    """
    every = _some_names(root)
    names = list(filter(wanted, every))
    which = hashlib.sha256(os.fsencode("\n".join(names))).hexdigest()[:DIGITS]

    def rows() -> Iterator[np.ndarray]:
        hashes = {}
        for name in every:
            data = read_bytes(root / name)
            hashes[name] = hashlib.sha256(data).hexdigest()
            if wanted(name):
                yield decode_square(data, size, root / name).transpose(2, 0, 1)
        if short(hashes) != content:
            raise _change_error(f"the pictures in {root}")

    return names, cache.keep_pixels(f"{content}-{which}-{size}-first", (len(names), 3, size, size), rows)


def read_bytes(path: Path, sha256: str | None = None) -> bytes:
    """Return a file's bytes.

    Raises:
        UserError: it cannot be read, or has not that SHA-256.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise _change_error(str(path))
    return data


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}", next_step="mend or remove it")


def read_square(path: Path, size: int, sha256: str | None = None) -> np.ndarray:
    """Return the middle square of a picture as (size, size, 3) uint8; grey and palette pictures become RGB.

    See `read_bytes` for what is raised.
    """
    return decode_square(read_bytes(path, sha256), size, path)


def read_rgb(path: Path, sha256: str | None = None) -> Picture:
    """Return a picture of any size in RGB; UserError names one that cannot be read; see `read_bytes`."""
    return _decode(read_bytes(path, sha256), path)


def decode_square(data: bytes, size: int, path: Path) -> np.ndarray:
    """Return what `read_square` does, from the bytes of the file `path`."""
    return square(_decode(data, path), size)


def _decode(data: bytes, path: Path) -> Picture:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=formats()) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels, more than {MOST_PIXELS}")
            return _rgb(picture)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else error
        raise UserError(f"{path} cannot be read as a picture ({reason})", next_step="mend or remove it") from error


def square(rgb: Picture, size: int) -> np.ndarray:
    """Return the middle square of an RGB picture, resized (bilinear), as (size, size, 3) uint8."""
    from PIL import Image

    side = min(rgb.size)
    left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
    middle = rgb.crop((left, top, left + side, top + side))
    return np.asarray(middle.resize((size, size), Image.Resampling.BILINEAR))


def _rgb(picture: Any) -> Picture:
    """Return a picture in RGB: transparency is dropped, 16-bit grey keeps its shades."""
    from PIL import Image

    if picture.mode.startswith("I"):
        shades = np.asarray(picture, dtype=np.float64) / 257
        return Image.fromarray(shades.clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")
