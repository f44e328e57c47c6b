"""Pictures in files: which there are, what is in them, and how one becomes a square of pixels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from sparsebench.errors import UserError, text_of
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.cache import BadPicturesError
from sparsebench.tasks.sources.listing import Listing, formats, listing, strays_in, suffixes

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

T = TypeVar("T")
Locations = Mapping[str, Path]
"""Where each named image set lies on this machine. Names are in the cell, places are not."""
MOST_PIXELS = 2**26
"""Of one picture."""
DIGITS = 12
"""Hexadecimal digits of a fingerprint."""


@dataclass(frozen=True)
class Contents:
    """What lies in a folder, by which each file that is read can be checked.

    Attributes:
        pictures: the SHA-256 of each picture, by its path in the folder, "/" between its parts, sorted.
        tables: of files beside the pictures.
        left_out: why pictures that cannot be read are not among these, by their paths.
        strays: what else lies there and is left out, in one line, where this process has looked.
    """

    pictures: Mapping[str, str]
    tables: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    strays: str = field(default="", compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the files' names and contents, the same wherever the folder lies."""
        digest = hashlib.sha256()
        for name, sha256 in {**self.tables, **self.pictures}.items():
            digest.update(os.fsencode(f"{name}\0{sha256}\n"))
        return digest.hexdigest()[:DIGITS]


class Bad(NamedTuple):
    """What is to be done about pictures that cannot be read.

    Attributes:
        skip: whether they are left out; else they are an error.
        look: whether pictures may be decoded to find them, and what is found be kept; else those are that are known.
    """

    skip: bool = False
    look: bool = True


REFUSED = Bad()
_known: dict[str, Contents] = {}
"""What this process has looked at, by its fingerprint."""


def contents(
    root: Path, listed: Listing | None = None, tables: Sequence[str] = (), bad: Bad = REFUSED,
    wanted: Callable[[str], object] | None = None,
) -> Contents:  # fmt: skip
    """Return what lies in a folder, every file of which is read, and keep it, so that no other process need look.

    Args:
        root: the folder.
        listed: its pictures, from `listing`, which is asked where none is given.
        tables: files beside the pictures.
        bad: what is to be done about pictures that cannot be read.
        wanted: says of a picture's path whether it is where pictures are looked for; None to say nothing of strays.

    Raises:
        BadPicturesError: some cannot even be read as files; all that cannot be decoded are named with them.
        UserError: there are no pictures, or a table cannot be read.
    """
    listed = listed or listing(root)
    if not (names := listed.names):
        raise UserError(f"{root} holds no pictures", allowed=sorted(suffixes()))
    about = {name: sha256_of(root / name) for name in tables}
    hashed, left_out = _each(lambda name: hashlib.sha256(read_bytes(root / name)).hexdigest(), names, "")
    strays = strays_in(listed, wanted) if wanted else ""
    found = Contents(hashed, about, left_out, strays)
    if bad.skip or left_out:
        left_out |= _undecodable(root, found, bad.look)
        if not bad.skip:
            raise BadPicturesError({str(root / name): left_out[name] for name in sorted(left_out)}, len(names))
        kept = {name: one for name, one in hashed.items() if name not in left_out}
        found = Contents(kept, about, left_out, strays)
        if not found.pictures:
            raise UserError(f"{root} holds no pictures that can be read", allowed=sorted(suffixes()))
    if bad.look:
        cache.keep_about(found.fingerprint, [found.pictures, found.tables, found.left_out])
    _known[found.fingerprint] = found
    return found


def _undecodable(root: Path, found: Contents, look: bool) -> dict[str, str]:
    """Return why pictures cannot be decoded, by their paths in the folder, as far as it is known if not to `look`."""
    name = f"{found.fingerprint}-bad-{cache.versions()}"
    if (kept := cache.kept_about(name)) is not None or not look:
        return dict(kept or {})

    def decode(name: str) -> None:
        read_rgb(root / name, found.pictures[name], small=True)

    _, bad = _each(decode, list(found.pictures), f"{len(found.pictures):,} pictures to look through for bad ones")
    cache.keep_about(name, bad)
    return bad


def _each(work: Callable[[str], T], names: Sequence[str], what: str) -> tuple[dict[str, T], dict[str, str]]:
    """Return what `work` makes of each name, and why others are bad, see `cache.each`; who is told is told `what`."""
    tell, found, bad = cache.tell(), dict[str, T](), dict[str, str]()
    tell(what, 0, len(names))
    for name, one in zip(names, cache.each(lambda i: work(names[i]), len(names)), strict=True):
        if isinstance(one, BadPicturesError):
            (bad[name],) = one.reasons.values()
        else:
            found[name] = one
        tell(what, len(found) + len(bad), len(names))
    return found, bad


def known_contents(name: str) -> Contents | None:
    """Return what this process has found in a folder, by what cells call its pictures: their kind and fingerprint."""
    return _known.get(name.partition("-")[2])


