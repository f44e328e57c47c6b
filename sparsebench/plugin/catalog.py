"""What plugins of others say of themselves, kept from one list to the next: to load them may take seconds.

The file lies in the user's cache folder, see `sources.cache.folder`, and may be removed at any time. It is named by the
contents of what is installed, so that it is of no use when that changes.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError
from sparsebench.plugin.installed import files_of, strangers
from sparsebench.records.cell import digest
from sparsebench.records.store import content_hash, write_whole
from sparsebench.sources.cache import folder
from sparsebench.version import __version__

MOST = 2**22
"""Bytes of a file that is read."""
Tables = dict[str, list[dict[str, Any]]]


class _Kept(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    tables: Tables


def fingerprint() -> str:
    """Return a digest of the installed plugins of others, with all their modules; "" if there are none."""
    about = [
        [entry.name, entry.value, getattr(entry.dist, "name", ""), getattr(entry.dist, "version", ""),
         [[str(path), content_hash(path)] for path in files_of(entry)]]
        for entry in strangers()
    ]  # fmt: skip
    return digest([about, __version__, sys.version]) if about else ""


def load(key: str) -> Tables | None:
    """Return what was kept under a fingerprint; None if there is nothing, or not by this user, or it is broken."""
    if (path := _path(key)) is None:
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
    if (path := _path(key)) is not None:
        with suppress(OSError, UserError):
            write_whole(path, _Kept(key=key, tables=tables).model_dump_json().encode())


def _path(key: str) -> Path | None:
    place = folder()
    return None if place is None else place / f"plugins-{key}.json"
