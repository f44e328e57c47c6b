"""Strategies with unequal sets of results are compared on what all have, and a note names who has more or less."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from flats import Flat, build, of_items

from sparsebench.board.columns import Row, dicts
from sparsebench.board.comparison import about
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.notes import notes_on
from sparsebench.board.tables import Choice, render
from sparsebench.board.views import report
from sparsebench.records.record import bytes_of

RATES = {"dense": 0.9, "sharp": 0.85, "blunt": 0.6, "dull": 0.45, "random": 0.4, "random_inside": 0.5}
RANDOM = ("random", "random_inside")
THREE = range(3)


def cells(
    strategies: Sequence[str], seeds: Sequence[int] = THREE, budgets: Sequence[float] = (0.5,), **more: Any
) -> list[Flat]:
    """Return a flat record for each strategy, seed and budget; dense has one budget."""
    return [
        of_items(strategy, seed, asked, RATES[strategy] * (0.6 + 0.4 * asked), **more)
        for strategy in strategies
        for asked in ((1.0,) if strategy == "dense" else budgets)
        for seed in seeds
    ]


def sized(records: list[Flat], *sizes: int) -> list[Flat]:
    """Return the records as trials with each number of training samples; larger ones succeed."""
    return [
        record | {"n_train": n, "success": float(n >= 16), "cell_id": f"{record['cell_id']} {n}"}
        for record in records
        for n in sizes
    ]


def of_network(name: str, records: list[Flat], draw: int = 0) -> list[Flat]:
    """Return the records as tests of a trained network, and its random draw."""
    return [
        record | {"network": name, "repetition": draw, "cell_id": f"{record['cell_id']} {name} {draw}"}
        for record in records
    ]


def drawn(strategies: Sequence[str], draws: Sequence[int]) -> list[Flat]:
    """Return draws of random strategies on one network; they test the same pictures."""
    labels, records = np.arange(600) % 2, []
    for strategy in strategies:
        for draw in draws:
            hits = np.random.default_rng([draw, *strategy.encode()]).random(600) < RATES[strategy]
            predictions = bytes_of(np.where(hits, labels, 60000))
            outcomes = {"test_labels": bytes_of(labels), "test_predictions": predictions, "accuracy": hits.mean()}
            records += of_network("a", cells([strategy], [0], **outcomes), draw)
    return records


ALL = tuple(RATES)
SEVERAL = (0.7, 0.5)
SAMPLES = [record for seed in THREE for record in of_network("a", cells(ALL, [seed]), seed)]
"""Networks that are tested on another sample of pictures in each repetition."""

MORE: dict[str, tuple[list[Flat], list[Flat]]] = {
    "seeds": (cells(ALL, [0]), cells(["dense", "sharp"], [1, 2])),
    "seeds at one of two budgets": (
        cells(ALL, THREE, SEVERAL),
        cells([name for name in ALL if name != "dense"], [3, 4], [0.7]),
    ),
    "seeds of all but dense": (cells(ALL, [0, 1]), cells(ALL[1:], [2])),
    "seeds and a budget": (
        cells(ALL, [0], SEVERAL),
        [*cells(["dense"], [1, 2]), *cells(["blunt"], [1, 2], SEVERAL)],
    ),
    "networks": (
        [*of_network("a", cells(ALL, [0])), *of_network("b", cells(ALL, [1]))],
        of_network("c", cells(["dense", "dull"], [2])),
    ),
    "draws of a random strategy": (
        [*of_network("a", cells(["dense", "sharp", "blunt"], [0])), *drawn([*RANDOM, "dull"], THREE)],
        drawn(["random"], range(3, 9)),
    ),
    "samples of pictures": (
        SAMPLES,
        [record for seed in (3, 4) for record in of_network("a", cells(["dense", "blunt"], [seed]), seed)],
    ),
    "numbers of training samples": (sized(cells(ALL), 4, 8, 16), sized(cells(["dense", "sharp"]), 32)),
    "trials": (sized(cells(ALL), 4, 8, 16), sized(cells(["dense", "dull"], [3, 4, 5]), 4, 8, 16)),
}
"""Records that all strategies have, and further ones that some have."""


def named_in(lines: Sequence[str], records: list[Flat]) -> set[str]:
    """Return the strategies of records that lines name as words."""
    words = {word for line in lines for word in line.replace(",", " ").replace(";", " ").split()}
    return {record["strategy"] for record in records} & words


@pytest.mark.parametrize(("common", "more"), MORE.values(), ids=MORE)
def test_what_only_some_have_changes_no_row_and_a_note_names_them(common: list[Flat], more: list[Flat]) -> None:
    every = [*common, *more]
    now, before = judge(every), judge(common)
    assert dicts(now.rows) == dicts(before.rows)
    assert dicts(judge(every, "task", now).rows) == dicts(judge(common, "task", before).rows)
    assert named_in(new_notes(every, now, common, before), more) == {record["strategy"] for record in more}
    (ranking,), (ranking_before,) = now.rankings, before.rankings
    assert about(ranking.comparison) == about(ranking_before.comparison)


def new_notes(records: list[Flat], now: Leaderboard, common: list[Flat], before: Leaderboard) -> list[str]:
    """Return the notes on records that are not among those on the common records."""
    known = set(notes_on(common, before))
    return [line for line in notes_on(records, now) if line not in known]


def rows_of_curves(judged: Leaderboard) -> list[Row]:
    (ranking,) = judged.rankings
    assert ranking.curves is not None
    return dicts(ranking.curves.rows)


TWO_BUDGETS = cells(ALL, THREE, SEVERAL)


@pytest.fixture(scope="module")
def judged_before() -> Leaderboard:
    return judge(TWO_BUDGETS)


@pytest.mark.parametrize("budget", [0.3, 0.6], ids=["below the others", "between the others"])
@pytest.mark.parametrize("seeds", [THREE, [0]], ids=["all seeds", "one seed"])
def test_a_budget_that_only_some_have_changes_nothing_over_budgets(
    judged_before: Leaderboard, budget: float, seeds: Sequence[int]
) -> None:
    common, more = TWO_BUDGETS, cells(["blunt"], seeds, [budget])
    every = [*common, *more]
    judged = judge(every)
    now, before = rows_of_curves(judged), rows_of_curves(judged_before)
    keys = ("strategy", "rank", "kept_accuracy", "kept_accuracy_low", "macs_at_2", "accuracy", "accuracy_at_0.7")
    assert [[row[key] for key in keys] for row in now] == [[row[key] for key in keys] for row in before]
    measured = [row["strategy"] for row in now if row[f"accuracy_at_{budget:g}"] is not None]
    assert measured == (["blunt"] if seeds == THREE else [])  # a cell of fewer seeds is not beside the others
    (row,) = (row for row in dicts(judged.rows) if row["asked"] == budget)
    assert row["n_seeds"] == len(seeds) and (row["rank"] == "not ranked") == (seeds != THREE)
    assert row["accuracy"] == pytest.approx(np.mean([record["accuracy"] for record in more]))
    new = new_notes(every, judged, common, judged_before)
    assert named_in(new, more) == {"blunt"} and any(f"macs {budget:g}" in line for line in new)


def test_without_a_budget_in_common_no_strategy_is_ranked_over_budgets() -> None:
    apart = {"sharp": [0.8, 0.7], "blunt": [0.6, 0.5], "dull": [0.4, 0.3]}
    records = [*cells(["dense"]), *(record for name, at in apart.items() for record in cells([name], THREE, at))]
    judged = judge(records)
    assert all(row["rank"] == "not ranked" and row["kept_accuracy"] is None for row in rows_of_curves(judged)[1:])
    assert named_in(notes_on(records, judged), records) >= set(apart)


def test_a_strategy_with_far_fewer_results_is_not_ranked() -> None:
    """A strategy with far less is shown and not ranked and the others are as without it."""
    less = cells(["dull"], [1], SEVERAL)
    others = cells([name for name in ALL if name != "dull"], range(6), SEVERAL)
    every = [*others, *less]
    judged = judge(every)
    rows = dicts(judged.rows)
    assert [row for row in rows if row["strategy"] != "dull"] == build(others)
    dense = next(record for record in others if record["strategy"] == "dense" and record["repetition"] == 1)
    for record in less:
        (row,) = (row for row in rows if row["strategy"] == "dull" and row["budget"] == record["budget"])
        assert (row["rank"], row["n_seeds"], row["versus_dense"]) == ("not ranked", 1, None)
        assert row["accuracy"] == record["accuracy"]
        assert row["accuracy_delta"] == pytest.approx(record["accuracy"] - dense["accuracy"])
    at_one_budget = [record for record in every if record["macs_ratio_asked"] in (0.5, 1.0)]
    for board in (judged, judge(at_one_budget)):
        shown = render(report(board), "table", Choice(width=80)).splitlines()
        (heading,) = (line for line in shown if "rank  strategy" in line)
        at = heading.index("seeds") + len("seeds")
        (row_of_less,) = (line for line in shown if "  dull" in line[:20])
        assert row_of_less[:at].endswith(" 1")


def test_without_common_seeds_there_is_no_difference() -> None:
    """A strategy with none of the common seeds has its accuracy and no difference."""
    for seeds in ([0], [0, 1, 2]):
        others = cells([name for name in ALL if name != "dull"], seeds)
        rows_of_others = build(others)
        for other in ([7], [7, 8]):
            stranger = cells(["dull"], other)
            rows = build([*others, *stranger])
            assert [row for row in rows if row["strategy"] != "dull"] == rows_of_others
            (row,) = (row for row in rows if row["strategy"] == "dull")
            assert row["accuracy"] == pytest.approx(np.mean([record["accuracy"] for record in stranger]))
            assert (row["rank"], row["accuracy_delta"], row["random_delta"]) == ("not ranked", None, None)
            assert row["n_seeds"] == len(other)


@pytest.mark.parametrize("networks", [False, True], ids=["repetitions", "networks"])
@pytest.mark.parametrize("budgets", [(0.5,), SEVERAL], ids=["one budget", "two"])
def test_if_nothing_is_common_nothing_is_ranked(networks: bool, budgets: Sequence[float]) -> None:
    records = []
    for seed, name in enumerate(("sharp", "blunt", "dull", "random", "random_inside")):
        part = cells(["dense", name], [seed], budgets)
        records += of_network(f"network-{seed}", part) if networks else part
    judged = judge(records)
    rows = dicts(judged.rows)
    assert {row["rank"] for row in rows} == {"not ranked"} and {row["versus_dense"] for row in rows} == {None}
    own = {(record["strategy"], record["budget"]): record["accuracy"] for record in records}
    assert all(row["accuracy"] == own[row["strategy"], row["budget"]] for row in rows if row["strategy"] != "dense")
    assert any("nothing is ranked" in line for line in notes_on(records, judged))


def test_no_gain_is_shown_over_a_baseline_with_fewer_seeds() -> None:
    records = [*cells([name for name in ALL if name not in RANDOM]), *cells(RANDOM, [0, 1])]
    judged = judge(records)
    rows = dicts(judged.rows)
    assert all(row["random_delta"] is None for row in rows if row["strategy"] not in RANDOM)
    assert all(row["accuracy_delta"] is not None for row in rows)
    best = report(judged).tables[0].rows
    assert all(row.get("random") is None for row in best)


@pytest.mark.parametrize("status", ["failed", "unsupported"])
def test_a_strategy_without_a_result_in_a_common_cell_is_not_ranked(status: str) -> None:
    records = [
        record | {"status": status, "reason": "it does not work"}
        if record["strategy"] == "blunt" and record["repetition"] == 2 and record["macs_ratio_asked"] == 0.5
        else record
        for record in cells(ALL, THREE, SEVERAL)
    ]
    rows = [row for row in build(records) if row["strategy"] == "blunt"]
    assert {(row["rank"], row["n_seeds"]) for row in rows} == {("not ranked", 2)}
    for row in rows:
        used = [r["accuracy"] for r in records if (r["strategy"], r["budget"]) == ("blunt", row["budget"])]
        assert row["accuracy"] == pytest.approx(np.mean(used[:2]))


def test_many_results_of_few_strategies_do_not_replace_others() -> None:
    """A setting with many results of few strategies does not replace the others."""
    common, more = cells(ALL, [0]), cells(["dense", "sharp"], range(9), n_train=1200)
    judged = judge([*common, *more])
    assert dicts(judged.rows) == build(common)
    assert any("not shown" in line for line in notes_on([*common, *more], judged))


@pytest.mark.parametrize("seed", range(6))
def test_a_gain_is_the_difference_of_the_shown_accuracies(seed: int) -> None:
    """In any unequal set each gain is the difference of the accuracies beside it."""
    rng = np.random.default_rng(seed)
    every, share = cells(ALL, range(4), SEVERAL), rng.uniform(0.5, 1)
    records = [record for record in every if rng.random() < share or record["repetition"] == 0 == seed % 2]
    judged = judge(records)
    rows = dicts(judged.rows)
    ranked = [row for row in rows if row["rank"] != "not ranked"]
    assert len({row["n_seeds"] for row in ranked}) <= 1
    of_row = {(row["strategy"], row["asked"]): row["accuracy"] for row in rows}
    for row in ranked:
        assert row["accuracy_delta"] == pytest.approx(row["accuracy"] - of_row["dense", 1.0])
        if row["random_delta"] is not None:
            assert row["random_delta"] == pytest.approx(row["accuracy"] - of_row["random_inside", row["asked"]])
    lines = notes_on(records, judged, technical=False)
    without_rank = {row["strategy"] for row in rows} - {row["strategy"] for row in ranked}
    assert without_rank <= named_in(lines, records) or any("nothing is ranked" in line for line in lines)
    if sum(row["n_seeds"] for row in rows) < len(records):
        assert lines
