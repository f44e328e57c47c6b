"""Which of several records of a cell counts, and what older and newer versions wrote."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flats import rows_in

from sparsebench.engine import run
from sparsebench.errors import UserError
from sparsebench.records import store
from sparsebench.records.cell import canonical
from sparsebench.records.record import SCHEMA, Record

Make = Callable[..., Record]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


def segment(out: Path, name: str, *written: Record | dict[str, Any]) -> Path:
    path = out / "records" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    raws = (each if isinstance(each, dict) else each.model_dump(mode="json") for each in written)
    path.write_text("".join(canonical(raw) + "\n" for raw in raws), encoding="utf-8")
    return path


def by_hand(all_of_a_cell: list[Record]) -> Record:
    """Return what counts: of each source the newest success, or else failure; of these the newest."""
    each = []
    for revision in {r.origin.revision for r in all_of_a_cell}:
        own = [r for r in all_of_a_cell if r.origin.revision == revision]
        good = [r for r in own if r.status == "ok"]
        each.append(max(good or own, key=lambda r: r.started))
    return max(each, key=lambda r: r.started)


def test_what_counts_depends_on_no_order(tmp_path: Path, make_record: Make) -> None:
    draw = random.Random(0)
    for trial in range(40):
        written = [
            make_record(started=k, revision=draw.choice("ab"), status=draw.choice(["ok", "failed", "crashed"]))
            for k in range(4)
        ]
        draw.shuffle(written)
        out = tmp_path / str(trial)
        for k, each in enumerate(written):
            segment(out, str(k), each)
        assert list(store.read(out).values()) == [by_hand(written)]


def test_records_of_one_moment_count_by_what_they_say(tmp_path: Path, make_record: Make) -> None:
    written = [make_record(value=k / 4) for k in range(4)]
    winners = set()
    for k, order in enumerate(itertools.permutations(written)):
        segment(tmp_path / str(k), "all", *order)
        (winner,) = store.read(tmp_path / str(k)).values()
        winners.add(winner.metrics["accuracy"].value)
    assert len(winners) == 1


def test_a_record_that_replaces_another_is_later_even_if_the_clock_was_set_back(
    tmp_path: Path, make_record: Make
) -> None:
    before, after = make_record(started=30), make_record(started=10, revision="b")
    moved = run._after(after, before)
    assert moved.started == "2026-01-01T00:00:30.000001+00:00"
    segment(tmp_path, "one", moved, before)
    assert store.read(tmp_path) == {moved.cell_id: moved}
    assert run._after(moved, moved).started == "2026-01-01T00:00:30.000002+00:00"
    assert run._after(after, None) is after and run._after(before, after) is before
    unreadable = after.model_copy(update={"started": "soon"})
    assert run._after(after, unreadable) is after


@pytest.mark.parametrize(
    "claimed", ["zzz", "9999-12-31T23:59:59.999999+00:00", "9999-12-31T23:59:59.999999", "2999-01-01"]
)
def test_no_record_is_immortal(tmp_path: Path, make_record: Make, claimed: str) -> None:
    """Whatever a record says of its time, one that is made after it counts."""
    odd, made = make_record().model_copy(update={"started": claimed}), make_record(started=10, value=0.25)
    later, other = run._after(made, odd), make_record(started=10, revision="b")
    for name, newer in (("same", later), ("other", other)):
        segment(tmp_path / name, "one", newer, odd)
        assert store.read(tmp_path / name) == {made.cell_id: newer}


def test_times_are_compared_as_times(make_record: Make) -> None:
    texts = ["2026-01-01T10:00:00+00:00", "2026-01-01T10:00:00.5+00:00", "2026-01-01T09:00:00-05:00"]
    assert sorted(reversed(texts), key=store.moment) == texts


def test_the_hash_of_a_changed_cell_is_its_own(make_record: Make) -> None:
    cell = make_record().cell
    assert cell.id == make_record().cell_id
    other = cell.model_copy(update={"n_train": 9})
    assert other.id != cell.id and other == type(cell)(**cell.model_dump() | {"n_train": 9})
    assert other.id == type(cell)(**cell.model_dump() | {"n_train": 9}).id and "id" not in cell.model_dump()


@pytest.mark.parametrize("read", [store.read, store.heads])
def test_a_record_of_a_newer_schema_is_refused(tmp_path: Path, make_record: Make, read: Any) -> None:
    path = segment(
        tmp_path, "one", make_record(), make_record().model_dump(mode="json") | {"schema_version": SCHEMA + 1}
    )
    before = path.read_bytes()
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    assert f"{path} line 2: " in str(caught.value) and "upgrade sparsebench" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [0, -1, "", "new", 1.5])
def test_a_schema_that_is_no_version_is_an_unreadable_line(make_record: Make, version: Any) -> None:
    raw = make_record().model_dump(mode="json") | {"schema_version": version}
    with pytest.raises(ValueError, match="schema_version"):
        store.parse(json.dumps(raw).encode())


def test_records_of_all_ages_give_the_rows_that_they_gave() -> None:
    """Lines of published stores since the first; a key more in a row is no change, one that differs or is gone is."""
    rows = rows_in(GOLDEN)
    golden = json.loads((GOLDEN / "rows.json").read_text(encoding="utf-8"))
    assert len(rows) == len(golden) == 17
    for row, before in zip(rows, golden, strict=True):
        assert {key: row.get(key) for key in before} == before
    assert {row["task"] for row in golden} == {"theory", "plain", "composite", "spurious"}
