"""Which class of a network's head each class folder is. Imports neither torch nor timm."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sparsebench.errors import UserError
from sparsebench.sources import imagenet
from sparsebench.sources.files import DIGITS, fingerprint_of
from sparsebench.text import few

_few = partial(few, width=60)
"""Names are a user's, of any length."""
IMAGENET = 1000
"""Classes of an ImageNet-1k head."""
MOST_CLASSES = 2**16
"""Of a head: a record holds the number of each item's class in 16 bits."""
MOST_BYTES = 2**23
"""Of a file of classes."""
FILE = "classes"
"""What the names of located files of classes begin with."""
BY_FILE = "--task folder:classes=FILE (a name a line, or JSON: a list, or an object of name to number)"

Labels = Literal["imagenet", "numbers", "names", "file"]
SAID: Mapping[str, str] = {
    "imagenet": "by WordNet ids or class names, as a head of ImageNet-1k has them",
    "numbers": "by their names, which are numbers of the head's classes",
    "names": "in the order of their names, as Python sorts them",
    "file": "by the file {}",
    "auto": "as ImageNet-1k has them where all are named so, else in the order of their names",
}
"""How class folders are numbered, by the parameter `labels`; `auto` is of older records alone."""


def described(params: Mapping[str, Any]) -> str:
    """Return how class folders are numbered by the parameters of a task, or "" where it has none."""
    said = SAID.get("names" if params.get("labels") == "folders" else str(params.get("labels", "")), "")
    head = f" (a head of {params['head']} classes)" if said and params.get("head") else ""
    return said.format(params.get("classes", "")) + head


class ClassFile(NamedTuple):
    """A file that says which class of a head has which name.

    Attributes:
        numbers: by the name, in Unicode NFC; None for a name that two classes have.
        size: how many classes the head has, or None where the file may be of some of them.
    """

    numbers: Mapping[str, int | None]
    size: int | None


class Numbered(NamedTuple):
    """Class folders as classes of a head.

    Attributes:
        labels: how they were numbered, see SAID.
        classes: the names of the head's classes.
        numbers: the class of each folder.
    """

    labels: Labels
    classes: tuple[str, ...]
    numbers: tuple[int, ...]


def number(
    folders: Sequence[str], labels: Labels | Literal["auto"], head: int | None, file: ClassFile | None = None
) -> Numbered:
    """Return the class of each class folder.

    Args:
        folders: their names, sorted.
        labels: how they are numbered; "auto" for by the file where there is one, else by what the names are.
        head: how many classes the head has, or None where that is not known.
        file: see `read_file`.

    Raises:
        UserError: the names are not such, the head has other classes, or nothing says which order is meant.
    """
    if head is not None and head > MOST_CLASSES:
        raise UserError("the weights' head", got=f"{head} classes", allowed=f"at most {MOST_CLASSES}")
    if file is not None:
        return _by_file(folders, head, file)
    if labels == "numbers" or (labels == "auto" and all(map(_is_number, folders))):
        return _by_number(folders, head, sure=labels == "numbers")
    known = [found is not None for found in imagenet.numbers_of(tuple(folders))]
    most = sum(known) * 2 > len(known) if head == IMAGENET else all(known) if head is None else False
    if labels == "imagenet" or (labels == "auto" and most):
        return _by_imagenet(folders, head)
    return _by_name(folders, head, known, sure=labels == "names")


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _by_number(folders: Sequence[str], head: int | None, *, sure: bool) -> Numbered:
    if strange := [name for name in folders if not _is_number(name)]:
        raise UserError("labels=numbers: class folders that are no numbers", got=_few(strange), next_step=BY_FILE)
    numbers = [int(name) for name in folders]
    _refuse_twice(folders, numbers)
    last = max(numbers)
    if head is None and not sure and last >= len(numbers):
        raise UserError(
            f"class folders are numbers up to {last}, and there are {len(numbers)}: how many classes the head has is "
            "not known", next_step="give labels=numbers if these are its classes, counted from 0, or " + BY_FILE,
        )  # fmt: skip
    if last >= (MOST_CLASSES if head is None else head):
        raise UserError(
            f"class folders are numbers up to {last}, and the head has {head or MOST_CLASSES} classes, counted from 0",
            next_step=f"number them from 0, or say which class each is with {BY_FILE}",
        )
    if not sure and sorted(numbers) == list(range(1, len(numbers) + 1)):
        raise UserError(
            f"class folders are numbers from 1 to {last}, and a head's classes are counted from 0",
            next_step=f"number them from 0, or give labels=numbers if 1 is the head's second class, or {BY_FILE}",
        )
    own = dict(zip(numbers, folders, strict=True))
    return Numbered("numbers", tuple(own.get(k, str(k)) for k in range(head or last + 1)), tuple(numbers))


