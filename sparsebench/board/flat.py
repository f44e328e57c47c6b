"""The flat rows of a run's folder: one by one, or as a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from sparsebench.board import compact
from sparsebench.board.badges import CHECKS, REMARK, UNCHECKED, Badges
from sparsebench.board.entries import HOW, TRAINED, VERIFIED
from sparsebench.board.rows import Row, row_of
from sparsebench.errors import UserError
from sparsebench.publish.folder import MANIFEST
from sparsebench.sweep import described, store
from sparsebench.sweep.record import Record
from sparsebench.testing import stored


def load(out: Path, metrics: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the records of a run's folder, flat, in the order of their cells' hashes.

    All rows have the same keys: what `rows.row_of` says of a record, then the metrics by name, those of `metrics`
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


def frame(out: Path, metrics: Collection[str] | None = None) -> pd.DataFrame:
    """Return the rows of `load` as a table, with a column that says whether their strategy is trained.

    Columns of texts that are all different, such as predictions, are read as they are looked at where there is a cache.

    Raises:
        UserError: as `load`.
    """
    table = compact.table(out, metrics) if compact.worth(out) else None
    found = pd.DataFrame(list(_from_records(out, metrics))) if table is None else compact.frame(table)
    if found.empty:
        raise nothing(out)
    return marked(found, out)


def marked(found: pd.DataFrame, out: Path) -> pd.DataFrame:
    """Return records with what a run's folder says of their strategies: badge, remarks, whether trained, and how."""
    badges, known = Badges(stored.read(out)), described.strategies(out)
    grouped = found.groupby(["strategy", "sha256"], observed=True, sort=False)
    said, (submitted, badge) = [], _verified(out)
    for label, sha256 in grouped.groups:
        name = label.partition("(")[0]
        about = known.get((name, sha256))
        trained = "" if about is None else "yes" if about.trained else "no"
        checked = badges.of(label, sha256) if badges else (UNCHECKED, "")
        how = "" if about is None else described.how_of_label(about.how, label)
        said.append((*checked, trained, badge if name == submitted else "", how))
    number = grouped.ngroup()
    named = zip((CHECKS, REMARK, TRAINED, VERIFIED, HOW), zip(*said, strict=True), strict=True)
    return found.assign(**{name: pd.Categorical(values).take(number) for name, values in named})


def _verified(out: Path) -> tuple[str, str]:
    """Return whose submission a folder is and its badge, as far as its own records bear it; "" of any other folder."""
    if not (out / MANIFEST).is_file():
        return "", ""
    from sparsebench.publish.verify import verify

    verdict = verify(out)
    return verdict.strategy, verdict.badge


def nothing(out: Path) -> UserError:
    """Return the error for a folder without records."""
    return UserError(f"no records in {out}", next_step="run `sparsebench run --out` with this folder first")


def _from_records(out: Path, metrics: Collection[str] | None) -> Iterator[Row]:
    shared: dict[Any, Any] = {}
    found = (
        (found.claim, _slim(row_of(found.item), found.item, metrics, shared)) for found in store.scan_all(out, Record)
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
