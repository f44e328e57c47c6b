"""Records as files for other programs: one row a record; docs/reference/records.md says what the columns are."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sparsebench.errors import UserError
from sparsebench.records import checks, store, table
from sparsebench.records.cell import canonical
from sparsebench.records.checks import Badges
from sparsebench.text import cell


def write(out: Path, form: str, file: BinaryIO) -> None:
    """Write the records of a run's folder that count to an open file.

    Args:
        out: the run's folder.
        form: one of FORMATS: "csv" has the plain columns and the metrics, "parquet" all columns of a sealed file,
            "jsonl" the whole records.
        file: open for bytes.

    Raises:
        UserError: another format, no records, or some by a later sparsebench.
    """
    if form not in FORMATS:
        raise UserError("--format", got=f"'{form}'", allowed=FORMATS)
    FORMATS[form](out, file)


def _csv(out: Path, file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    plain = (*table.TEXTS, *table.COUNTS, *table.REALS, "memory")
    whole = store.rows(out, lambda name: name in plain or table.is_metric(name)).sort_by("cell_id")
    names = [*plain, *sorted(set(filter(table.is_metric, whole.column_names)))]
    rows = Badges(checks.read(out)).mark(table.rows_of(whole.select(names)))
    writer = None
    for row in rows:
        if writer is None:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(map(cell, row))
        writer.writerow(map(cell, row.values()))
    text.detach()


def _jsonl(out: Path, file: BinaryIO) -> None:
    records = store.read(out)
    if not records:
        raise store.nothing(out)
    for _, record in sorted(records.items()):
        file.write(canonical(record.model_dump(mode="json")).encode("ascii", "backslashreplace") + b"\n")


def _parquet(out: Path, file: BinaryIO) -> None:
    import pyarrow.parquet as pq

    pq.write_table(store.rows(out).sort_by("cell_id").replace_schema_metadata(), file)


FORMATS: dict[str, Callable[[Path, BinaryIO], None]] = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet}
