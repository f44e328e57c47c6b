"""What the source of a strategy that comes with sparsebench says of it, read without running it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from sparsebench.plugin.installed import shipped_source
from sparsebench.records.files import content_hash
from sparsebench.records.origin import Origin
from sparsebench.records.record import Record


def other_source(name: str, origin: Origin) -> str | None:
    """Return how a source that has the name of a shipped strategy is none that is shipped here, or None."""
    path = shipped_source(name)
    if path is None or (origin.is_shipped and origin.revision == content_hash(path)):
        return None
    return f"strategy '{name}' comes with sparsebench, and this is another source than the one here"


def other_kind(record: Record) -> str | None:
    """Return how the kind of a record is not what the shipped source of its strategy says, or None."""
    name = record.cell.strategy.name
    path = shipped_source(name)
    if path is None or other_source(name, record.origin) or record.kind == (kind := _kind(path, name)):
        return None
    return f"its kind is {record.kind}, and the source of '{name}' says {kind}"


@cache
def _kind(path: Path, name: str) -> str:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ClassDef):
            said = {
                one.target.id: one.value.value
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                and isinstance(one.value, ast.Constant)
            }  # fmt: skip
            if said.get("name") == name:
                return str(said.get("kind", "deployable"))
    return "deployable"
