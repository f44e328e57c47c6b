"""Which pictures a folder holds, of which classes, and what in it is left out."""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sparsebench.errors import UserError, few

SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "BMP": (".bmp",),
    "WEBP": (".webp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "AVIF": (".avif",),
}
"""How the names of pictures end, by Pillow's name of the format; PostScript would be a program that is run."""
SYSTEM = frozenset(
    {
        "@eadir", "@tmp", "@recycle", "@sharebin", "#recycle", "#snapshot", "$recycle.bin", "__macosx", "lost+found",
        "system volume information",
    }
)  # fmt: skip
"""Folders that file servers, file systems and archives put beside pictures, in lower case."""
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing", "eval"})
NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
UNSAID = "hidden files that are no pictures"


@lru_cache(maxsize=1)
def formats() -> tuple[str, ...]:
    """Return Pillow's names of the formats that are read here, whatever a file is called."""
    from PIL import features

    return tuple(name for name in SUFFIXES if name != "AVIF" or features.check("avif"))


@lru_cache(maxsize=1)
def suffixes() -> frozenset[str]:
    """Return how the names of pictures end that are read here, in lower case."""
    return frozenset(suffix for name in formats() for suffix in SUFFIXES[name])


@dataclass(frozen=True)
class Listing:
    """The pictures below a folder.

    Attributes:
        root: the folder.
        names: their paths in it, "/" between the parts, sorted.
        folders: the paths of the folders in it, sorted, and of links to these.
        left: what was left out, paths by the reason.
    """

    root: Path
    names: tuple[str, ...]
    folders: tuple[str, ...]
    left: Mapping[str, Sequence[str]]

    def below(self, name: str) -> Listing:
        """Return the pictures below a folder of the folder."""
        prefix = f"{name}/"
        names, folders = (
            tuple(path.removeprefix(prefix) for path in paths if path.startswith(prefix))
            for paths in (self.names, self.folders)
        )
        return Listing(self.root / name, names, folders, {})


def listing(root: Path) -> Listing:
    """Return the pictures below a folder. Links are followed, but for those to folders that are among it already.

    A folder that is called as a picture is among them, as one that cannot be read.

    Raises:
        UserError: a folder cannot be read, or a link makes a picture count twice.
    """
    names, folders, linked, seen = list[str](), list[str](), set[str](), set[str]()
    left: defaultdict[str, list[str]] = defaultdict(list)
    inside, links = [""], list[str]()
    while inside or links:
        within = inside.pop() if inside else links.pop(0)  # what lies there itself comes first
        if (real := os.path.realpath(root / within)) in seen:
            left["links to folders that are here already"].append(within.rstrip("/"))
            continue
        seen.add(real)
        for entry in sorted(_entries(root / within), key=lambda entry: entry.name):
            path, kind = within + entry.name, _kind(entry)
            if reason := _reason(entry.name, kind):
                left[reason].append(path)
            elif kind == "folder" and not _is_picture(entry.name):
                folders.append(path)
                (links if entry.is_symlink() else inside).append(f"{path}/")
            else:
                names.append(path)
                if entry.is_symlink():
                    linked.add(path)
    first: dict[str, str] = {}
    for path in sorted(names, key=lambda path: path in linked) if linked else ():
        if (other := first.setdefault(os.path.realpath(root / path), path)) != path:
            raise UserError(f"{root}: {path} is a link to {other}", next_step="remove one, a picture counts once")
    left.pop(UNSAID, None)
    left_out = {reason: sorted(paths) for reason, paths in sorted(left.items())}
    return Listing(root, tuple(sorted(names)), tuple(sorted(folders)), left_out)


def _reason(name: str, kind: str) -> str:
    """Return why an entry of a folder is left out, or ""."""
    if name.startswith("."):
        return "hidden" if kind == "folder" or _is_picture(name) else UNSAID
    if kind == "nothing":
        return "links to nothing"
    if kind == "folder" and not _is_picture(name):
        return "a system's folders" if name.lower() in SYSTEM else ""
    return "files of another kind" if kind == "other" or not _is_picture(name) else ""


def _is_picture(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes()


def is_folder(path: Path) -> bool:
    """Say whether there is a folder; UserError where that cannot be seen."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in NOT_THERE:
            return False
        raise _unreadable(path, error) from error


def _unreadable(path: str | Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read: {error.strerror}", next_step="mend its permissions, or remove it")


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _unreadable(folder, error) from error


def _kind(entry: os.DirEntry[str]) -> str:
    """Return "folder", "file", "other" for neither, or "nothing" for a link that leads nowhere."""
    try:
        if entry.is_symlink():
            entry.stat()
        return "folder" if entry.is_dir() else "file" if entry.is_file() else "other"
    except OSError as error:
        if error.errno in NOT_THERE:
            return "nothing"
        raise _unreadable(entry.path, error) from error


def classes_in(found: Listing, wanted: str) -> list[str]:
    """Return the names of the class folders of a folder, sorted; each has a picture.

    Pictures in folders of a class folder are of the class.

    Args:
        found: what is in the folder.
        wanted: the layout that it should have, for an error.

    Raises:
        UserError: there are fewer than two, two look the same, one has no pictures, or the folder holds splits and no
            classes.
    """
    root, classes = found.root, [path for path in found.folders if "/" not in path]
    if classes and SPLITS.issuperset(map(str.lower, classes)):
        raise UserError(
            f"{root} holds splits and no classes", got=classes, allowed=wanted,
            next_step=f"name the folder of the classes, as in {root / classes[0]}",
        )  # fmt: skip
    if len(classes) < 2:
        loose = sum("/" not in name for name in found.names)
        beside = f" and {loose} pictures in no class folder" if loose else ""
        raise UserError(f"{root}: too few classes", got=f"{classes}{beside}", allowed=f"2 or more: {wanted}")
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for name in classes:
        alike[unicodedata.normalize("NFC", name)].append(name)
    if twice := [group for group in alike.values() if len(group) > 1]:
        raise UserError(
            f"{root}: class folders whose names differ in their Unicode normalisation alone",
            got=[ascii(name) for name in twice[0]], next_step="put their pictures into one",
        )  # fmt: skip
    full = {name.partition("/")[0] for name in found.names if "/" in name}
    if empty := [name for name in classes if name not in full]:
        more = f", and {len(empty) - 1} more class folders" if len(empty) > 1 else ""
        raise UserError(
            f"{root / empty[0]} holds no pictures{more}",
            allowed=f"at least one in each class: {', '.join(sorted(suffixes()))}",
            next_step="remove it if it is no class",
        )  # fmt: skip
    return classes


def strays_in(found: Listing, wanted: Callable[[str], object]) -> str:
    """Return in one line how much was left out of a folder of pictures, and what, or "".

    Args:
        found: what is in the folder.
        wanted: says of a picture's path in it whether it is in a place where pictures are looked for.
    """
    reasons = dict(found.left)
    if loose := [name for name in found.names if not wanted(name)]:
        reasons["pictures in no class folder"] = loose
    return "; ".join(f"{reason}: {len(paths)} ({few(paths, width=60)})" for reason, paths in reasons.items())
