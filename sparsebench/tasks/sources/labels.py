"""Assignment of class folders to the classes of a network's head. Imports neither torch nor timm."""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple
from zipfile import BadZipFile

import numpy as np
from pydantic import StrictInt, TypeAdapter

from sparsebench.errors import UserError, few, reason_of

_few = partial(few, width=60)
"""`few` for names of users, which may be long."""
IMAGENET = 1000
"""Number of classes of an ImageNet-1k head."""
MOST_CLASSES = 2**16
"""Largest number of classes of a head: a record stores the class of each item in 16 bits."""
SYNSETS, LEMMAS = "imagenet_synsets.txt", "imagenet_synset_to_lemma.txt"
"""timm's files with the classes of ImageNet-1k. They are read without importing timm, which imports torch."""
FILE = "classes"
"""Prefix of the names of class files in cells."""
BY_FILE = "--task folder:classes=FILE (one name per line, or JSON: a list, or an object of name to number)"

DAMAGED = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, BadZipFile, zlib.error)
"""What numpy raises for a file that is not an .npz with these arrays."""

Labels = Literal["imagenet", "numbers", "names", "file"]
ClassFile = tuple[dict[str, int | None], int | None]
"""Contents of a class file: the class number by name in Unicode NFC, None for a name of two classes; and the number of
classes of the head, or None if the file may not have all."""
_JSON = TypeAdapter(list[str] | dict[str, StrictInt] | dict[int, str | list[str]])
RULES: Mapping[str, str] = {
    "imagenet": "by WordNet ids or class names, as a head of ImageNet-1k has them",
    "numbers": "by their names, which are numbers of the head's classes",
    "names": "in the order of their names, as Python sorts them",
    "file": "by the file {}",
}
"""How class folders are numbered, for each value of the parameter `labels`."""


def numbering(params: Mapping[str, Any]) -> str:
    """Return how class folders are numbered with these parameters of a task, or "" if it has no `labels`."""
    text = RULES.get(str(params.get("labels")), "")
    head = f" (a head of {params['head']} classes)" if text and params.get("head") else ""
    return text.format(params.get("classes", "")) + head


class Numbered(NamedTuple):
    """Class folders as classes of a head.

    Attributes:
        labels: the rule of the numbering, see RULES.
        classes: the names of the head's classes.
        numbers: the class number of each folder.
    """

    labels: Labels
    classes: tuple[str, ...]
    numbers: tuple[int, ...]


def number(
    folders: Sequence[str], labels: Labels | Literal["auto"], head: int | None, file: ClassFile | None = None
) -> Numbered:
    """Return the class of each class folder.

    Args:
        folders: the sorted names of the class folders.
        labels: the rule of the numbering; "auto" chooses it by the names.
        head: number of classes of the head, or None if unknown.
        file: contents of the class file, if any; it replaces `labels`. See `read_file`.

    Raises:
        UserError: a name does not match the rule, the head has other classes, or the order of classes is ambiguous.
    """
    if head is not None and head > MOST_CLASSES:
        raise UserError("the weights' head", got=f"{head} classes", allowed=f"at most {MOST_CLASSES}")
    rule: Labels
    if file is not None:
        rule = "file"
    elif labels == "auto":
        rule = _rule_for(folders, head)
    else:
        rule = labels
    by_name, size = file or _numbers_by_name(folders, rule)
    # Of several names of a class, the first one names it.
    names = {number: name for name, number in reversed(by_name.items()) if number is not None}

    numbers = _matches(folders, rule, by_name, names)
    times = Counter(numbers)
    twice = [name for name, number in zip(folders, numbers, strict=True) if times[number] > 1]
    if twice:
        raise UserError("several class folders match the same class", got=_few(twice), next_step="merge them")
    if rule == "numbers":
        _check_numbers(numbers, head, sure=labels == "numbers")
    elif rule == "names":
        _check_names(folders, head, sure=labels == "names")
    elif head is not None and (head < max(names) + 1 or size not in (None, head)):
        raise UserError(
            f"class folders are numbered by {rule}, with {max(names) + 1} classes, and the head has {head}",
            next_step=f"give the classes of the head, in its order, with {BY_FILE}",
        )
    classes = range(head or size or max(names) + 1)
    return Numbered(rule, tuple(names.get(k, str(k)) for k in classes), tuple(numbers))


