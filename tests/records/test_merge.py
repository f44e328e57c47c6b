import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from flats import filled

from sparsebench.errors import UserError
from sparsebench.records import files, store
from sparsebench.records.cell import canonical
from sparsebench.records.record import SCHEMA, Record
from sparsebench.records.store import merge

Make = Callable[..., Record]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


def content(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture
def stores(tmp_path: Path, make_record: Make) -> list[Path]:
    """Return three stores that share cells: newer and older, failed, and by an edited source."""
    written = {
        "a": [make_record(), make_record(repetition=1, status="failed", started=9), make_record(repetition=2)],
        "b": [make_record(repetition=1, started=3), make_record(started=5, value=0.25)],
        "c": [
            make_record(started=2, revision="b", status="failed"), make_record(repetition=2, started=1, revision="b"),
            make_record(repetition=3),
        ],
    }  # fmt: skip
    first, second, third = (filled(tmp_path / name, *records) for name, records in written.items())
    for out, name in ((first, "one"), (second, "two"), (third, "two")):
        files.write_whole(out / "environments" / f"{name}.json", f'"{name}"'.encode())
    files.write_whole(third / "checks" / "x.json", b"{}")
    files.write_whole(third / "weights" / "x.safetensors", b"")
    return [first, second, third]


def test_the_merged_store_reads_as_all_of_them(stores: list[Path], tmp_path: Path) -> None:
    number = merge(stores, tmp_path / "out")
    every = tmp_path / "every" / "records"
    every.mkdir(parents=True)
    for path in (path for each in stores for path in store.segments(each)):
        shutil.copy(path, every)
    assert store.read(tmp_path / "out") == store.read(tmp_path / "every")
    assert number == 6  # of two cells both sources stay
    assert set(content(tmp_path / "out")) == {"records/merged.parquet"}
    assert store.beside(tmp_path / "out", "environments") == {"one.json": '"one"', "two.json": '"two"'}
    assert store.beside(tmp_path / "out", "checks") == {"x.json": "{}"}


def test_the_same_records_give_the_same_bytes_in_any_order_and_in_parts(stores: list[Path], tmp_path: Path) -> None:
    merge(stores, tmp_path / "once")
    expected = content(tmp_path / "once")
    for k, order in enumerate(itertools.permutations(stores)):
        merge(order, tmp_path / f"order{k}")
        merge(order[:2], tmp_path / f"part{k}")
        merge([tmp_path / f"part{k}", order[2], order[0]], tmp_path / f"parts{k}")
        assert content(tmp_path / f"order{k}") == content(tmp_path / f"parts{k}") == expected


def test_published_records_survive(tmp_path: Path) -> None:
    merge([GOLDEN], tmp_path / "out")
    assert store.read(tmp_path / "out") == store.read(GOLDEN)


@pytest.mark.parametrize("what", ["a file in it", "a file"])
def test_what_is_there_is_not_written_over(stores: list[Path], tmp_path: Path, what: str) -> None:
    there = tmp_path / "there"
    (there / "x" if what == "a file in it" else there).parent.mkdir(exist_ok=True)
    (there / "x" if what == "a file in it" else there).write_text("mine")
    for out in (there, stores[0]):
        before = content(tmp_path)
        with pytest.raises(UserError, match="not written over; give another -o"):
            merge(stores, out)
        assert content(tmp_path) == before


def test_what_cannot_be_merged_leaves_nothing(stores: list[Path], tmp_path: Path, make_record: Make) -> None:
    with pytest.raises(UserError, match=r"no records in .*nowhere"):
        merge([*stores, tmp_path / "nowhere"], tmp_path / "out")
    newer = make_record().model_dump(mode="json") | {"schema_version": SCHEMA + 1}
    (stores[1] / "records" / "newer.jsonl").write_text(canonical(newer) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="upgrade sparsebench"):
        merge(stores, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        merge(stores[:1], tmp_path / "file" / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
