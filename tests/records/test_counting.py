"""Which of several records of a cell counts: in one folder, in several that are merged, of any age."""

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from flats import filled, rows_in

from sparsebench import files
from sparsebench.errors import UserError
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.records.store import merge

Make = Callable[..., Record]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


def by_hand(all_of_a_cell: list[Record]) -> Record:
    """Return what counts: of each source the newest success, or else failure; of these the newest."""
    each = []
    for revision in {r.origin.revision for r in all_of_a_cell}:
        own = [r for r in all_of_a_cell if r.origin.revision == revision]
        good = [r for r in own if r.status == "ok"]
        each.append(max(good or own, key=lambda r: r.started))
    return max(each, key=lambda r: r.started)


def test_what_counts_depends_on_no_order_sealed_or_not(tmp_path: Path, make_record: Make) -> None:
    draw = random.Random(0)
    for trial in range(20):
        out, statuses = tmp_path / str(trial), ["ok", "failed", "oom"]
        written = [
            make_record(started=k, revision=draw.choice("ab"), status=draw.choice(statuses))
            for k in range(draw.randint(2, 4))
        ]
        for each in draw.sample(written, len(written)):
            filled(out, each)
            if draw.random() < 0.3:
                store.seal(out)
        assert list(store.read(out).values()) == [by_hand(written)]
        assert len(store.rows(out, counted=False)) == len(written)


def test_records_of_one_moment_count_by_what_they_say(tmp_path: Path, make_record: Make) -> None:
    winners = set()
    for k, order in enumerate(itertools.permutations(make_record(value=k / 4) for k in range(4))):
        (winner,) = store.read(filled(tmp_path / str(k), *order)).values()
        winners.add(winner.metrics["accuracy"].value)
    assert len(winners) == 1


def test_records_of_all_ages_give_the_rows_that_they_gave() -> None:
    """Lines of published stores since the first; a key more in a row is no change, one that differs or is gone is."""
    rows = rows_in(GOLDEN)
    golden = json.loads((GOLDEN / "rows.json").read_text(encoding="utf-8"))
    assert len(rows) == len(golden) == 17
    for row, before in zip(rows, golden, strict=True):
        assert {key: row.get(key) for key in before} == before
    assert {row["task"] for row in golden} == {"theory", "plain", "composite", "spurious"}


def content(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.fixture
def stores(tmp_path: Path, make_record: Make) -> list[Path]:
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
    assert store.sidecars(tmp_path / "out", "environments") == {
        "environments/o.json": '"one"',
        "environments/t.json": '"two"',
    }
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
        (stores, tmp_path / "file", "already exists .*; give another -o"),
        (stores, stores[0], "already exists .*; give another -o"),
        ([*stores, tmp_path / "nowhere"], tmp_path / "out", "no records in .*nowhere"),
        (stores, tmp_path / "file" / "out", "cannot write"),
    ):
        with pytest.raises(UserError, match=said):
            merge(given, out)
        assert content(tmp_path) == before
    assert merge(stores, tmp_path / "empty") == 6