def _matches(
    folders: Sequence[str], rule: Labels, by_name: Mapping[str, int | None], names: Mapping[int, str]
) -> list[int]:
    """Return the class number of each folder; raise UserError if a folder matches no class, or two."""
    key = KEYS.get(rule, str)
    matches = [by_name.get(key(name)) for name in folders]
    strange = [name for name, number in zip(folders, matches, strict=True) if number is None]
    if strange:
        how = RULES[rule].format("of classes")
        if rule == "file":
            how += f", which has {len(names)} class{'es' * (len(names) > 1)}"
        examples = [names[number] for number in sorted(names)] or ["0", "1"]
        raise UserError(
            f"{len(strange)} of {len(folders)} class folders match no class, or two; they are numbered {how}",
            got=_few(_quoted(strange)),
            allowed=f"names such as {_few(_quoted(examples))}",
            next_step=f"rename or remove them, or give the class of each with {BY_FILE}",
        )
    return [number for number in matches if number is not None]


def _quoted(names: Sequence[str]) -> list[str]:
    """Return names in quotes, because a line of a class file may have commas."""
    return [f"'{name}'" for name in names]


def _numbers_by_name(folders: Sequence[str], rule: Labels) -> ClassFile:
    """Return the class numbers by name as a class file would give them, by a rule other than "file"."""
    if rule == "imagenet":
        return dict(_imagenet()), IMAGENET
    if rule == "numbers":
        return {name: int(name) for name in folders if _is_number(name)}, None
    return {name: number for number, name in enumerate(sorted(folders))}, None


def _rule_for(folders: Sequence[str], head: int | None) -> Labels:
    """Return the rule that the names of the class folders suggest."""
    if all(map(_is_number, folders)):
        return "numbers"
    matches = [imagenet_number(name) is not None for name in folders]
    most = 2 * sum(matches) > len(matches) if head == IMAGENET else head is None and all(matches)
    return "imagenet" if most else "names"


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _check_numbers(numbers: Sequence[int], head: int | None, *, sure: bool) -> None:
    """Raise UserError if these numbers are not classes of the head, or, unless `sure`, seem not to be."""
    n = len(numbers)
    most = head or (MOST_CLASSES if sure else n)
    from_1 = sorted(numbers) == list(range(1, n + 1))
    if max(numbers) >= most or (not sure and from_1):
        fits = [
            ("labels=numbers if they are the classes of the head", not sure and max(numbers) < (head or MOST_CLASSES)),
            ("labels=names for torchvision's order, which sorts names as text", head in (None, n)),
        ]
        raise UserError(
            f"class folders have numbers from {min(numbers)} to {max(numbers)}, "
            + ("but classes are counted from 0" if from_1 else f"and there are {most} classes"),
            allowed=f"0 to {most - 1}",
            next_step=", or ".join(
                ["rename them", *(f"give {way}" for way, helps in fits if helps), f"give {BY_FILE}"]
            ),
        )


def _check_names(folders: Sequence[str], head: int | None, *, sure: bool) -> None:
    """Raise UserError if there is not a folder for each class, or, unless `sure`, the order is ambiguous."""
    if head not in (None, len(folders)):
        raise UserError(
            f"there are {len(folders)} class folders, and the head has {head} classes, so their assignment is unknown",
            got=_few(folders),
            allowed="a folder for each class, numbers of the head's classes as names"
            + (", or names of ImageNet-1k" if head == IMAGENET else ""),
            next_step=f"give {BY_FILE}",
        )
    if not sure and (pair := _dispute(folders)):
        raise UserError(
            f"torchvision sorts class folder {pair[0]} before {pair[1]}, other programs sort them the other way round, "
            "and the order of the head is unknown",
            next_step=f"give labels=names for the order of Python and torchvision, or {BY_FILE}",
        )


def _dispute(folders: Sequence[str]) -> tuple[str, str] | None:
    """Return two class folders, in torchvision's order, that another common program sorts the other way round, or None.

    timm ignores case and compares numbers in names as numbers. File systems store names in one of two Unicode
    normalisations, which sort differently.
    """
    composed, parted = (partial(unicodedata.normalize, form) for form in ("NFC", "NFD"))
    keys: tuple[Callable[[str], Any], ...] = (_natural, composed, parted)
    pairs = (pair for key in keys for pair in zip(sorted(folders), sorted(folders, key=key), strict=True))
    return next((pair for pair in pairs if pair[0] != pair[1]), None)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return timm's sort key of a name."""
    parts = re.split(r"(\d+)", name.lower())
    return [(int(part), "") if place % 2 else (0, part) for place, part in enumerate(parts)]


