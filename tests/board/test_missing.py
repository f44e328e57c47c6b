"""A strategy that lacks cells is shown but not ranked, and does not influence the ranks of others."""

from pathlib import Path
from typing import Any

import pytest
from flats import Flat, build, called, of_items

from sparsebench.board.columns import Row, dicts
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.notes import notes_on
from sparsebench.board.over_budgets import Curves
from sparsebench.records import manifests
from sparsebench.records.store import Store

BUDGETS = (0.8, 0.5, 0.3)
RATES = {"good": 0.85, "fair": 0.7, "poor": 0.4, "random_inside": 0.5}


WORLD = [of_items("dense", seed, 1.0, 0.9) for seed in range(3)] + [
    of_items(strategy, seed, asked, rate * (0.5 + asked / 2))
    for strategy, rate in RATES.items()
    for asked in BUDGETS
    for seed in range(3)
]
SINGLE = [record for record in WORLD if record["macs_ratio_asked"] in (0.5, 1.0)]


def without(records: list[Flat], **values: Any) -> list[Flat]:
    """Return the records without those that have all these values."""
    return [record for record in records if any(record[key] != value for key, value in values.items())]


def ranks(records: list[Flat], over_tasks: Leaderboard) -> dict[str, set[str]]:
    """Return the ranks of each strategy, over all tasks and by task, by budget and over all budgets."""
    by_strategy: dict[str, set[str]] = {}
    for judged in (over_tasks, judge(records, "task", over_tasks)):
        curves = [ranking.curves.rows for ranking in judged.rankings if ranking.curves is not None]
        for rows in (judged.rows, *curves):
            for strategy, rank in zip(rows["strategy"], rows["rank"], strict=True):
                by_strategy.setdefault(strategy, set()).add(rank)
    return {strategy: ranks for strategy, ranks in by_strategy.items() if strategy != "dense"}


def curves(judged: Leaderboard) -> Curves:
    (ranking,) = judged.rankings
    assert ranking.curves is not None
    return ranking.curves


LACKING = {
    "a seed": dict(strategy="fair", repetition=1),
    "a seed at one budget": dict(strategy="fair", repetition=1, macs_ratio_asked=0.5),
    "the lowest budget": dict(strategy="fair", macs_ratio_asked=0.3),
    "a budget between": dict(strategy="fair", macs_ratio_asked=0.5),
}


@pytest.fixture(scope="module")
def rows_without_fair() -> list[Row]:
    """Return the rows of the board without the strategy that lacks something."""
    return build(without(WORLD, strategy="fair"))


@pytest.mark.parametrize("lacking", LACKING.values(), ids=LACKING)
def test_who_lacks_something_is_not_ranked_and_others_are_as_without(
    lacking: dict[str, Any], rows_without_fair: list[Row]
) -> None:
    some = without(WORLD, **lacking)
    judged = judge(some)
    by_strategy = ranks(some, judged)
    assert by_strategy["fair"] == {"not ranked"} and "not ranked" not in by_strategy["good"] | by_strategy["poor"]
    rows = dicts(judged.rows)
    others = [row for row in rows if row["strategy"] != "fair"]
    assert others == rows_without_fair
    (row, *_) = [row for row in rows if row["strategy"] == "fair"]
    last = [row["rank"] == "not ranked" for row in rows if row["kind"] != "oracle"]
    assert last == sorted(last), "below all that are ranked"
    assert row["accuracy"] > 0.3 and row["versus_dense"] is None


@pytest.mark.parametrize("world", [WORLD, SINGLE], ids=["several budgets", "one"])
def test_without_dense_nothing_is_ranked(world: list[Flat]) -> None:
    some = without(world, strategy="dense")
    judged = judge(some)
    assert set().union(*ranks(some, judged).values()) == {"not ranked"}
    assert "composite: dense is missing, so nothing is ranked" in notes_on(some, judged)
    failed = [
        *some,
        *(record | {"status": "failed", "reason": "x"} for record in world if record["strategy"] == "dense"),
    ]
    judged = judge(failed)
    assert {row["rank"] for row in dicts(judged.rows)} == {"not ranked"}
    assert "composite: dense has no result, so nothing is ranked" in notes_on(failed, judged)


@pytest.mark.parametrize("status", ["failed", "unsupported"])
def test_a_failure_at_one_budget_prevents_a_rank(
    status: str,
) -> None:
    """What failed at one budget is ranked at none and what cannot be is not missing."""
    failed = [record | {"status": status, "reason": "x"} if record["strategy"] == "fair"
            and record["macs_ratio_asked"] == 0.5 else record for record in WORLD]  # fmt: skip
    judged = judge(failed)
    fair = ranks(failed, judged)["fair"]
    assert ("not ranked" in fair) == (status == "failed") == (fair == {"not ranked"})
    assert not any("without" in line for line in notes_on(failed, judged))