def _by_imagenet(folders: Sequence[str], head: int | None) -> Numbered:
    numbers = imagenet.numbers_of(tuple(folders))
    if strange := [name for name, found in zip(folders, numbers, strict=True) if found is None]:
        raise UserError(
            f"{len(strange)} of {len(folders)} class folders are named after no class of ImageNet-1k, or after two",
            got=_few(strange), allowed="WordNet ids as n02012849, or names that one class has",
            next_step=f"rename or remove them, or say which class each is with {BY_FILE}",
        )  # fmt: skip
    if head not in (None, IMAGENET):
        raise UserError(f"labels=imagenet is for a head of {IMAGENET} classes", got=f"one of {head}", next_step=BY_FILE)
    found = [number for number in numbers if number is not None]
    _refuse_twice(folders, found)
    return Numbered("imagenet", imagenet.classes(), tuple(found))


def _by_file(folders: Sequence[str], head: int | None, file: ClassFile) -> Numbered:
    known = {name: found for name, found in file.numbers.items() if found is not None}
    numbers = [known.get(unicodedata.normalize("NFC", name)) for name in folders]
    if strange := [name for name, found in zip(folders, numbers, strict=True) if found is None]:
        raise UserError(
            f"{len(strange)} of {len(folders)} class folders are not in the file of classes, or stand for two",
            got=_few(strange), allowed=f"names as the file has them: {_few(list(known))}",
            next_step="add them to the file, or remove them",
        )  # fmt: skip
    found = [found for found in numbers if found is not None]
    _refuse_twice(folders, found)
    size = file.size or max(known.values()) + 1
    if head is not None and (size > head or (file.size is not None and size != head)):
        raise UserError(
            f"the file of classes has {size}, and the head has {head}",
            next_step="give the file of the head's own classes, in its order",
        )
    own = {found: name for name, found in reversed(known.items())}  # of several names the first
    return Numbered("file", tuple(own.get(k, str(k)) for k in range(head or size)), tuple(found))


def _by_name(folders: Sequence[str], head: int | None, known: Sequence[bool], *, sure: bool) -> Numbered:
    n, ways = len(folders), f"labels=names for the order in which Python and torchvision sort names, or {BY_FILE}"
    if head not in (None, n):
        odd = _odd_ones(folders, known)
        more = f"; {_few(odd)} is named otherwise than the others" if odd else ""
        raise UserError(
            f"there are {n} class folders, and the head has {head} classes: which they are is not known{more}",
            got=_few(folders), allowed="a folder of each class, numbers of the head's classes"
            + (", or names of ImageNet-1k" if head == IMAGENET else ""), next_step=f"say it with {BY_FILE}",
        )  # fmt: skip
    if not sure and (pair := _disputed(folders)):
        raise UserError(
            f"torchvision sorts class folder {pair[0]} before {pair[1]}, others sort them the other way round, and "
            "nothing says which order the head has", next_step=f"give {ways}",
        )  # fmt: skip
    return Numbered("names", tuple(sorted(folders)), tuple(map(sorted(folders).index, folders)))


def _odd_ones(folders: Sequence[str], known: Sequence[bool]) -> list[str]:
    """Return the folders that are no numbers where most are, or no classes of ImageNet where most are."""
    for fits in ([_is_number(name) for name in folders], known):
        if len(fits) / 2 < sum(fits) < len(fits):
            return [name for name, fit in zip(folders, fits, strict=True) if not fit]
    return []


