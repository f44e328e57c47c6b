"""Which pictures a folder holds, of which classes, and what in it is left out."""

from __future__ import annotations

import os
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
AGAIN = "links to folders that are here already"
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

    Raises:
        UserError: a folder cannot be read, or a link makes a picture count twice.
    """

    def refuse(error: OSError) -> None:
        raise UserError(
            f"{error.filename} cannot be read: {error.strerror}", next_step="mend its permissions, or remove it"
        ) from error

    names, folders = list[str](), list[str]()
    left: defaultdict[str, list[str]] = defaultdict(list)
    top = Path(os.path.realpath(root))
    seen = {top}
    for place, inside, files in os.walk(root, onerror=refuse, followlinks=True):
        within = "" if Path(place) == root else f"{Path(place).relative_to(root).as_posix()}/"
        for name in sorted(inside):
            reason = _why_no_folder(os.path.join(place, name), top, seen)
            if reason in ("", AGAIN):
                folders.append(within + name)
            if reason:
                left[reason].append(within + name)
                inside.remove(name)
        for name in files:
            reason = _why_no_picture(os.path.join(place, name))
            (left[reason] if reason else names).append(within + name)
    _check_links(root, names)
    left.pop(UNSAID, None)
    left_out = {reason: sorted(paths) for reason, paths in sorted(left.items())}
    return Listing(root, tuple(sorted(names)), tuple(sorted(folders)), left_out)


def _check_links(root: Path, names: Sequence[str]) -> None:
    """Raise UserError if a link leads to a picture that is there already."""
    links = [name for name in names if os.path.islink(root / name)]
    first = {} if not links else {os.path.realpath(root / name): name for name in set(names).difference(links)}
    for name in links:
        if (other := first.setdefault(os.path.realpath(root / name), name)) != name:
            raise UserError(f"{root}: {name} is a link to {other}", next_step="remove one, a picture counts once")


def _why_no_folder(path: str, top: Path, seen: set[Path]) -> str:
    """Return why a folder is left out, or ""; else add its real path to `seen`, those of the folders so far."""
    name, real = os.path.basename(path).lower(), Path(os.path.realpath(path))
    if name.startswith("."):
        return "hidden"
    if name in SYSTEM:
        return "a system's folders"
    if real in seen or (os.path.islink(path) and (real.is_relative_to(top) or top.is_relative_to(real))):
        return AGAIN
    seen.add(real)
    return ""


def _why_no_picture(path: str) -> str:
    """Return why a file is left out, or ""."""
    picture = os.path.splitext(path)[1].lower() in suffixes()
    if os.path.basename(path).startswith("."):
        return "hidden" if picture else UNSAID
    if picture and os.path.isfile(path):
        return ""
    return "files of another kind" if os.path.exists(path) else "links to nothing"


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
