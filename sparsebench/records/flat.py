"""The flat rows of a run's folder: one by one, or as a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sparsebench.collector import without_collector
from sparsebench.errors import UserError
from sparsebench.records import checks, parquet, store
from sparsebench.records.badges import Badges
from sparsebench.records.record import Record
from sparsebench.records.row import Row, checked_names, metrics_of, row_of


def load(out: Path, metrics: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the records of a run's folder, flat, in the order of their cells' hashes.

    All rows have the same keys: what `rows.row_of` says of a record, then the metrics by name, those of `metrics`
    or all, None for what a record has not; then, where outcomes of checks are stored, its badge. Where pyarrow is
    there, large stores are read from a cache of them.

    Raises:
        UserError: the folder holds no records, or some by a later sparsebench.
    """
    cached = _from_cache(out, metrics)
    rows = Badges(checks.read(out)).mark(_from_records(out, metrics) if cached is None else parquet.rows(cached))
    first = next(rows, None)
    if first is None:
        raise nothing(out)
    yield first
    yield from rows


def table(out: Path, metrics: Collection[str] | None = None) -> pd.DataFrame:
    """Return the rows of `load` as a table, without badges.

    Columns of texts that are all different, such as predictions, are read as they are looked at where there is a cache.

    Raises:
        UserError: as `load`.
    """
    cached = _from_cache(out, metrics)
    rows = pd.DataFrame(list(_from_records(out, metrics))) if cached is None else parquet.frame(cached)
    if rows.empty:
        raise nothing(out)
    return rows


def nothing(out: Path) -> UserError:
    """Return the error for a folder without records."""
    return UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")


def _from_cache(out: Path, metrics: Collection[str] | None) -> Any:
    """Return the cache's table of the records, or None where there is none or the store is small."""
    return parquet.table(out, metrics) if parquet.worth(out) else None


def _from_records(out: Path, metrics: Collection[str] | None) -> Iterator[Row]:
    shared: dict[Any, Any] = {}
    stored = (
        (stored.claim, _slim(row_of(stored.item), stored.item, metrics, shared))
        for stored in store.scan_all(out, Record)
    )
    with without_collector():
        newest = store.newest(stored)
    empty = dict.fromkeys(checked_names(name for _, values in newest.values() for name in values))
    for _, (about, values) in sorted(newest.items()):
        yield about | empty | values


def _slim(row: Row, record: Record, metrics: Collection[str] | None, shared: dict[Any, Any]) -> tuple[Row, Row]:
    """Return what a row is about and its wanted metrics, apart; equal texts share one object."""
    about = {name: shared.setdefault(x, x) if type(x) is str else x for name, x in row.items()}
    named = metrics_of(record, row)
    return about, {name: metric.value for name, metric in named.items() if metrics is None or name in metrics}
