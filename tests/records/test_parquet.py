"""The cache of a large store: what is read from it is what the records say, whatever happens to it."""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparsebench.board.build import build
from sparsebench.board.entries import METRICS
from sparsebench.errors import UserError
from sparsebench.records import flat, parquet, store
from sparsebench.records.cell import canonical
from sparsebench.records.record import SCHEMA

pytest.importorskip("pyarrow")
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store of five segments, each of which is large enough for a cache."""
    monkeypatch.setattr(parquet, "UNREAD", 1)
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    return tmp_path


def from_records(out: Path) -> list[dict[str, Any]]:
    return list(flat._from_records(out, None))


def lines(out: Path) -> dict[str, list[bytes]]:
    return {path.name: path.read_bytes().splitlines(keepends=True) for path in store.segments(out)}


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the lines that are parsed from now on."""
    seen: list[bytes] = []
    real = store.parse
    monkeypatch.setattr(store, "parse", lambda line, kind: seen.append(line) or real(line, kind))
    return seen


def test_rows_are_those_of_the_records(out: Path) -> None:
    expected = from_records(out)
    assert len(expected) == 17
    for _ in range(2):
        found = list(flat.load(out))
        assert found == expected and [list(row) for row in found] == [list(row) for row in expected]
        assert parquet.path_of(out).exists()
    assert list(flat.load(out, METRICS)) == list(flat._from_records(out, METRICS))
    assert build(flat.load(out, METRICS)) == build(expected)


def test_nothing_is_parsed_twice(out: Path, parsed: list[bytes]) -> None:
    list(flat.load(out))
    assert sorted(parsed) == sorted(line for segment in lines(out).values() for line in segment)
    parsed.clear()
    list(flat.load(out, METRICS))
    assert parsed == []
    new = store.parse(lines(GOLDEN)["20261121T212826.jsonl"][0], store.Record)
    cell = new.cell.model_copy(update={"repetition": 99})
    writer = store.Writer(out)
    writer.append(new.model_copy(update={"cell": cell, "cell_id": cell.id}))
    writer.close()
    parsed.clear()
    assert cell.id in {row["cell_id"] for row in flat.load(out)} and len(parsed) == 1
    assert list(flat.load(out)) == from_records(out)


def test_small_stores_have_no_cache(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert list(flat.load(out)) == from_records(out) and not (out / "cache").exists()


def edited_in_place(out: Path) -> None:
    """Change a digit: neither size nor time say so."""
    path = store.segments(out)[0]
    before, content = path.stat(), path.read_bytes()
    at = content.index(b'"seconds":') + len(b'"seconds":')
    path.write_bytes(content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns


def shortened(out: Path) -> None:
    path = store.segments(out)[1]
    path.write_bytes(path.read_bytes().splitlines(keepends=True)[0])


def removed(out: Path) -> None:
    store.segments(out)[2].unlink()


def torn(out: Path) -> None:
    path = parquet.path_of(out)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(out: Path) -> None:
    """Change bits in the middle of the columns."""
    path = parquet.path_of(out)
    content = bytearray(path.read_bytes())
    for at in range(200, len(content) // 2, 50):
        content[at] ^= 0xFF
    path.write_bytes(bytes(content))


def foreign(out: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"cell_id": ["x"]}), parquet.path_of(out))


def of_another_store(out: Path) -> None:
    shutil.copytree(out, out / "other", ignore=shutil.ignore_patterns("cache", "other"))
    path = store.segments(out / "other")[0]
    path.write_bytes(path.read_bytes().replace(b'"seconds":', b'"seconds":1'))
    list(flat.load(out / "other"))
    shutil.copy(parquet.path_of(out / "other"), parquet.path_of(out))


def of_another_version(out: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(parquet.path_of(out))
    manifest = json.loads(table.schema.metadata[parquet.MANIFEST]) | {"code": "another"}
    wrong = table.drop_columns(["seconds"]).replace_schema_metadata({parquet.MANIFEST: json.dumps(manifest)})
    pq.write_table(wrong, parquet.path_of(out))


@pytest.mark.parametrize(
    "happens",
    [edited_in_place, shortened, removed, torn, flipped, foreign, of_another_store, of_another_version],
)
def test_a_cache_that_does_not_hold_is_not_taken(out: Path, happens: Callable[[Path], None]) -> None:
    list(flat.load(out))
    happens(out)
    expected = from_records(out)
    assert list(flat.load(out, METRICS)) == list(flat._from_records(out, METRICS))
    assert list(flat.load(out)) == expected


LATER, LATEST = "2026-11-22T00:00:00+00:00", "2026-11-22T01:00:00+00:00"


def test_the_newest_counts_across_cache_and_new_segments(out: Path) -> None:
    list(flat.load(out))
    raw = json.loads(lines(out)["20261121T212826.jsonl"][0])
    for k, (started, status) in enumerate([(LATER, "ok"), (LATEST, "failed"), ("2020-01-01T00:00:00+00:00", "ok")]):
        own = raw | {"started": started, "status": status, "seconds": float(k)}
        (out / "records" / f"{k}.jsonl").write_text(canonical(own) + "\n", encoding="utf-8")
    (found,) = (row for row in flat.load(out) if row["cell_id"] == raw["cell_id"])
    assert (found["started"], found["seconds"]) == (LATER, 0.0)
    assert list(flat.load(out)) == from_records(out)


def test_what_is_left_out_is_said_each_time(out: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = store.segments(out)[0]
    path.write_bytes(b"{}\n" + path.read_bytes() + b"torn")
    said = []
    for read in (from_records, flat.load, flat.load):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            list(read(out))
        said.append(sorted(caplog.messages))
    assert len(said[0]) == 2 and said[0] == said[1] == said[2]


def test_newer_records_are_refused(out: Path) -> None:
    list(flat.load(out))
    raw = json.loads(lines(out)["20261121T212826.jsonl"][0]) | {"schema_version": SCHEMA + 1}
    (out / "records" / "new.jsonl").write_text(canonical(raw) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"new\.jsonl line 1 has schema version .* upgrade sparsebench"):
        list(flat.load(out))


def test_a_folder_that_cannot_be_written_is_read_without_a_cache(out: Path) -> None:
    (out / "cache").write_text("where the folder should be")
    assert list(flat.load(out)) == from_records(out)


def test_a_pyarrow_that_runs_code_from_files_reads_none(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow

    expected = list(flat.load(out))
    assert parquet.worth(out)
    for version, safe in (("9.0.0", False), ("14.0.0", False), ("14.0.1", True), ("15.0.0.dev3", True)):
        monkeypatch.setattr(pyarrow, "__version__", version)
        assert parquet.worth(out) == safe
    assert list(flat.load(out)) == expected


def test_without_pyarrow_everything_is_read_from_the_records(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = list(flat.load(out))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert not parquet.worth(out) and list(flat.load(out)) == expected


def test_a_folder_without_records_is_the_users_mistake(out: Path) -> None:
    shutil.rmtree(out / "records")
    (out / "cache").mkdir()
    parquet.path_of(out).write_bytes(b"")
    with pytest.raises(UserError, match="no records"):
        list(flat.load(out))
