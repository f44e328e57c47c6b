"""Records as files for other programs, and what is said of their columns."""

import csv
import io
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from flats import rows_in

from sparsebench.errors import UserError
from sparsebench.records import export, store, table

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "store"


def exported(form: str, out: Path = GOLDEN) -> bytes:
    file = io.BytesIO()
    export.write(out, form, file)
    return file.getvalue()


def test_each_format_has_all_records_that_count() -> None:
    rows = list(csv.DictReader(io.StringIO(exported("csv").decode())))
    for row, expected in zip(rows, rows_in(GOLDEN), strict=True):
        assert row == {key: "" if expected[key] is None else str(expected[key]) for key in row}
    assert {"cell_id", "strategy", "budget", "revision", "accuracy", "accuracy.low", "macs_ratio"} <= set(rows[0])
    assert pq.read_table(io.BytesIO(exported("parquet"))).to_pylist() == rows_in(GOLDEN)
    lines = exported("jsonl").splitlines()
    assert [store.parse(line) for line in lines] == [record for _, record in sorted(store.read(GOLDEN).items())]


@pytest.mark.parametrize("form", export.FORMATS)
def test_the_same_records_give_the_same_file_sealed_or_not(form: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    store.seal(tmp_path)
    made = [exported(form), exported(form, tmp_path)]
    if form == "parquet":  # whose dictionaries have an order of their own
        made = [pq.read_table(io.BytesIO(content)).to_pylist() for content in made]
    assert made[0] == made[1]


@pytest.mark.parametrize("form", export.FORMATS)
def test_no_records_and_another_format_are_the_users_mistake(form: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no records"):
        exported(form, tmp_path)
    with pytest.raises(UserError, match="--format; got 'xlsx'; allowed: csv, jsonl, parquet"):
        exported("xlsx")


def test_every_column_is_described() -> None:
    """Each in a line of docs/reference/records.md that begins a table row with it; a metric with its unit."""
    text = (ROOT / "docs" / "reference" / "records.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| `")]
    cells = {row[1]: row[2] for row in rows}
    columns = pq.read_table(io.BytesIO(exported("parquet"))).column_names
    assert not [name for name in columns if not table.is_metric(name) and f"`{name}`" not in cells]
    for record in store.read(GOLDEN).values():
        for name, metric in record.metrics.items():
            name = name.split(": ")[0] + ": GROUP" if ": " in name else name
            assert cells[f"`{name}`"] == metric.unit, name
