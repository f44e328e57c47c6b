"""Records as files for other programs: one row a record; docs/reference/records.md says what the columns are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from sparsebench.collector import without_collector
from sparsebench.errors import UserError
from sparsebench.records import flat, merge, parquet, store
from sparsebench.records.record import Record
from sparsebench.text import cell


def write(out: Path, form: str, file: BinaryIO) -> None:
    """Write the records of a run's folder that count, in the order of their cells' hashes, to an open file.

    Args:
        out: the run's folder.
        form: one of FORMATS: "csv" and "parquet" have the flat columns of `flat.load`, "jsonl" the whole records.
        file: open for bytes.

    Raises:
        UserError: another format, no records, some by a later sparsebench, or no pyarrow for "parquet".
    """
    if form not in FORMATS:
        raise UserError("--format", got=f"'{form}'", allowed=FORMATS)
    FORMATS[form](out, file)


def _csv(out: Path, file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    writer = None
    for row in flat.load(out):
        if writer is None:
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(map(cell, row))
        writer.writerow(map(cell, row.values()))
    text.detach()


def _jsonl(out: Path, file: BinaryIO) -> None:
    with without_collector():
        places = ((each.claim, merge.Place(*each[1:4])) for each in store.scan_all(out, Record))
        newest = store.newest(places)
    if not newest:
        raise flat.nothing(out)
    for line in merge.lines(place for _, place in sorted(newest.items())):
        shown = line.decode()
        file.write(line if shown[:-1].isprintable() else (json.dumps(json.loads(line)) + "\n").encode())


def _parquet(out: Path, file: BinaryIO) -> None:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError("parquet needs pyarrow", next_step="pip install 'sparsebench[scale]'") from error
    table = parquet.table(out)
    if table is None:
        raise flat.nothing(out)
    pq.write_table(table.replace_schema_metadata(), file)


FORMATS: dict[str, Callable[[Path, BinaryIO], None]] = {"csv": _csv, "jsonl": _jsonl, "parquet": _parquet}
