"""Reports beside the records that they vouch for: OUT/checks/<hash>.json, one a strategy, revision and sparsebench.

Reading them imports no torch: the board is made of them and of records.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sparsebench.records import files, store
from sparsebench.records.cell import canonical
from sparsebench.records.files import write_whole
from sparsebench.records.report import SCHEMA, Report


def write(report: Report, out: Path) -> Path:
    """Write a report into a results folder, in place of an earlier one of the same version; it is there whole or not.

    Raises:
        UserError: the folder cannot be written.
    """
    about = [report.strategy, report.params, report.origin.revision, report.versions.get("sparsebench", "")]
    path = out / "checks" / f"{hashlib.sha256(canonical(about).encode()).hexdigest()[:16]}.json"
    write_whole(path, (canonical(report.model_dump(mode="json")) + "\n").encode())
    return path


def read(out: Path) -> list[Report]:
    """Return the reports of a results folder; those that cannot be read are left out with a warning."""
    reports = []
    for name, content in store.beside(out, "checks").items():
        try:
            reports.append(_parse(content))
        except (ValueError, RecursionError) as error:
            files.leave_out(Path(name), error)
    return reports


def _parse(content: str) -> Report:
    raw = json.loads(content)
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA:
        raise ValueError(f"schema version {version!r}, this sparsebench reads {SCHEMA}")
    return Report.model_validate(raw)
