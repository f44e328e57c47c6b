"""Records as flat rows: what boards and exports are made of."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from sparsebench.board import compact
from sparsebench.board.badges import Badges
from sparsebench.errors import UserError
from sparsebench.sweep import store
from sparsebench.sweep.record import Record
from sparsebench.testing import stored

Row = dict[str, Any]


def load(out: Path, metrics: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the records of a run's folder, flat, in the order of their cells' hashes.

    All rows have the same keys: what `compact.row_of` says of a record, then the metrics by name, those of `metrics`
    or all, None for what a record has not; then, where outcomes of checks are stored, its badge. Where pyarrow is
    there, large stores are read from a cache of them.

    Raises:
        UserError: the folder holds no records, or some by a later sparsebench.
    """
    table = compact.table(out, metrics) if compact.worth(out) else None
    rows = Badges(stored.read(out)).marked(_from_records(out, metrics) if table is None else compact.rows(table))
    first = next(rows, None)
    if first is None:
        raise nothing(out)
    yield first
    yield from rows


def nothing(out: Path) -> UserError:
    """Return the error for a folder without records."""
    return UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")


def _from_records(out: Path, metrics: Collection[str] | None) -> Iterator[Row]:
    shared: dict[Any, Any] = {}
    found = (
        (found.claim, _slim(compact.row_of(found.item), found.item, metrics, shared))
        for found in store.scan_all(out, Record)
    )
    with store.uncollected():
        newest = store.newest(found)
    names = sorted({name for _, own in newest.values() for name in own})
    empty = dict.fromkeys(names)
    for _, (about, own) in sorted(newest.items()):
        yield about | empty | own


def _slim(row: Row, record: Record, metrics: Collection[str] | None, shared: dict[Any, Any]) -> tuple[Row, Row]:
    """Return what a row is about and its wanted metrics, apart; equal texts share one object."""
    about = {name: shared.setdefault(x, x) if type(x) is str else x for name, x in row.items()}
    return about, {name: metric.value for name, metric in record.metrics.items() if metrics is None or name in metrics}
