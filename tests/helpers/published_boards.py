"""The records of a published board."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc

from sparsebench.records import store, table
from sparsebench.records.record import Record

PUBLISHED = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"


def write_part(folder: Path, strategies: Sequence[str], tasks: Sequence[str] = ("composite",)) -> Path:
    """Write the records of some strategies on some tasks, and what describes them; return the folder."""
    rows = store.rows(PUBLISHED).filter(pc.field("strategy").isin(strategies) & pc.field("task").isin(tasks))
    table.write(folder / "records" / "some.parquet", rows, store.sidecars(PUBLISHED, *store.SIDECARS))
    return folder


def first_record(**values: object) -> Record:
    """Return a record with these values in the columns of its row."""
    rows = store.rows(PUBLISHED)
    for name, value in values.items():
        rows = rows.filter(pc.field(name) == value)
    return table.record_of(next(iter(table.rows_of(rows.slice(0, 1)))))


def write_board(folder: Path) -> None:
    """Write two sealed files of records of one task, and what describes them."""
    some = ("attn_topk", "tome", "noise", "random", "random_inside", "oracle", "anti_oracle")
    rows = store.rows(PUBLISHED)
    rows = rows.filter((pc.field("task") == "composite") & (pc.field("macs_ratio_asked") == 0.5))
    rows = rows.filter(pc.field("strategy").isin(some))
    beside = store.sidecars(PUBLISHED, *store.SIDECARS)
    for name, part in (("first", rows[:12]), ("second", rows[12:24])):
        table.write(folder / "records" / f"{name}.parquet", part, beside)
