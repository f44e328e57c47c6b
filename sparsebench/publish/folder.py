"""A submission's folder.

FOLDER/manifest.json                what it is, and the SHA-256 of every other file
FOLDER/records/records.parquet      a sealed file: the records, and what their machines, strategies and suite are
FOLDER/plugin/                      the strategy's file, and the modules beside it that it imports

But for the manifest and the plugin it is laid out as a run's folder, and can be read as one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sparsebench.errors import first_of
from sparsebench.records import files, manifests, table
from sparsebench.records.origin import Origin
from sparsebench.records.record import Record
from sparsebench.text import plain

MANIFEST, RECORDS, PLUGIN = "manifest.json", "records/records.parquet", "plugin"


class Unfit(ValueError):  # noqa: N818
    """What a submission is not to have; its text says which."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Answered(_Model):
    """The suite that a submission answers; its settings lie beside the records, see `manifests.Asked`."""

    name: str
    version: int
    sha256: str


class Manifest(_Model):
    """What a submission is.

    Attributes:
        strategy: whose records are published; what else there is are baselines and oracles that ran beside it.
        version: the last part of the folder's name, see `version_of`.
        plugin: where the strategy came from.
        file: the plugin file, by its name below `plugin`; "" of a strategy that is installed or shipped.
        files: SHA-256 of every other file, by name.
    """

    schema_version: Literal[2] = 2
    strategy: str
    version: str
    plugin: Origin
    file: str = ""
    suite: Answered
    files: dict[str, str]


def version_of(suite: Answered, plugin: Origin) -> str:
    """Return the name of one version of a strategy that answers one version of a suite, or has cells of its own."""
    which = suite.sha256[:12] if suite.name == manifests.OWN else suite.version
    return f"{suite.name}-{which}-{plugin.revision}"


def hashes_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of all files in a folder but its manifest, by name; "" of what is no plain file."""
    paths = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    hashes = {path.relative_to(folder).as_posix(): files.content_hash(path) for path in paths}
    return {name: sha256 for name, sha256 in hashes.items() if name != MANIFEST}


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a folder whose files are those that it lists, each with that hash.

    Raises:
        Unfit, OSError: they are not.
    """
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes(), strict=True)
    except FileNotFoundError as error:
        raise Unfit(f"there is no {MANIFEST}") from error
    except ValidationError as error:
        raise Unfit(f"{MANIFEST}: {first_of(error)}") from error
    if manifest.version != version_of(manifest.suite, manifest.plugin):
        raise Unfit(f"{MANIFEST}: its version is not that of its suite and plugin")
    hashes, listed = hashes_of(folder), manifest.files
    for name in sorted(hashes.keys() | listed.keys() | {RECORDS}):
        if name not in hashes or name not in listed:
            raise Unfit(f"'{plain(name)}' is not " + ("there" if name not in hashes else f"in {MANIFEST}"))
        if hashes[name] != listed[name] or not hashes[name]:
            raise Unfit(f"'{plain(name)}' has another SHA-256 than {MANIFEST} says, or is no plain file")
    return manifest


def write_records(folder: Path, records: Iterable[Record], beside: Mapping[str, str]) -> None:
    """Write the records of a submission, and by file name what lies beside them; see `store.beside`."""
    table.write(folder / RECORDS, table.table_of((record, 0) for record in records), beside)


def read_records(folder: Path) -> Iterator[Record]:
    """Yield the records of a submission.

    Raises:
        ValueError: one is none, or is not of the cell that it names.
        UserError: the file is damaged.
    """
    return map(table.record_of, table.rows_of(table.read(folder / RECORDS)))
