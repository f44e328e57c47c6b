"""Picture files: listing a folder and its classes, reading and hashing pictures, and cutting them to squares."""

from __future__ import annotations

import hashlib
import os
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sparsebench.errors import UserError, few, is_out_of_memory, text_of
from sparsebench.files import content_hash
from sparsebench.tasks.sources import cache
from sparsebench.tasks.sources.cache import BadPicturesError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture


FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM", "AVIF")
"""Pillow's names of the formats that are read, whatever the suffix. PostScript is excluded, since it runs programs."""
SUFFIXES = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".bmp",
        ".webp",
        ".gif",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".avif",
    }
)
"""Suffixes of pictures, in lower case."""
SYSTEM = frozenset(
    {
        "@eadir",
        "@tmp",
        "@recycle",
        "@sharebin",
        "#recycle",
        "#snapshot",
        "$recycle.bin",
        "__macosx",
        "lost+found",
        "system volume information",
    }
)
"""Folders that file servers, file systems and archives create, in lower case."""
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval"})
AGAIN = "links to what is here already"
T = TypeVar("T")
Locations = Mapping[str, Path]
"""The path of each named image set on this machine. Cells contain the names, not the paths."""
MOST_PIXELS = 2**26
"""Largest number of pixels of a picture."""
DIGITS = 12
"""Hexadecimal digits of a fingerprint."""


def path_of(name: str, locations: Locations, option: str = "--images") -> Path:
    """Return the path of the files that a cell names by their content.

    Raises:
        UserError: they are not on this machine. The message names the option that locates them.
    """
    if name not in locations:
        raise UserError(f"'{name}' of this cell is not on this machine", next_step=f"give {option}")
    return locations[name]


def _change_error(name: str) -> UserError:
    return UserError(f"{name} changed while the run was under way", next_step="run it again")


def fingerprint_of(path: Path) -> str:
    """Return a short hash of one file's content; see `sha256_of`."""
    return sha256_of(path)[:DIGITS]


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of one file.

    Raises:
        UserError: the file cannot be read.
    """
    if not (digest := content_hash(path)):
        raise UserError(f"{path} cannot be read", next_step="repair or remove it")
    return digest


def check_unchanged(path: Path, sha256: str) -> None:
    """Raise UserError if a file changed: its SHA-256 must begin with the digits after the last "-" of `sha256`."""
    if not sha256_of(path).startswith(sha256.rpartition("-")[2]):
        raise _change_error(path.name)


def read_bytes(path: Path, sha256: str | None = None) -> bytes:
    """Return the bytes of a picture.

    Raises:
        BadPicturesError: the file cannot be read.
        UserError: the file no longer exists, or has another SHA-256.
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
    """Return a picture in RGB; grey and palette pictures are converted. With `small`, decode JPEGs at reduced size.

    Raises:
        BadPicturesError: the picture cannot be read.
        UserError: the file no longer exists, or has another SHA-256.
    """
    from PIL import Image

    data = read_bytes(path, sha256)
    try:
        if not data:
            raise ValueError("it is empty")
        with Image.open(BytesIO(data), formats=FORMATS) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"{picture.width} x {picture.height} pixels, more than {MOST_PIXELS}")
            if small:
                picture.draft(None, (1, 1))
            return _rgb(picture)
    except Exception as error:  # Pillow does not document what its readers raise for damaged files
        if is_out_of_memory(error):
            raise MemoryError(f"{path} does not fit the memory") from error
        raise BadPicturesError({str(path): reason_of_picture(error)}) from error


def reason_of_picture(error: Exception) -> str:
    """Return in one line why a picture cannot be read, from what its reader raised."""
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "of no known format"
    return " ".join(text_of(error).split()) or type(error).__name__


