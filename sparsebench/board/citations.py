"""The works that a board cites: sparsebench, its strategies, data sets and weights, each once, as BibTeX."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib import resources
from typing import Any

import pandas as pd

from sparsebench import __version__
from sparsebench.errors import plain
from sparsebench.records.record import PRETRAINED

WORKS = {
    name: work | {"bibtex": work["bibtex"].strip()}
    for name, work in tomllib.loads(resources.files(__package__).joinpath("works.toml").read_text("utf-8")).items()
}
"""Works by name; `sets` are the data sets that they describe, by default the one of this name."""
KEY = re.compile(r"(@\w+\s*\{\s*)([^,\s]+)")
TITLE = re.compile(r'\btitle\s*=\s*(?:\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|"([^"]*)")', re.IGNORECASE)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def of_records(records: pd.DataFrame) -> list[str]:
    """Return the entries of sparsebench, and of the data sets and trained weights of a board's records.

    A comment names weights of a file, whose works are not known.
    """
    sets: set[str] = set()
    weights: set[str] = set()
    files: set[str] = set()
    for setting, network in records[["setting", "network"]].astype(str).drop_duplicates().itertuples(index=False):
        for part in _parts(_parsed(setting)):
            sets |= {value for value in part.values() if isinstance(value, str)}
            if network == PRETRAINED or part.get(PRETRAINED) is True:
                weights |= {part["arch"]} if isinstance(part.get("arch"), str) else set()
        files |= {network} - {PRETRAINED, ""}
    used = [work for name, work in WORKS.items() if _is_used(name, work, sets, weights)]
    comments = [f"% Cite also the source of the weights {plain(name)}." for name in sorted(files)]
    return [*(work["bibtex"].replace("VERSION", __version__) for work in used), *comments]


def _parsed(setting: str) -> object:
    try:
        return json.loads(setting)
    except ValueError:  # of a file that sparsebench did not write
        return None


def _is_used(name: str, work: dict[str, Any], sets: set[str], weights: Iterable[str]) -> bool:
    if "weights" in work:
        return any(re.search(work["weights"], one) for one in weights)
    return name == "sparsebench" or not sets.isdisjoint(work.get("sets", [name]))


def _parts(content: object) -> Iterator[dict[str, Any]]:
    """Yield all objects in a value of JSON."""
    if isinstance(content, dict):
        yield content
    values = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for value in values:
        yield from _parts(value)


def once(entries: Iterable[str]) -> list[str]:
    """Return entries with each work once, by its title. Letters follow a key that several works have."""
    works: dict[str, str] = {}
    for entry in entries:
        works.setdefault(_work_of(entry), entry)
    seen: Counter[str] = Counter()
    result = []
    for entry in works.values():
        key = KEY.search(entry)
        if key is not None:
            number = seen[key[2]]
            seen[key[2]] += 1
            letter = LETTERS[number - 1 : number] if number else ""
            entry = f"{entry[: key.end()]}{letter}{entry[key.end() :]}"
        result.append(entry)
    return result


def _work_of(entry: str) -> str:
    """Return the letters and digits of an entry's title, in lower case; of the whole entry without a title."""
    match = TITLE.search(entry)
    title = (match[1] or match[2] or "") if match else ""
    return re.sub(r"\W|_", "", title.lower()) or re.sub(r"\W|_", "", entry.lower())
