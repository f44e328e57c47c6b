"""Stores that are merged: the union of what they hold, as the same bytes in any order."""

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from flats import filled

from sparsebench.errors import UserError
from sparsebench.records import files, store
from sparsebench.records.record import Record
from sparsebench.records.store import merge

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


def content(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture
def stores(tmp_path: Path, make_record: Callable[..., Record]) -> list[Path]:
    """Return three stores that share cells: newer and older, failed, and by an edited source."""
    written = {
        "one": [make_record(), make_record(repetition=1, status="failed", started=9), make_record(repetition=2)],
        "two": [make_record(repetition=1, started=3), make_record(started=5, value=0.25)],
        "three": [
            make_record(started=2, revision="b", status="failed"), make_record(repetition=2, started=1, revision="b"),
            make_record(repetition=3),
        ],
    }  # fmt: skip
    for name, records in written.items():
        files.write_whole(filled(tmp_path / name, *records) / "environments" / f"{name[0]}.json", f'"{name}"'.encode())
    files.write_whole(tmp_path / "three" / "weights" / "x.safetensors", b"")
    return [tmp_path / name for name in written]


def test_the_merged_store_reads_as_all_of_them(stores: list[Path], tmp_path: Path) -> None:
    every = tmp_path / "every" / "records"
    every.mkdir(parents=True)
    for path in (path for each in stores for path in store.segments(each)):
        shutil.copy(path, every)
    assert merge(stores, tmp_path / "out") == 6  # of two cells both sources stay
    assert store.read(tmp_path / "out") == store.read(tmp_path / "every")
    assert set(content(tmp_path / "out")) == {"records/merged.parquet"}
    assert store.beside(tmp_path / "out", "environments") == {"o.json": '"one"', "t.json": '"two"'}
    merge([GOLDEN], tmp_path / "published")
    assert store.read(tmp_path / "published") == store.read(GOLDEN)


def test_the_same_records_give_the_same_bytes_in_any_order_and_in_parts(stores: list[Path], tmp_path: Path) -> None:
    merge(stores, tmp_path / "once")
    expected = content(tmp_path / "once")
    for k, order in enumerate(itertools.permutations(stores)):
        merge(order, tmp_path / f"order{k}")
        merge(order[:2], tmp_path / f"part{k}")
        merge([tmp_path / f"part{k}", order[2], order[0]], tmp_path / f"parts{k}")
        assert content(tmp_path / f"order{k}") == content(tmp_path / f"parts{k}") == expected


def test_nothing_is_written_over_and_what_cannot_be_merged_leaves_nothing(stores: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    before = content(tmp_path)
    for given, out, said in (
        (stores, tmp_path / "file", "not written over; give another -o"),
        (stores, stores[0], "not written over; give another -o"),
        ([*stores, tmp_path / "nowhere"], tmp_path / "out", "no records in .*nowhere"),
        (stores, tmp_path / "file" / "out", "cannot write"),
    ):
        with pytest.raises(UserError, match=said):
            merge(given, out)
        assert content(tmp_path) == before
    assert merge(stores, tmp_path / "empty") == 6