def _rgb(picture: Any) -> Picture:
    """Return a picture in RGB: transparency is dropped, 16-bit grey keeps its shades.

    Raises:
        ValueError: shades are no whole numbers of 8 or 16 bits, so that their range is unknown.
    """
    from PIL import Image

    # Pillow gives 16-bit PGMs, and in older versions 16-bit PNGs, the mode of 32 bits.
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in ("PNG", "PPM")):
        raise ValueError("it has signed, 32-bit or float shades, whose range is unknown; convert it to 8 bits")
    if picture.mode.startswith("I"):
        shades = np.asarray(picture, dtype=np.float64) / 257
        return Image.fromarray(shades.clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")
    return picture.convert("RGB")


def square(rgb: Picture, size: int) -> np.ndarray:
    """Return the middle square of an RGB picture, resized (bilinear), as (size, size, 3) uint8."""
    from PIL import Image

    side = min(rgb.size)
    left, top = (rgb.width - side) // 2, (rgb.height - side) // 2
    middle = rgb.crop((left, top, left + side, top + side))
    return np.asarray(middle.resize((size, size), Image.Resampling.BILINEAR))


@dataclass(frozen=True)
class Contents:
    """The pictures below a folder, with their hashes.

    Attributes:
        root: the folder.
        pictures: the SHA-256 of each picture by its path in the folder, with "/", sorted by path; "" in a listing.
        tables: the SHA-256 of each table of the set, by name.
        left_out: the reason why a picture cannot be read, by path. These pictures are not in `pictures`.
        others: paths of other files and folders that are left out, by reason. Known only to the process that listed
            the folder.
    """

    root: Path
    pictures: Mapping[str, str]
    tables: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @property
    def strays(self) -> str:
        """The entries of `others` in one line."""
        return "; ".join(f"{why}: {len(paths)} ({few(paths, width=60)})" for why, paths in self.others.items())

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the names and contents of the files; it does not depend on the folder's path."""
        digest = hashlib.sha256()
        for name, sha256 in {**self.tables, **self.pictures}.items():
            digest.update(os.fsencode(f"{name}\0{sha256}\n"))
        return digest.hexdigest()[:DIGITS]

    def pixels(
        self, names: Sequence[str], size: int, cut: Callable[[Picture, int], np.ndarray] = square, key: str = "square"
    ) -> cache.Pixels:
        """Return the (n, 3, size, size) pixels of n pictures.

        Args:
            names: paths of the pictures in the folder.
            size: side in pixels.
            cut: returns a picture as (size, size, 3) uint8.
            key: name of `cut` and its parameters, for the name of the cache file.
        """

        def row(i: int) -> np.ndarray:
            return cut(read_rgb(self.root / names[i], self.pictures[names[i]]), size).transpose(2, 0, 1)

        digest = hashlib.sha256(os.fsencode("\0".join(names))).hexdigest()[:DIGITS]
        return cache.Pixels(f"{self.fingerprint}-{digest}-{size}-{key}", (len(names), 3, size, size), row)


def listing(root: Path) -> Contents:
    """Return the pictures below a folder without reading them. Links are followed, except to listed files and folders.

    Raises:
        UserError: a folder cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}", next_step="correct its permissions, or remove it"
        ) from error

    names, links = list[str](), list[str]()
    others: defaultdict[str, list[str]] = defaultdict(list)
    top = os.path.realpath(root)
    seen = {top}
    for place, inside, files in os.walk(root, onerror=refuse, followlinks=True):
        within = "" if Path(place) == root else f"{Path(place).relative_to(root).as_posix()}/"
        for name in sorted(inside):
            reason = _why_no_folder(os.path.join(place, name), top, seen)
            if reason:
                others[reason].append(within + name)
                inside.remove(name)
        for name in files:
            path = os.path.join(place, name)
            reason = _why_no_picture(path)
            if reason:
                others[reason].append(within + name)
            elif not name.startswith("."):
                (links if os.path.islink(path) else names).append(within + name)

    repeated = _repeated_links(root, names, links) if links else set[str]()
    names += [link for link in links if link not in repeated]
    if repeated:
        others[AGAIN] += repeated
    sorted_others = {reason: sorted(paths) for reason, paths in sorted(others.items())}
    return Contents(root, dict.fromkeys(sorted(names), ""), others=sorted_others)


def _repeated_links(root: Path, names: Sequence[str], links: Sequence[str]) -> set[str]:
    """Return the links to pictures that the folder has under another name: as a file, or by an earlier link."""
    seen = {os.path.realpath(root / name) for name in names}
    repeated = set()
    for link in sorted(links):
        target = os.path.realpath(root / link)
        if target in seen:
            repeated.add(link)
        seen.add(target)
    return repeated


def _why_no_picture(path: str) -> str:
    """Return why a file is left out, or "" if it is a picture, or a hidden file of another kind: nobody expects it."""
    name = os.path.basename(path)
    looks_like_picture = os.path.splitext(name)[1].lower() in SUFFIXES
    if name.startswith("."):
        return "hidden" if looks_like_picture else ""
    if looks_like_picture and os.path.isfile(path):
        return ""
    return "files of another kind" if os.path.exists(path) else "links to nothing"


def _why_no_folder(path: str, top: str, seen: set[str]) -> str:
    """Return why a folder is left out, or "" if it is not; then add its real path to `seen`."""
    name, real = os.path.basename(path), os.path.realpath(path)
    if not _may_be_class(name):
        return "hidden" if name.startswith(".") else "a system's folders"
    if real in seen or (os.path.islink(path) and os.path.commonpath([real, top]) in (real, top)):
        return AGAIN
    seen.add(real)
    return ""


def _may_be_class(folder: str) -> bool:
    """Return whether a folder of this name is neither hidden nor a system's."""
    return not folder.startswith(".") and folder.lower() not in SYSTEM


def classes_in(folder: Contents, layout: str, split: str = "") -> list[str]:
    """Return the sorted names of the class folders of a folder. Pictures in subfolders belong to the class.

    Args:
        folder: the listing of the folder.
        layout: the expected layout, for error messages.
        split: the subfolder with the classes; "" for the folder itself.

    Raises:
        UserError: there are fewer than two classes, two names differ only in their Unicode normalisation, a class has
            no pictures, or the subfolders are splits, not classes.
    """
    root = folder.root / split
    prefix = f"{split}/" if split else ""
    names = [name.removeprefix(prefix) for name in folder.pictures if name.startswith(prefix)]
    classes = sorted(path.name for path in root.iterdir() if path.is_dir() and _may_be_class(path.name))
    if classes and SPLITS.issuperset(map(str.lower, classes)):
        raise UserError(
            f"{root} holds splits, not classes",
            got=classes,
            allowed=layout,
            next_step=f"name the folder of the classes, as in {root / classes[0]}",
        )
    if len(classes) < 2:
        loose = sum("/" not in name for name in names)
        note = f" and {loose} pictures in no class folder" if loose else ""
        raise UserError(f"{root}: too few classes", got=f"{classes}{note}", allowed=f"2 or more: {layout}")
    _check_spelling(root, classes)
    with_pictures = {name.partition("/")[0] for name in names if "/" in name}
    empty = sorted(set(classes) - with_pictures)
    if empty:
        more = f", and {len(empty) - 1} more class folders" if len(empty) > 1 else ""
        raise UserError(
            f"{root / empty[0]} holds no pictures{more}",
            allowed=f"at least one in each class: {', '.join(sorted(SUFFIXES))}",
            next_step="remove it if it is not a class",
        )
    return classes


def _check_spelling(root: Path, classes: Sequence[str]) -> None:
    """Raise UserError if two names of class folders differ only in their Unicode normalisation."""
    by_form: defaultdict[str, list[str]] = defaultdict(list)
    for name in classes:
        by_form[unicodedata.normalize("NFC", name)].append(name)
    for group in by_form.values():
        if len(group) > 1:
            raise UserError(
                f"{root}: class folders whose names differ only in their Unicode normalisation",
                got=[ascii(name) for name in group],
                next_step="move their pictures into one folder",
            )


_contents: dict[str, Contents] = {}
"""The folders that this process has read, by fingerprint."""
_quick_check: ContextVar[bool] = ContextVar("quick_check", default=False)


@contextmanager
def quick_check() -> Iterator[None]:
    """Within the context, pictures are not read again if size, time and inode are those of an earlier reading.

    This is for dry runs alone: an edit may keep all three, so no result may rest on them.
    """
    token = _quick_check.set(True)
    try:
        yield
    finally:
        _quick_check.reset(token)


def contents(
    listed: Contents, tables: Sequence[str] = (), skip_bad: bool = False, belongs: Callable[[str], object] = bool
) -> Contents:
    """Read and hash all pictures of a folder; return its contents, and store them in the cache for other processes.

    Within `quick_check`, pictures that seem unchanged are not read.

    Args:
        listed: the folder, from `listing`.
        tables: names of the tables beside the pictures.
        skip_bad: whether pictures that cannot be read are left out; otherwise they are an error.
        belongs: whether a picture at this path belongs to the set. Others are noted in `others`, but hashed as well.

    Raises:
        BadPicturesError: files of pictures cannot be read. It also names the pictures that cannot be decoded.
        UserError: there are no pictures, or a table cannot be read.
    """
    root, names = listed.root, list(listed.pictures)
    if not names:
        raise UserError(f"{root} holds no pictures", allowed=sorted(SUFFIXES))
    about = {name: sha256_of(root / name) for name in tables}
    others = dict(listed.others)
    if loose := [name for name in names if not belongs(name)]:
        others["pictures in no class folder"] = loose
    hashed, left_out = _hashes(root, names)
    folder = Contents(root, hashed, about, left_out, others)
    if skip_bad or left_out:
        left_out |= _undecodable(folder)
        if not skip_bad:
            raise BadPicturesError({str(root / name): left_out[name] for name in sorted(left_out)}, len(names))
        folder = replace(folder, pictures={name: sha256 for name, sha256 in hashed.items() if name not in left_out})
        if not folder.pictures:
            raise UserError(f"{root} holds no pictures that can be read", allowed=sorted(SUFFIXES))
    cache.keep_about(folder.fingerprint, [folder.pictures, folder.tables, folder.left_out])
    _contents[folder.fingerprint] = folder
    return folder


def _hashes(root: Path, names: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the SHA-256 of each picture, and the reasons of those that cannot be read.

    The cache keeps each hash with the state of its file, for dry runs; see `quick_check`.
    """
    # The state is from before the reading: if the file changes meanwhile, it has another state afterwards.
    states = {name: _state(root, name) for name in names}
    file = f"states-{hashlib.sha256(os.fsencode(os.path.abspath(root))).hexdigest()[:DIGITS]}"
    earlier = cache.read_about(file) if _quick_check.get() else None
    by_state = earlier if isinstance(earlier, dict) else {}

    unknown = [name for name in names if states[name] not in by_state]
    hashes, bad = _outcomes(unknown, lambda name: hashlib.sha256(read_bytes(root / name)).hexdigest())
    by_state = by_state | {states[name]: sha256 for name, sha256 in hashes.items()}
    in_order = {name: by_state[states[name]] for name in names if name not in bad}
    if unknown:
        cache.keep_about(file, {states[name]: sha256 for name, sha256 in in_order.items()})
    return in_order, bad


def _state(root: Path, name: str) -> str:
    """Return path, size, time and inode of a picture in one text; without a file, only its path."""
    with suppress(OSError):
        stat = os.stat(root / name)
        return f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0{stat.st_ino}"
    return name


def _undecodable(folder: Contents) -> dict[str, str]:
    """Return why pictures cannot be decoded, by path. The result is cached."""
    file = f"{folder.fingerprint}-bad-{cache.versions()}"
    if (reasons := cache.read_about(file)) is not None:
        return dict(reasons)

    def decode(name: str) -> None:
        read_rgb(folder.root / name, folder.pictures[name], small=True)

    _, bad = _outcomes(list(folder.pictures), decode, f"{len(folder.pictures):,} pictures to check")
    cache.keep_about(file, bad)
    return bad


def _outcomes(names: Sequence[str], work: Callable[[str], T], text: str = "") -> tuple[dict[str, T], dict[str, str]]:
    """Return the results of `work` by picture, and the reasons of bad pictures. `text` is shown as progress."""
    good, bad = cache.in_threads(work, names, cache.counter(text, len(names)))
    return good, {name: reason for name, error in bad.items() for reason in error.reasons.values()}


def known_contents(name: str) -> Contents | None:
    """Return the contents of a folder if this process has read it. `name` is its name in cells, KIND-FINGERPRINT."""
    return _contents.get(name.partition("-")[2])


def contents_of(name: str, root: Path, tables: Sequence[str] = ()) -> Contents:
    """Return the contents of a folder by its name in cells: from memory, from the cache, or from the folder.

    Raises:
        UserError: the contents have changed.
    """
    if (folder := known_contents(name)) is not None:
        return replace(folder, root=root)
    fingerprint = name.partition("-")[2]
    with suppress(TypeError, ValueError):  # no cache file, or a damaged one
        folder = Contents(root, *cache.read_about(fingerprint))
        if folder.fingerprint == fingerprint:
            return _contents.setdefault(fingerprint, folder)
    for skip in (False, True):
        with suppress(BadPicturesError):
            if (folder := contents(listing(root), tables, skip)).fingerprint == fingerprint:
                return folder
    raise _change_error(f"the pictures in {root}")
