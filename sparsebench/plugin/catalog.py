"""What plugins say of themselves, kept from one list to the next: to load them takes time, those of others seconds.

The files lie in the user's cache folder, see `files.cache_folder`, and may be removed at any time. One has the
lists and a digest of what is installed, so that it is of no use when that changes; one has what checks found of
exports, by the versions of strategies.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from sparsebench import __version__
from sparsebench.errors import UserError
from sparsebench.files import cache_folder, content_hash, write_whole
from sparsebench.plugin.installed import distribution, entries, files_of, module_of
from sparsebench.records.cell import Origin, digest

MOST = 2**22
"""Bytes of a file that is read."""
M = TypeVar("M", bound=BaseModel)
Tables = dict[str, list[dict[str, Any]]]


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    tables: Tables


class _Exports(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: dict[str, bool] = {}


def fingerprint() -> str:
    """Return a digest of the installed plugins, with all modules of their packages and of this one."""
    places = {module_of(entry).partition(".")[0]: entry for entry in entries().values()}
    about = [[entry.name, entry.value, *distribution(entry)] for entry in entries().values()]
    modules = {str(path): content_hash(path) for entry in places.values() for path in files_of(entry)}
    return digest([about, modules, __version__, sys.version])


def load(key: str) -> Tables | None:
    """Return what was kept under a fingerprint; None if there is nothing, or not by this user, or it is broken."""
    kept = _read(_path(), _Kept)
    return kept.tables if kept is not None and kept.key == key else None


def save(key: str, tables: Tables) -> None:
    """Keep tables under a fingerprint, if that can be."""
    if (path := _path()) is not None:
        with suppress(OSError, UserError):
            write_whole(path, _Kept(key=key, tables=tables).model_dump_json().encode())


def exports(name: str, origin: Origin) -> bool | None:
    """Return whether a check has found that a strategy of a version can be exported; None where none has."""
    found = _read(_path("exports"), _Exports)
    return None if found is None else found.answers.get(_version(name, origin))


def note_export(name: str, origin: Origin, answer: bool) -> None:
    """Keep what a check has found, if that can be; lists are made anew then."""
    if exports(name, origin) == answer or (path := _path("exports")) is None:
        return
    found = _read(path, _Exports) or _Exports()
    with suppress(OSError, UserError):
        write_whole(path, _Exports(answers=found.answers | {_version(name, origin): answer}).model_dump_json().encode())
        if (lists := _path()) is not None:
            lists.unlink(missing_ok=True)


def _version(name: str, origin: Origin) -> str:
    return f"{name} {origin.version} {origin.identity}"


def _read(path: Path | None, kind: type[M]) -> M | None:
    """Return what a file says; None if there is none, or not by this user, or it is broken."""
    if path is None:
        return None
    with suppress(OSError, ValueError):
        about = path.stat()
        if about.st_size > MOST or (hasattr(os, "getuid") and about.st_uid != os.getuid()):
            return None
        return kind.model_validate_json(path.read_bytes())
    return None


def _path(what: str = "plugins") -> Path | None:
    """Return a file of this environment."""
    place = cache_folder()
    return None if place is None else place / f"{what}-{digest(sys.prefix)}.json"