def contents_of(fingerprint: str, root: Path, tables: Sequence[str] = ()) -> Contents:
    """Return the contents that have a fingerprint: as this process or another has found them, else from the folder.

    Raises:
        UserError: the folder has others now.
    """
    if fingerprint in _known:
        return _known[fingerprint]
    with suppress(TypeError, ValueError):  # it is another's file
        kept = Contents(*cache.kept_about(fingerprint))
        if kept.fingerprint == fingerprint:
            return _known.setdefault(fingerprint, kept)
    for skip in (False, True):
        with suppress(BadPicturesError):
            if (found := contents(root, tables=tables, bad=Bad(skip))).fingerprint == fingerprint:
                return found
    raise _change_error(f"the pictures in {root}")


def _change_error(what: str) -> UserError:
    return UserError(f"{what} changed while the run was under way", next_step="run it again")


def fingerprint_of(path: Path) -> str:
    """Return a short hash of one file's content; see `sha256_of`."""
    return sha256_of(path)[:DIGITS]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of one file.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", next_step="mend or remove it") from error


def located(name: str, locations: Locations, option: str = "--images") -> Path:
    """Return where lies what a cell names by its content; UserError, which says the option, where that is nowhere."""
    if name not in locations:
        raise UserError(f"'{name}' of this cell is not on this machine", next_step=f"give {option}")
    return locations[name]


def squares_in(
    root: Path, size: int, fingerprint: str, wanted: Callable[[str], object] = lambda name: True
) -> tuple[list[str], cache.Pixels]:
    """Return the wanted pictures of a folder, sorted by their path in it, and (n, 3, size, size) pixels of them.

    Args:
        root: the folder.
        size: side of the squares in pixels.
        fingerprint: of the folder's contents when the run began.
        wanted: says of a path in the folder, "/" between its parts, whether it is one of them.

    Raises:
        UserError: they are not those that the run began with.
    """
    found = contents_of(fingerprint, root)
    names = list(filter(wanted, found.pictures))
    return names, pixels_of(root, found, names, size)


def square(rgb: Picture, size: int) -> np.ndarray:
    """Return the middle square of an RGB picture, resized (bilinear), as (size, size, 3) uint8."""
    from PIL import Image

    side = min(rgb.size)
    left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
    middle = rgb.crop((left, top, left + side, top + side))
    return np.asarray(middle.resize((size, size), Image.Resampling.BILINEAR))


def pixels_of(
    root: Path, found: Contents, names: Sequence[str], size: int, cut: Callable[[Picture, int], np.ndarray] = square,
    how: str = "square",
) -> cache.Pixels:  # fmt: skip
    """Return (n, 3, size, size) pixels of pictures found in a folder.

    Args:
        root: the folder.
        found: what is in it.
        names: the paths of the n pictures.
        size: side in pixels.
        cut: makes (size, size, 3) uint8 of a picture.
        how: names the way in which it does.
    """

    def row(i: int) -> np.ndarray:
        return cut(read_rgb(root / names[i], found.pictures[names[i]]), size).transpose(2, 0, 1)

    which = hashlib.sha256(os.fsencode("\0".join(names))).hexdigest()[:DIGITS]
    return cache.Pixels(f"{found.fingerprint}-{which}-{size}-{how}", (len(names), 3, size, size), row)


def read_bytes(path: Path, sha256: str | None = None) -> bytes:
    """Return a picture's bytes.

    Raises:
        BadPicturesError: it cannot be read.
        UserError: it is not there any more, or has not that SHA-256.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise _change_error(str(path)) from error
    except OSError as error:
        raise BadPicturesError({str(path): error.strerror or str(error)}) from error
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise _change_error(str(path))
    return data


def read_rgb(path: Path, sha256: str | None = None, *, small: bool = False) -> Picture:
    """Return a picture of any size in RGB; grey and palette pictures become it. Or `small`, in less time, of a JPEG.

    Raises:
        BadPicturesError: it cannot be read.
        UserError: it is not there any more, or has not that SHA-256.
    """
    from PIL import Image, UnidentifiedImageError

    data = read_bytes(path, sha256)
    try:
        if not data:
            raise ValueError("it is empty")
        with Image.open(BytesIO(data), formats=formats()) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels, more than {MOST_PIXELS}")
            if small:
                picture.draft(None, (1, 1))
            return _rgb(picture)
    except MemoryError:
        raise
    except Exception as error:  # Pillow does not say what its readers raise of torn files
        said = " ".join(text_of(error).split()) or type(error).__name__
        reason = "of no known format" if isinstance(error, UnidentifiedImageError) else said
        raise BadPicturesError({str(path): reason}) from error


def square_of(pixels: np.ndarray, size: int, i: int) -> np.ndarray:
    """Return (3, size, size) uint8, see `square`, of one of (n, height, width, 3) pictures: uint8, or from 0 to 1."""
    from PIL import Image

    picture = pixels[i] if pixels.dtype == np.uint8 else (pixels[i] * 255).round().astype(np.uint8)
    return square(Image.fromarray(picture), size).transpose(2, 0, 1)


def _rgb(picture: Any) -> Picture:
    """Return a picture in RGB: transparency is dropped, 16-bit grey keeps its shades."""
    from PIL import Image

    if picture.mode.startswith("I"):
        shades = np.asarray(picture, dtype=np.float64) / 257
        return Image.fromarray(shades.clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")