def _disputed(folders: Sequence[str]) -> tuple[str, str] | None:
    """Return two class folders that torchvision sorts as they stand, and another usual program the other way round.

    timm sorts without regard to case, and numbers in names as numbers; systems of files store names in one of two
    Unicode normalisations, which are sorted otherwise.
    """
    composed, parted = (partial(unicodedata.normalize, form) for form in ("NFC", "NFD"))
    keys: tuple[Callable[[str], Any], ...] = (_natural, composed, parted)
    pairs = (pair for key in keys for pair in zip(sorted(folders), sorted(folders, key=key), strict=True))
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what timm sorts a name by."""
    parts = re.split(r"(\d+)", name.lower())
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]


def _refuse_twice(folders: Sequence[str], numbers: Sequence[int]) -> None:
    times = Counter(numbers)
    if twice := [name for name, found in zip(folders, numbers, strict=True) if times[found] > 1]:
        raise UserError("class folders that are of the same class", got=_few(twice), next_step="put them into one")


def locate_file(path: Path) -> str:
    """Return the name that a cell has for a file of classes, from its content.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    path = path.expanduser()
    if not path.is_file():
        raise UserError(f"classes: {path} is no file", allowed="a text with a name a line, or JSON")
    read_file(path)
    return f"{FILE}-{fingerprint_of(path)}"


def read_file(path: Path, name: str = "") -> ClassFile:
    """Return what a file of classes says: a text with a name a line in the head's order, or JSON.

    JSON is a list of names in that order, an object of name to number, or one of number to name or names, such as
    {"0": "tench"}.

    Raises:
        UserError: it cannot be read, is none of these, or has not the name by its content that was given.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"classes: {path} cannot be read: {error.strerror}", next_step="mend or replace it") from error
    if name and name != f"{FILE}-{hashlib.sha256(content).hexdigest()[:DIGITS]}":
        raise UserError(f"{path} changed while the run was under way", next_step="run it again")
    if len(content) > MOST_BYTES:
        raise UserError(f"classes: {path} is too large", got=f"{len(content)} bytes", allowed=f"{MOST_BYTES}")
    try:
        text = content.decode("utf-8-sig")
        if path.suffix.lower() == ".json":
            pairs = _pairs(json.loads(text, object_pairs_hook=_Object))
        else:
            lines = text.rstrip().splitlines()
            pairs = [(line.strip(), k) for k, line in enumerate(lines)], len(lines)
    except (ValueError, RecursionError) as error:
        raise UserError(f"classes: {path} cannot be read: {error}", allowed=BY_FILE.partition("FILE ")[2]) from error
    numbers: dict[str, int | None] = {}
    for text, found in pairs[0]:
        name = unicodedata.normalize("NFC", text)
        if not name or not 0 <= found < MOST_CLASSES:
            raise UserError(
                f"classes: {path}", got=f"class {found} named {name!r}",
                allowed=f"names that are not empty, and numbers from 0 to {MOST_CLASSES - 1}",
            )  # fmt: skip
        numbers[name] = found if numbers.setdefault(name, found) == found else None
    if all(found is None for found in numbers.values()):
        raise UserError(f"classes: {path} names no class")
    return ClassFile(numbers, pairs[1])


class _Object(list[tuple[str, Any]]):
    """An object of JSON, as pairs: names may be there twice."""


def _pairs(value: Any) -> tuple[list[tuple[str, int]], int | None]:
    """Return the names with their numbers, and how many classes there are, where JSON says all; ValueError if none."""
    if isinstance(value, list) and not isinstance(value, _Object) and all(isinstance(name, str) for name in value):
        return [(name.strip(), k) for k, name in enumerate(value)], len(value)
    if isinstance(value, _Object) and all(type(found) is int for _, found in value):
        return _once((name, found) for name, found in value), None
    if isinstance(value, _Object) and all(_is_number(key) for key, _ in value):
        several = [(int(key), names if isinstance(names, list) else [names]) for key, names in value]
        every = [name for _, names in several for name in names]
        if all(isinstance(name, str) for name in every) and not all(map(_is_number, every)):
            if len({found for found, _ in several}) < len(several):
                raise ValueError("a number is there twice")
            return [(name.strip(), found) for found, names in several for name in names], None
    raise ValueError("it is neither a list of names nor an object of name to number, or of number to name")


def _once(pairs: Any) -> list[tuple[str, int]]:
    """Return pairs of name and number; ValueError where two names have the same number."""
    found = [(name.strip(), number) for name, number in pairs]
    if twice := [number for number, times in Counter(number for _, number in set(found)).items() if times > 1]:
        raise ValueError(f"two names have the number {twice[0]}")
    return found
