"""Records as files for other programs, and what is said of their columns."""

import csv
import io
from pathlib import Path

import pyarrow.parquet as pq
from click.testing import CliRunner
from flats import rows_in

from sparsebench.cli import main
from sparsebench.records import store, table

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "store"


def exported(form: str, to: Path, out: Path = GOLDEN) -> bytes:
    done = CliRunner().invoke(main, ["export", str(out), "--format", form, "-o", str(to)])
    assert done.exit_code == 0, done.output
    return to.read_bytes()


def test_each_format_has_all_records_that_count(tmp_path: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(exported("csv", tmp_path / "a").decode())))
    for row, expected in zip(rows, rows_in(GOLDEN), strict=True):
        assert row == {key: "" if expected[key] is None else str(expected[key]) for key in row}
    assert {"cell_id", "strategy", "budget", "revision", "accuracy", "accuracy.low", "macs_ratio"} <= set(rows[0])
    table_ = pq.read_table(io.BytesIO(exported("parquet", tmp_path / "b")))
    assert table_.to_pylist() == [{name: row.get(name) for name in table_.column_names} for row in rows_in(GOLDEN)]
    lines = exported("jsonl", tmp_path / "c").splitlines()
    assert [store.parse(line) for line in lines] == [record for _, record in sorted(store.read(GOLDEN).items())]


def test_every_column_is_described(tmp_path: Path) -> None:
    """Each in a line of docs/reference/records.md that begins a table row with it; a metric with its unit."""
    text = (ROOT / "docs" / "reference" / "records.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| `")]
    cells = {row[1]: row[2] for row in rows}
    columns = pq.read_table(io.BytesIO(exported("parquet", tmp_path / "a"))).column_names
    assert not [name for name in columns if not table.is_metric(name) and f"`{name}`" not in cells]
    for record in store.read(GOLDEN).values():
        for name, metric in record.metrics.items():
            name = name.split(": ")[0] + ": GROUP" if ": " in name else name
            assert cells[f"`{name}`"] == metric.unit, name
