"""A submission's folder, read as a stranger's: plain files of bounded size, through no link, each as its hash says.

FOLDER/manifest.json                 what it is, and the SHA-256 of every other file
FOLDER/records/records.jsonl         sorted by their cells' hashes, in canonical JSON
FOLDER/environments/<hash>.json      FOLDER/strategies/<hash>.json      FOLDER/suites/<hash>.json
FOLDER/pictures/<hash>.json

But for the manifest it is laid out as a run's folder, and can be read as one.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from sparsebench.records import environment, files, manifests
from sparsebench.records.cell import digest
from sparsebench.records.origin import Origin
from sparsebench.text import plain

MANIFEST, RECORDS = "manifest.json", "records/records.jsonl"
BESIDE = (environment.FOLDER, manifests.STRATEGIES, manifests.SUITES, manifests.PICTURES)
"""Folders whose files are named after what they say."""
_NAMED = re.compile(rf"({'|'.join(BESIDE)})/([0-9a-f]{{16}})\.json")
MOST_FILES = 1000
MOST_BYTES = {RECORDS: 2**28}
"""Of a file, by its name; of another it is `files.FEW_BYTES`."""
ALL_BYTES = 2**25
"""Of all files but the records."""

M = TypeVar("M", bound=BaseModel)


class Unfit(ValueError):  # noqa: N818
    """What a submission is not to have; its text says which."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Answered(_Model):
    """The suite that a submission answers; its settings are in the file of that hash, see `manifests.Asked`."""

    name: str
    version: int
    sha256: str


class Manifest(_Model):
    """What a submission is.

    Attributes:
        strategy: whose records are published; what else there is are baselines and oracles that ran beside it.
        version: the last part of the folder's name, see `version_of`.
        plugin: where the strategy came from, with its revision.
        files: SHA-256 of every other file, by name.
    """

    schema_version: Literal[1] = 1
    strategy: str
    version: str
    plugin: Origin
    suite: Answered
    files: dict[str, str]


def version_of(suite: Answered, plugin: Origin) -> str:
    """Return the name of one version of a strategy that answers one version of a suite, or has cells of its own."""
    which = suite.sha256[:12] if suite.name == manifests.OWN else suite.version
    return f"{suite.name}-{which}-{plugin.revision[:21]}"


def files_of(folder: Path) -> set[str]:
    """Return the names of the files in a submission's folder.

    Raises:
        Unfit: something in it is no plain file, or has no business there, or there are too many.
        OSError: the folder cannot be read.
    """
    if folder.is_symlink():
        raise Unfit("it is a link")
    names: set[str] = set()
    size = 0
    inside = {RECORDS.partition("/")[0], *BESIDE}
    todo = [""]
    while todo:
        at = todo.pop()
        with os.scandir(folder / at) as entries:
            for entry in entries:
                name = f"{at}/{entry.name}" if at else entry.name
                info = entry.stat(follow_symlinks=False)
                mode = info.st_mode
                if stat.S_ISDIR(mode) and name in inside:
                    todo.append(name)
                elif stat.S_ISREG(mode) and (name in (MANIFEST, RECORDS) or _NAMED.fullmatch(name)):
                    names.add(name)
                    size += 0 if name == RECORDS else info.st_size
                else:
                    raise Unfit(f"'{plain(name)}' does not belong there, or is no plain file")
                if len(names) > MOST_FILES or size > ALL_BYTES:
                    raise Unfit(f"beside its records it has more than {MOST_FILES} files or {ALL_BYTES} bytes")
    return names


@contextmanager
def open_file(folder: Path, name: str) -> Iterator[BufferedReader]:
    """Open a file of a submission, which has one name alone; see `files.open_file`.

    Raises:
        Unfit: it has others.
        OSError: it is no plain file of bounded size, or cannot be read.
    """
    with files.open_file(folder / name, MOST_BYTES.get(name, files.FEW_BYTES)) as file:
        if os.fstat(file.fileno()).st_nlink != 1:
            raise Unfit(f"'{name}' is no plain file of one name")
        yield file


def read(folder: Path, name: str, kind: type[M]) -> M:
    """Return what a small file says, its numbers and texts being what they are called.

    Raises:
        Unfit, OSError: it cannot be read, or says something else.
    """
    with open_file(folder, name) as file:
        content = file.read(files.FEW_BYTES + 1)
    try:
        return kind.model_validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Unfit(plain(f"'{name}' is not as it should be: {where}: {first['msg']}")) from error


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a folder whose files are those that it lists, each with that hash.

    Raises:
        Unfit, OSError: they are not.
    """
    names = files_of(folder)
    if MANIFEST not in names:
        raise Unfit(f"there is no {MANIFEST}")
    manifest = read(folder, MANIFEST, Manifest)
    if manifest.version != version_of(manifest.suite, manifest.plugin):
        raise Unfit(f"{MANIFEST}: its version is not that of its suite and plugin")
    listed = set(manifest.files)
    if RECORDS not in listed:
        raise Unfit(f"{MANIFEST} lists no {RECORDS}")
    if odd := sorted(listed ^ (names - {MANIFEST})):
        raise Unfit(f"'{plain(odd[0])}' is " + ("listed and not there" if odd[0] in listed else "there and not listed"))
    for name in sorted(listed):
        with open_file(folder, name) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != manifest.files[name]:
                raise Unfit(f"'{name}' has another SHA-256 than {MANIFEST} says")
    return manifest


def beside(folder: Path, manifest: Manifest, where: str, kind: type[M]) -> list[M]:
    """Return what the files of one of the folders `BESIDE` say.

    Raises:
        Unfit, OSError: one cannot be read, or is not named after what it says.
    """
    things = []
    for name in sorted(manifest.files):
        if (match := _NAMED.fullmatch(name)) and match[1] == where:
            one = read(folder, name, kind)
            if digest(one.model_dump(mode="json")) != match[2]:
                raise Unfit(f"'{name}' is not named after what it says")
            things.append(one)
    return things


def lines(folder: Path) -> Iterator[bytes]:
    """Yield the lines of the records' file, without their ends.

    Raises:
        Unfit, OSError: one is too long or torn.
    """
    with open_file(folder, RECORDS) as file:
        while line := file.readline(files.LINE_BYTES + 1):
            if not line.endswith(b"\n"):
                raise Unfit(f"{RECORDS} has a line that is torn, or of more than {files.LINE_BYTES} bytes")
            yield line[:-1]