def read_text_classes(path: Path) -> list[str]:
    """Return the array `classes` of an .npz file with features of texts, see `--text-features`.

    Raises:
        UserError: the file cannot be read, or has no such names.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as content:
            names = content["classes"]
    except DAMAGED as error:
        raise UserError(f"--text-features: {path} cannot be read: {reason_of(error)}") from error
    if names.ndim != 1 or names.dtype.kind != "U":
        raise UserError(f"--text-features: {path}", got=f"classes of type {names.dtype}", allowed="a list of names")
    return [str(name) for name in names]


def read_file(path: Path) -> ClassFile:
    """Return the contents of a class file: text with one name per line, in the head's order, or JSON.

    JSON is a list of names in that order, an object of name to number, or an object of number to name or names, such as
    {"0": "tench"}. An .npz file has the features of texts, with the names in their order.

    Raises:
        UserError: the file cannot be read, or has another format.
    """
    try:
        is_text = path.suffix.lower() != ".npz"
        text = path.read_text(encoding="utf-8-sig") if is_text else "\n".join(read_text_classes(path))
        is_json = path.suffix.lower() == ".json"
        pairs, size = _pairs(_JSON.validate_json(text) if is_json else text.rstrip().splitlines())
    except (OSError, ValueError) as error:
        says = BY_FILE.partition("FILE ")[2]
        raise UserError(f"classes: {path} cannot be read: {reason_of(error)}", allowed=says) from error
    numbers: dict[str, int | None] = {}
    for label, number in pairs:
        name = unicodedata.normalize("NFC", label.strip())
        if not name or not 0 <= number < MOST_CLASSES:
            raise UserError(
                f"classes: {path}",
                got=f"class {number} named {name!r}",
                allowed=f"names that are not empty, and numbers from 0 to {MOST_CLASSES - 1}",
            )
        numbers[name] = number if numbers.setdefault(name, number) == number else None
    if all(number is None for number in numbers.values()):
        raise UserError(f"classes: {path} names no class")
    return numbers, size


def _pairs(
    value: list[str] | dict[str, int] | dict[int, str | list[str]],
) -> tuple[list[tuple[str, int]], int | None]:
    """Return the names with their numbers, and the number of classes, which only a list states.

    Raises:
        ValueError: two names have the same number, or names and numbers cannot be told apart.
    """
    if isinstance(value, list):
        return [(name, k) for k, name in enumerate(value)], len(value)
    pairs = list[tuple[str, int]]()
    for key, item in value.items():
        if isinstance(item, int):
            pairs.append((str(key), item))
        else:
            pairs += [(name, int(key)) for name in ([item] if isinstance(item, str) else item)]
    keys = {number for _, number in pairs}
    if len(keys) < len(value) or all(_is_number(name) for name, _ in pairs):
        raise ValueError("two names have the same number, or names and numbers cannot be told apart")
    return pairs, None


@lru_cache(maxsize=1)
def imagenet_classes() -> tuple[str, ...]:
    """Return the WordNet ids of the 1000 classes of ImageNet-1k, in the order of a head's outputs."""
    return tuple(_imagenet_lines(SYNSETS))


def imagenet_number(folder: str) -> int | None:
    """Return the class of ImageNet-1k that a folder is named after, or None.

    A folder is named after a WordNet id, such as n01440764, or one of the class's names, such as tench or
    great_white_shark. A name of two classes, such as crane, matches neither.
    """
    return _imagenet().get(_plain_name(folder))


@lru_cache(maxsize=1)
def _imagenet() -> dict[str, int]:
    """Return the class numbers by WordNet id, followed by the class names that are unique."""
    texts = dict(line.split("\t", 1) for line in _imagenet_lines(LEMMAS))
    synonyms = [{_plain_name(name) for name in texts[wordnet].split(",")} for wordnet in imagenet_classes()]
    times = Counter(name for names in synonyms for name in names)
    numbers = {wordnet: number for number, wordnet in enumerate(imagenet_classes())}
    return numbers | {name: k for k, names in enumerate(synonyms) for name in sorted(names) if times[name] == 1}


def _plain_name(name: str) -> str:
    return " ".join(name.lower().replace("_", " ").split())


KEYS: Mapping[str, Callable[[str], str]] = {"imagenet": _plain_name, "file": partial(unicodedata.normalize, "NFC")}
"""The lookup key of a class folder's name, for rules that do not use the name itself."""


def _imagenet_lines(name: str) -> list[str]:
    spec = find_spec("timm")
    assert spec is not None and spec.submodule_search_locations is not None
    text = (Path(spec.submodule_search_locations[0]) / "data" / "_info" / name).read_text(encoding="utf-8")
    return text.splitlines()
