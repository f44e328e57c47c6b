"""The records of a published board."""

from pathlib import Path

import pyarrow.compute as pc

from sparsebench.records import store, table

PUBLISHED = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"


def write_board(folder: Path) -> None:
    """Write two sealed files of records of one task, and what describes them."""
    rows = store.rows(PUBLISHED)
    rows = rows.filter((pc.field("task") == "composite") & (pc.field("macs_ratio_asked") == 0.5))
    beside = store.sidecars(PUBLISHED, *store.SIDECARS)
    for name, part in (("first", rows[:12]), ("second", rows[12:24])):
        table.write(folder / "records" / f"{name}.parquet", part, beside)
