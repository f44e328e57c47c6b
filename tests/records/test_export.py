import csv
import io
import sys
from pathlib import Path

import pytest

from sparsebench.errors import UserError
from sparsebench.records import export, flat, store
from sparsebench.records.row import row_of

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "store"


def exported(form: str, out: Path = GOLDEN) -> bytes:
    file = io.BytesIO()
    export.write(out, form, file)
    return file.getvalue()


def test_csv_has_a_row_a_record_and_a_column_a_fact() -> None:
    rows = list(csv.DictReader(io.StringIO(exported("csv").decode())))
    expected = list(flat.load(GOLDEN))
    assert [list(row) for row in rows] == [list(row) for row in expected]
    assert rows == [{key: "" if x is None else str(x) for key, x in row.items()} for row in expected]


def test_parquet_has_the_same_with_units() -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pq.read_table(io.BytesIO(exported("parquet")))
    assert table.to_pylist() == list(flat.load(GOLDEN))
    units = {field.name: field.metadata[b"unit"] for field in table.schema if field.metadata}
    assert (units["accuracy"], units["macs"], units["images_per_s"]) == (b"fraction", b"MACs", b"images/s")


def test_jsonl_has_the_whole_records() -> None:
    lines = exported("jsonl").splitlines()
    assert [store.parse(line) for line in lines] == [record for _, record in sorted(store.read(GOLDEN).items())]


@pytest.mark.parametrize("form", export.FORMATS)
def test_the_same_records_give_the_same_bytes(form: str) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    assert exported(form) == exported(form)


@pytest.mark.parametrize("form", export.FORMATS)
def test_a_folder_without_records_is_the_users_mistake(form: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no records|needs pyarrow"):
        exported(form, tmp_path)


def test_another_format_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="--format; got 'xlsx'; allowed: csv, jsonl, parquet"):
        exported("xlsx")


def test_parquet_without_pyarrow_is_refused_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"needs pyarrow; pip install 'sparsebench\[scale\]'"):
        exported("parquet")


def test_every_column_is_described() -> None:
    """Each in a line of docs/reference/records.md that begins a table row with it; a metric with its unit."""
    text = (ROOT / "docs" / "reference" / "records.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| `")]
    cells = {row[1]: row[2] for row in rows}
    for record in store.read(GOLDEN).values():
        assert all(f"`{name}`" in cells for name in row_of(record))
        for name, metric in record.metrics.items():
            name = name.split(": ")[0] + ": GROUP" if ": " in name else name
            assert cells[f"`{name}`"] == metric.unit, name
