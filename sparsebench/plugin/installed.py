"""Installed plugins, and where their sources lie, without importing anything of them."""

from __future__ import annotations

import logging
import os
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from sparsebench.plugin.hooks import PROJECT

log = logging.getLogger(__name__)

HIDDEN = "SPARSEBENCH_HIDE"
"""The variable that names distributions, or packages, with commas between them, whose plugins are left out."""


@lru_cache(64)
def _name_and_version(dist: metadata.Distribution) -> tuple[str, str]:
    """Return a distribution's name and version; each look at them parses its metadata anew, in a millisecond."""
    about = dist.metadata
    name, version = (str((about.get_all(key) or [""])[0]) for key in ("Name", "Version"))
    return name, version


def distribution(entry: metadata.EntryPoint) -> tuple[str, str]:
    """Return the name and the version of the distribution that brings an entry point; "" where there is none."""
    return _name_and_version(entry.dist) if entry.dist is not None else ("", "")


def module_of(entry: metadata.EntryPoint) -> str:
    """Return the module that an entry point names; "" where what it says is no module's name."""
    match = entry.pattern.match(entry.value)
    module = "" if match is None else str(match["module"])
    return module if all(part.isidentifier() for part in module.split(".")) else ""


def entries() -> dict[str, metadata.EntryPoint]:
    """Return the installed entry points by name; of two with one name the shipped one, else the first, counts."""
    known: dict[str, metadata.EntryPoint] = {}
    hidden = set(os.environ.get(HIDDEN, "").split(",")) - {""}
    present = (
        entry
        for entry in metadata.entry_points(group=PROJECT)
        if not {distribution(entry)[0], module_of(entry).partition(".")[0]} & hidden
    )
    for entry in sorted(present, key=lambda e: (e.name, not is_shipped(e))):
        first = known.setdefault(entry.name, entry)
        if first.value != entry.value:
            log.warning("plugin '%s' of %s is left out: its name is taken", entry.name, distribution(entry)[0] or "?")
    return known


def files_of(entry: metadata.EntryPoint) -> list[Path]:
    """Return the Python files of the package, or the one module, in which an entry point lies; none is imported."""
    name = module_of(entry).partition(".")[0]
    specs = (finder.find_spec(name, None) for finder in sys.meta_path if name)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return []
    if spec.submodule_search_locations is not None:
        return sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []


def is_shipped(entry: metadata.EntryPoint) -> bool:
    """Say whether an entry point is of sparsebench's own."""
    return distribution(entry)[0] == PROJECT
