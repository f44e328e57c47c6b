"""What plugins say of themselves, kept from one list to the next: to load them takes time, those of others seconds.

The file lies in the user's cache folder, see `records.files.cache_folder`, and may be removed at any time. It holds a
digest of what is installed, so that it is of no use when that changes.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError
from sparsebench.plugin.installed import distribution, entries, files_of, module_of
from sparsebench.records.cell import digest
from sparsebench.records.files import cache_folder, content_hash, write_whole
from sparsebench.version import __version__

MOST = 2**22
"""Bytes of a file that is read."""
Tables = dict[str, list[dict[str, Any]]]


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    tables: Tables


def fingerprint() -> str:
    """Return a digest of the installed plugins, with all modules of their packages and of this one."""
    places = {module_of(entry).partition(".")[0]: entry for entry in entries().values()}
    about = [[entry.name, entry.value, *distribution(entry)] for entry in entries().values()]
    modules = {str(path): content_hash(path) for entry in places.values() for path in files_of(entry)}
    return digest([about, modules, __version__, sys.version])


def load(key: str) -> Tables | None:
    """Return what was kept under a fingerprint; None if there is nothing, or not by this user, or it is broken."""
    if (path := _path()) is None:
        return None
    with suppress(OSError, ValueError):
        about = path.stat()
        if about.st_size > MOST or (hasattr(os, "getuid") and about.st_uid != os.getuid()):
            return None
        kept = _Kept.model_validate_json(path.read_bytes())
        return kept.tables if kept.key == key else None
    return None


def save(key: str, tables: Tables) -> None:
    """Keep tables under a fingerprint, if that can be."""
    if (path := _path()) is not None:
        with suppress(OSError, UserError):
            write_whole(path, _Kept(key=key, tables=tables).model_dump_json().encode())


def _path() -> Path | None:
    """Return the file of this environment."""
    place = cache_folder()
    return None if place is None else place / f"plugins-{digest(sys.prefix)}.json"
