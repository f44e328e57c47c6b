"""What the source of a strategy that comes with sparsebench says of it, read without running it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

from sparsebench.plugin.installed import shipped_source
from sparsebench.records.origin import Origin
from sparsebench.records.record import Record


def other_revision(name: str, origin: Origin) -> str | None:
    """Return how what has the name of a shipped strategy is not that of here, or None."""
    path = shipped_source(name)
    if path is None or (origin.is_shipped and origin.revision == str(declared(path, name).get("revision", 1))):
        return None
    return f"strategy '{name}' comes with sparsebench, and this is another revision than the one here"


def other_kind(record: Record) -> str | None:
    """Return how the kind of a record is not what the shipped source of its strategy says, or None."""
    name = record.cell.strategy.name
    path = shipped_source(name)
    if path is None or other_revision(name, record.origin):
        return None
    kind = declared(path, name).get("kind", "deployable")
    if record.kind == kind:
        return None
    return f"its kind is {record.kind}, and the source of '{name}' says {kind}"


@cache
def declared(path: Path, name: str) -> dict[str, Any]:
    """Return the constants that the class of a strategy in a source declares, by name; none where it is not there."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ClassDef):
            said = {
                target.id: one.value.value
                for one in node.body
                if isinstance(one, ast.AnnAssign | ast.Assign) and isinstance(one.value, ast.Constant)
                for target in (one.targets if isinstance(one, ast.Assign) else [one.target])
                if isinstance(target, ast.Name)
            }
            if said.get("name") == name:
                return said
    return {}