def test_a_budget_that_one_alone_has_is_wanted_of_nobody() -> None:
    more = [*WORLD, *(of_items("good", seed, 0.1, 0.5) for seed in range(3))]
    now, before = curves(judge(more)), curves(judge(WORLD))
    assert now.budgets == (*BUDGETS, 0.1) and now.middle == before.middle
    assert now.rows["rank"].to_dict() == before.rows["rank"].to_dict()
    assert now.rows.loc["poor", "kept_accuracy"] == before.rows.loc["poor", "kept_accuracy"]


def test_a_seed_of_dense_that_is_missing_leaves_out_that_seed_for_all() -> None:
    some = without(WORLD, strategy="dense", repetition=2)
    judged, judged_without = judge(some), judge(without(WORLD, repetition=2))
    now, fewer = curves(judged).rows.loc[[*RATES]], curves(judged_without).rows.loc[[*RATES]]
    assert now["rank"].tolist() == fewer["rank"].tolist()
    assert now["kept_accuracy"].tolist() == pytest.approx(fewer["kept_accuracy"].tolist())
    assert dicts(judged.rows) == dicts(judged_without.rows)
    (line,) = notes_on(some, judged, technical=False)
    assert all(name in line for name in RATES) and "dense lack" in line


def test_a_note_says_what_each_lacks() -> None:
    some = without(without(WORLD, strategy="fair", repetition=1), strategy="poor", repetition=1)
    some = without(without(some, strategy="good", macs_ratio_asked=0.3), strategy="poor", macs_ratio_asked=0.5)
    lines = [line for line in notes_on(some, technical=False) if "not ranked" in line]
    assert [line.partition(";")[0] for line in lines] == [
        "fair on composite: not ranked there, without 1 of 3 repetitions",
        "good on composite: not ranked there, without macs 0.3",
        "poor on composite: not ranked there, without macs 0.5, 1 of 3 repetitions",
    ]


def test_a_note_has_the_command_where_the_folder_answers_one_suite(tmp_path: Path) -> None:
    fair = called("fair", disposal="merge", layers=(2, 3))
    records = [record | fair if record["strategy"] == "fair" else record for record in WORLD]
    some = without(without(records, strategy=fair["strategy"], repetition=1), strategy="poor", repetition=1)
    poor = {"revision": "0", "kind": "deployable", "site": "block", "trained": False, "adaptive": False,
            "citation": "", "bibtex": "", "file": "poor.py", "source": {"poor.py": ""}}  # fmt: skip
    Store(tmp_path).keep(manifests.STRATEGIES, {"name": "poor"} | poor)
    judged = judge(some)
    for name, known in ((manifests.OWN, False), ("quick", True), ("embedded", False)):
        Store(tmp_path).keep(manifests.SUITES, {"name": name, "version": 1, "settings": []})
        lines = notes_on(some, judged, tmp_path, technical=False)
        (line,) = (line for line in lines if "not ranked" in line)
        command = "`sparsebench run fair:disposal=merge,layers=2+3 poor.py --suite quick --out FOLDER`"
        assert (command in line) == known


def test_the_command_asks_for_repetitions_beyond_those_of_the_suite(tmp_path: Path) -> None:
    Store(tmp_path).keep(manifests.SUITES, {"name": "smoke", "version": 1, "settings": []})  # with one repetition
    some = without(WORLD, strategy="fair", repetition=1)
    (line,) = (line for line in notes_on(some, folder=tmp_path, technical=False) if "not ranked" in line)
    assert "`sparsebench run fair --suite smoke --seeds 3 --out FOLDER`" in line


def test_trials_that_are_missing_are_counted() -> None:
    sizes = [record | {"n_train": n, "success": 1.0, "cell_id": f"{record['cell_id']} {n}"}
             for record in SINGLE for n in (4, 8)]  # fmt: skip
    some = without(sizes, strategy="fair", n_train=4, repetition=0)
    judged = judge(some)
    lines = notes_on(some, judged)
    assert any(line.startswith("fair on composite: not ranked there, without 1 of 6 trials") for line in lines)
    tested = [record | {"network": f"network-{record['repetition']}", "repetition": 0} for record in SINGLE]
    lines = notes_on(without(tested, strategy="fair", network="network-1"))
    assert any(line.startswith("fair on composite: not ranked there, without 1 of 3 tests") for line in lines)
    assert {row["rank"] for row in dicts(judged.rows) if row["strategy"] == "fair"} == {"not ranked"}
