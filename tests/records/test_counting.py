"""Which of several records of a cell counts, in segments and sealed, and what older versions wrote."""

import itertools
import json
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flats import filled, rows_in

from sparsebench import api
from sparsebench.records import store
from sparsebench.records.record import Record

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
    for trial in range(60):
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


@pytest.mark.parametrize("claimed", ["zzz", "9999-12-31T23:59:59.999999+00:00", "AHEAD"])
def test_a_record_that_is_made_later_counts_whatever_the_one_before_says(tmp_path: Path, claimed: str) -> None:
    """Also where the clock was set back by some hours."""
    if claimed == "AHEAD":
        claimed = (datetime.now(UTC) + timedelta(hours=3)).isoformat()
    asked = {"tasks": "theory:steps=2,test=4", "n_train": (4,), "jobs": 0, "seeds": 1, "out": tmp_path}
    api.run("noise", **asked)
    odd = {one.cell_id: one.model_copy(update={"started": claimed}) for one in store.read(tmp_path).values()}
    for path in store.sealed(tmp_path):
        path.unlink()
    filled(tmp_path, *odd.values())
    assert {one.started for one in store.read(tmp_path).values()} == {claimed}
    api.run("noise", rerun="always", **asked)
    made = store.read(tmp_path)
    assert made.keys() == odd.keys() and not [one for one in made.values() if one.started == claimed]


def test_times_are_compared_as_times() -> None:
    texts = ["2026-01-01T10:00:00+00:00", "2026-01-01T10:00:00.5+00:00", "2026-01-01T09:00:00-05:00"]
    assert sorted(reversed(texts), key=store.moment) == texts


def test_records_of_all_ages_give_the_rows_that_they_gave() -> None:
    """Lines of published stores since the first; a key more in a row is no change, one that differs or is gone is."""
    rows = rows_in(GOLDEN)
    golden = json.loads((GOLDEN / "rows.json").read_text(encoding="utf-8"))
    assert len(rows) == len(golden) == 17
    for row, before in zip(rows, golden, strict=True):
        assert {key: row.get(key) for key in before} == before
    assert {row["task"] for row in golden} == {"theory", "plain", "composite", "spurious"}
