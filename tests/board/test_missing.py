"""A strategy that lacks cells which the others have is shown and not ranked, in all formats; others are as without."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flats import flat

from sparsebench.board import budget_table
from sparsebench.board.build import build, judge
from sparsebench.board.gather import board_of
from sparsebench.board.notes import notes_on
from sparsebench.page.files import files
from sparsebench.records.table import bytes_of

BUDGETS = (0.8, 0.5, 0.3)
RATES = {"good": 0.85, "fair": 0.7, "poor": 0.4, "random_inside": 0.5}
Flat = dict[str, Any]


def cell_of(strategy: str, seed: int, asked: float, rate: float, **more: Any) -> Flat:
    """Return the flat record of one test on 300 items; which of them are right follows from how hard each is."""
    hard = np.random.default_rng(seed).random(300)
    hits = hard + np.random.default_rng([seed, int(100 * asked), *strategy.encode()]).normal(0, 0.05, 300) < rate
    labels = np.arange(300) % 2 + 2 * seed
    predictions = bytes_of(np.where(hits, labels, 60000))
    return flat(strategy, seed, cell_id=f"{strategy} {asked} {seed}", budget=f"macs {asked:g}", macs_ratio=asked,
                macs_ratio_asked=asked, accuracy=hits.mean(), test_items=300, test_labels=bytes_of(labels),
                revision="0", environment="", test_predictions=predictions, **more)  # fmt: skip


WORLD = [cell_of("dense", seed, 1.0, 0.9) for seed in range(3)] + [
    cell_of(strategy, seed, asked, rate * (0.5 + asked / 2))
    for strategy, rate in RATES.items()
    for asked in BUDGETS
    for seed in range(3)
]
SINGLE = [record for record in WORLD if record["macs_ratio_asked"] in (0.5, 1.0)]


def without(records: list[Flat], **values: Any) -> list[Flat]:
    """Return the records but for those that have all these values."""
    return [record for record in records if any(record[key] != value for key, value in values.items())]


def ranks(records: list[Flat], folder: Path) -> dict[str, dict[str, set[str]]]:
    """Return by format the ranks that each strategy has in its lines of it."""
    judged, made = judge(records), files(board_of(records, folder))
    texts = {form: made[f"leaderboard.{form}"].decode() for form in ("md", "csv", "json", "html")}
    texts |= {form: budget_table.text(judged.rows, judged.budgets, form) for form in ("table", "latex")}
    found: dict[str, dict[str, set[str]]] = {form: {} for form in texts}
    rows = {"csv": list(csv.DictReader(io.StringIO(texts["csv"]))), "json": json.loads(texts["json"])}
    for form, lines in rows.items():
        for row in lines:
            found[form].setdefault(row["strategy"], set()).add(row["rank"].replace("not ranked", "-"))
    for form, divider in {"md": r"\|", "table": r"  +", "latex": "&"}.items():
        for line in texts[form].replace(r"\_", "_").splitlines():
            add(found[form], [part.strip() for part in re.split(divider, line) if part.strip()])
    for line in re.findall("<tr><td>(.*)", texts["html"]):
        add(found["html"], [re.sub("<.*?>", "", cell).strip() for cell in line.split("<td>")])
    return found


def add(found: dict[str, set[str]], cells: list[str]) -> None:
    """Add the rank in a line of a table, if it is one that begins with a rank and a strategy."""
    if len(cells) > 2 and re.fullmatch(r"-|\d+(-\d+)?", cells[0]) and cells[1] in {*RATES, "dense"}:
        found.setdefault(cells[1], set()).add(cells[0])


LACKING = {
    "a seed": dict(strategy="fair", repetition=1),
    "a seed at one budget": dict(strategy="fair", repetition=1, macs_ratio_asked=0.5),
    "the lowest budget": dict(strategy="fair", macs_ratio_asked=0.3),
    "a budget between": dict(strategy="fair", macs_ratio_asked=0.5),
}


@pytest.mark.parametrize("lacking", LACKING.values(), ids=LACKING)
def test_who_lacks_something_is_not_ranked_in_any_format_and_others_are_as_without(
    lacking: dict[str, Any], tmp_path: Path
) -> None:
    some, rest = without(WORLD, **lacking), without(WORLD, strategy="fair")
    for form, found in ranks(some, tmp_path).items():
        assert found["fair"] == {"-"}, form
        assert found["good"] != {"-"} and found["poor"] != {"-"}, form
    others = [row for row in build(some) if row["strategy"] != "fair"]
    assert others == build(rest)
    (row, *_) = [row for row in build(some) if row["strategy"] == "fair"]
    assert row["accuracy"] > 0.3 and row["versus_dense"] is None


@pytest.mark.parametrize("world", [WORLD, SINGLE], ids=["several budgets", "one"])
def test_without_dense_nothing_is_ranked_in_any_format(world: list[Flat], tmp_path: Path) -> None:
    some = without(world, strategy="dense")
    for form, found in ranks(some, tmp_path).items():
        assert set().union(*found.values()) <= {"-"}, form  # a column of nothing is not shown
    assert any(line.startswith("composite: dense is missing, so nothing is ranked;") for line in notes_on(some))
    failed = [
        *some,
        *(record | {"status": "failed", "reason": "x"} for record in world if record["strategy"] == "dense"),
    ]
    assert {row["rank"] for row in build(failed)} == {"not ranked"}
    assert "composite: dense has no result, so nothing is ranked" in notes_on(failed)


@pytest.mark.parametrize("status", ["failed", "unsupported"])
def test_what_failed_at_one_budget_is_ranked_at_none_and_what_cannot_be_is_not_missing(
    status: str, tmp_path: Path
) -> None:
    lost = [record | {"status": status, "reason": "x"} if record["strategy"] == "fair"
            and record["macs_ratio_asked"] == 0.5 else record for record in WORLD]  # fmt: skip
    for form, found in ranks(lost, tmp_path).items():
        assert ("-" in found["fair"]) == (status == "failed") == (found["fair"] == {"-"}), form
    assert not any("without" in line for line in notes_on(lost))


def test_a_seed_that_one_alone_has_is_wanted_of_nobody(tmp_path: Path) -> None:
    more = [*WORLD, *(cell_of("good", seed, asked, 0.8) for seed in (3, 4) for asked in BUDGETS)]
    assert all("-" not in found[name] for found in ranks(more, tmp_path).values() for name in RATES)
    assert notes_on(more, technical=False) == []


def test_a_budget_that_one_alone_has_is_wanted_of_nobody() -> None:
    more = [*WORLD, *(cell_of("good", seed, 0.1, 0.5) for seed in range(3))]
    (board,), (before,) = judge(more).budgets, judge(WORLD).budgets
    now, then = ({row["strategy"]: row for row in one.rows} for one in (board, before))
    assert board.budgets == (*BUDGETS, 0.1) and board.middle == before.middle
    assert {name: row["rank"] for name, row in now.items()} == {name: row["rank"] for name, row in then.items()}
    assert now["poor"]["kept_accuracy"] == then["poor"]["kept_accuracy"]


def test_a_seed_of_dense_that_is_missing_leaves_out_that_seed_for_all() -> None:
    some = without(WORLD, strategy="dense", repetition=2)
    (board,), (fewer,) = judge(some).budgets, judge(without(WORLD, repetition=2)).budgets
    now, then = ({row["strategy"]: row for row in one.rows} for one in (board, fewer))
    for name in RATES:
        assert now[name]["rank"] == then[name]["rank"]
        assert now[name]["kept_accuracy"] == pytest.approx(then[name]["kept_accuracy"])
    assert any(
        line.startswith("dense on composite: not ranked there, without 1 of 3 repetitions (2)")
        for line in notes_on(some)
    )


def test_a_note_says_what_each_lacks() -> None:
    some = without(without(WORLD, strategy="fair", repetition=1), strategy="poor", repetition=1)
    some = without(without(some, strategy="good", macs_ratio_asked=0.3), strategy="poor", macs_ratio_asked=0.5)
    lines = [line for line in notes_on(some, technical=False) if "not ranked" in line]
    assert [line.partition(";")[0] for line in lines] == [
        "fair on composite: not ranked there, without 1 of 3 repetitions (1)",
        "good on composite: not ranked there, without macs 0.3",
        "poor on composite: not ranked there, without macs 0.5, 1 of 3 repetitions (1)",
    ]


def test_trials_that_are_missing_are_counted() -> None:
    sizes = [record | {"n_train": n, "success": 1.0, "cell_id": f"{record['cell_id']} {n}"}
             for record in SINGLE for n in (4, 8)]  # fmt: skip
    some = without(sizes, strategy="fair", n_train=4, repetition=0)
    assert any(line.startswith("fair on composite: not ranked there, without 1 of 6 trials") for line in notes_on(some))
    assert {row["rank"] for row in build(some) if row["strategy"] == "fair"} == {"not ranked"}
