"""Boards over several budgets: one row for each strategy, ranked by the area under its curve."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flats import Flat, in_blocks, of_items

from sparsebench.board import columns
from sparsebench.board.columns import Row, dicts, keys_of
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.notes import notes_on
from sparsebench.board.over_budgets import Curves
from sparsebench.board.reading import DECLARED
from sparsebench.board.tables import ALL, Choice, render
from sparsebench.board.views import best, report
from sparsebench.measure.metrics import MetricKind

BUDGETS = (0.7, 0.5, 0.3)


def records(
    strategy: str, rates: dict[float, float], spent: dict[float, float] | None = None, **more: Any
) -> list[Flat]:
    """Return flat records of three seeds at some budgets."""
    about = {"setting": "s", "how": "drop"} | more
    return [
        of_items(strategy, seed, asked, rate, macs_ratio=(spent or {}).get(asked, asked), images_per_s=100 / asked,
                 selection_auroc=0.5, **about)
        for asked, rate in rates.items()
        for seed in range(3)
    ]  # fmt: skip


def text(judged: Leaderboard, form: str, choice: Choice = ALL, notes: Sequence[str] = ()) -> str:
    """Return a leaderboard in a format; chosen columns and LaTeX have only the full table."""
    return render(report(judged, notes, whole=form != "latex" and not choice.names), form, choice)


WORLD = [
    *records("dense", {1.0: 0.9}, how="-"),
    *records("good", dict.fromkeys(BUDGETS, 0.89)),
    *records("steep", {0.7: 0.9, 0.5: 0.5, 0.3: 0.2}, {0.3: 0.4}),
    *records("random_inside", {0.7: 0.8, 0.5: 0.7, 0.3: 0.5}),
    *records("oracle", dict.fromkeys(BUDGETS, 0.95), how="truth"),
]


@pytest.fixture(scope="module")
def world() -> Leaderboard:
    return judge(WORLD)


def over(judged: Leaderboard) -> Curves:
    ranking = judged.over_budgets
    assert ranking is not None and ranking.curves is not None
    return ranking.curves


def row_of(board: Curves, strategy: str) -> Row:
    (row,) = dicts(board.rows.loc[[strategy]])
    return row


def test_a_row_a_strategy_dense_first_and_oracles_last(world: Leaderboard) -> None:
    board = over(world)
    assert list(board.rows["strategy"]) == ["dense", "good", "random_inside", "steep", "oracle"]
    assert (board.budgets, board.middle) == (BUDGETS, 0.5)
    assert list(board.rows["rank"]) == ["not ranked", "1", "2", "3", "not ranked"]


@pytest.mark.parametrize(
    ("budgets", "middle"), [((0.7, 0.3), 0.3), ((0.6, 0.4), 0.4), ((0.85, 0.7, 0.3, 0.15), 0.3), ((0.6, 0.3), 0.6)]
)
def test_the_smaller_of_two_middle_budgets_is_the_middle(budgets: tuple[float, ...], middle: float) -> None:
    good, poor = dict.fromkeys(budgets, 0.89), dict.fromkeys(budgets, 0.7)
    world = [*records("dense", {1.0: 0.9}, how="-"), *records("good", good), *records("poor", poor)]
    assert over(judge(world)).middle == middle


def test_a_strategy_that_spends_more_than_its_budget_is_not_the_best_at_it() -> None:
    costly = {0.7: (0.95, 0.71), 0.5: (0.95, 0.8), 0.3: (0.95, 0.6)}
    rates, spent = ({asked: pair[i] for asked, pair in costly.items()} for i in (0, 1))
    judged = judge([*WORLD, *records("costly", rates, spent)])
    assert over(judged).rows.loc["costly", ["rank", "kept_accuracy"]].tolist() == [
        "not ranked",
        pytest.approx(np.nan, nan_ok=True),
    ]
    assert [row["best"] for row in best(judged.rankings[0]).rows] == ["dense", "costly", "good", "good"]
    (note,) = (
        line for line in notes_on([*WORLD, *records("costly", rates, spent)], judged) if "over their budget" in line
    )
    assert "costly 0.60 at 0.3, costly 0.80 at 0.5, steep 0.40 at 0.3" in note
    (only,) = (
        row
        for row in best(judge([*WORLD[:3], *records("costly", rates, spent)]).rankings[0]).rows
        if row["budget"] == "0.5"
    )
    assert only["best"] is None


def test_files_have_the_rank_of_the_table_too(world: Leaderboard) -> None:
    judged = world
    ranks = judged.rows.groupby("strategy")["kept_accuracy_rank"].agg(set).to_dict()
    assert ranks == {name: {rank} for name, rank in over(judged).rows["rank"].items()}


def test_a_real_difference_is_told_on_the_area_and_equals_are_not() -> None:
    equal = [*WORLD, *records("goodly", dict.fromkeys(BUDGETS, 0.89))]
    judged = judge(equal)
    board = over(judged)
    assert {name: row_of(board, name)["rank"] for name in ("good", "goodly", "random_inside", "steep")} == {
        "good": "1-2", "goodly": "1-2", "random_inside": "3", "steep": "4",
    }  # fmt: skip
    assert any("80 % of cases (3 seeds each; 6 pairs" in line for line in notes_on(equal, judged))


def test_the_columns_of_a_row_are_what_was_measured(world: Leaderboard) -> None:
    board = over(world)
    good, steep, dense = (row_of(board, name) for name in ("good", "steep", "dense"))
    by_budget = {row["budget"]: row for row in dicts(world.rows) if row["strategy"] == "steep"}
    assert [steep[f"accuracy_at_{b:g}"] for b in BUDGETS] == [by_budget[f"macs {b:g}"]["accuracy"] for b in BUDGETS]
    assert [steep[f"accuracy_at_{b:g}_spent"] for b in BUDGETS] == [None, None, pytest.approx(0.4)]
    for key in ("random_delta", "random_delta_low", "versus_random"):
        assert steep[key] == by_budget["macs 0.5"][key]  # judged once
    assert (steep["versus_random"], good["versus_random"]) == ("worse", "better")
    assert row_of(board, "random_inside")["versus_random"] is None
    assert steep["speed_up"] == pytest.approx(2) and steep["how"] == "drop" and dense["how"] == "-"
    assert dense["kept_accuracy"] == 1 and (good["macs_at_2"], good["macs_at_2_at_most"]) == (pytest.approx(0.3), True)


def test_what_costs_more_than_dense_has_no_area_and_no_rank() -> None:
    dear = records("dear", dict.fromkeys(BUDGETS, 0.99), dict.fromkeys(BUDGETS, 64.0))
    row = row_of(over(judge([*WORLD, *dear])), "dear")
    assert (row["rank"], row["kept_accuracy"], row["macs_at_2"]) == ("not ranked", None, None)
    assert row["accuracy_at_0.5_spent"] == 64


def test_one_budget_or_no_dense_is_no_board_of_curves() -> None:
    single = [r for r in WORLD if r["macs_ratio_asked"] in (0.5, 1.0)]
    for some in (single, [r for r in WORLD if r["strategy"] != "dense"]):
        assert judge(some).over_budgets is None
    assert keys_of(judge(single).columns) == keys_of(columns.ALWAYS_SHOWN)


def test_a_strategy_with_other_budgets_has_its_own_row(world: Leaderboard) -> None:
    """Other budgets of a strategy are a row of their own and the rest is named."""
    inside = records("good", dict.fromkeys(BUDGETS, 0.8))
    inside = [r | in_blocks(r["macs_ratio_asked"], 0, 1) | {"cell_id": f"{r['cell_id']} @"} for r in inside]
    rates = [r | {"budget": "keep 0.5 power-floor", "macs_ratio_asked": None, "cell_id": f"k {r['cell_id']}"}
             for r in records("steep", {0.6: 0.5})]  # fmt: skip
    judged = judge([*WORLD, *inside, *rates])
    assert {"good", "good @0,1"} < set(over(judged).rows["strategy"])
    assert "1 rows have budgets that are no shares of dense MACs" in text(judged, "md")
    assert "no shares of dense MACs" not in text(world, "md")


def test_tracks_are_never_in_one_ranking_and_are_told_apart_in_titles(world: Leaderboard) -> None:
    frozen = [r | {"track": "frozen", "cell_id": f"f {r['cell_id']}"} for r in WORLD if r["strategy"] != "steep"]
    mixed = [*(r | {"track": "scratch"} for r in WORLD), *frozen]
    judged = judge(mixed)
    assert (
        judged.rankings[0].comparison.track == "scratch" and len(over(judged).rows) == 5
    )  # the one with the most records
    alone = over(world).rows  # without differences the task has only its name
    assert dicts(over(judged).rows.drop(columns="task")) == dicts(alone.drop(columns="task"))
    assert any("1 other setting (data, model, size or track) not shown" in note for note in notes_on(mixed, judged))
    by_task = judge(mixed, "task", judged)
    assert {(ranking.task, ranking.comparison.track) for ranking in by_task.rankings} == {
        ("composite(track=frozen)", "frozen"), ("composite(track=scratch)", "scratch"),
    }  # fmt: skip
    assert set(by_task.rows["track"]) == {"frozen", "scratch"}
    assert [len(ranking.rows) for ranking in by_task.rankings] == [7, 10]  # per track, without oracles
    assert not any(column.key == "track" for one in (world, judge(WORLD, "task", world)) for column in one.columns)
    only = judge(frozen)
    assert set(only.rows["track"]) == {"frozen"}


def test_who_was_not_asked_for_the_lowest_budget_has_no_area() -> None:
    """Beyond its points a curve is flat: a strategy that was run only at large budgets would lead."""
    some = [*WORLD, *records("easy", {max(BUDGETS): 0.9})]
    judged = judge(some)
    easy = row_of(over(judged), "easy")
    assert (easy["rank"], easy["kept_accuracy"]) == ("not ranked", None)
    assert any(
        line.startswith("easy on composite: not ranked there, without macs 0.5, macs 0.3;")
        for line in notes_on(some, judged)
    )
    hard = [r | {"status": "unsupported"} for r in records("easy", dict.fromkeys(BUDGETS[1:], 0.9))]
    judged = judge([*some, *hard])
    assert row_of(over(judged), "easy")["rank"] == "not ranked"
    assert "easy on composite: 6 cells unsupported: " in notes_on([*some, *hard], judged)


def test_a_metric_that_a_task_declares_is_shown_at_the_middle_budget() -> None:
    frame = pd.DataFrame([record | {"doubt": 0.125 + record["macs_ratio"]} for record in WORLD])
    frame.attrs[DECLARED] = [asdict(MetricKind("doubt", "nats", "how unsure it is", title="doubt, mean"))]
    judged = judge(frame)
    at_middle = judged.rows[judged.rows["budget"].isin(("macs 0.5", "macs 1"))].set_index("strategy")["doubt"]
    doubt = over(judged).rows["doubt"]
    assert doubt.to_dict() == at_middle.to_dict() and doubt["dense"] == 1.125
    made = text(judged, "md")
    assert "| doubt, mean @.5 |" in made.replace("  ", "") and "doubt, mean @.5: how unsure it is, in nats." in made
    header, *_ = csv.reader(io.StringIO(text(judged, "csv")))
    assert header[-1] == "doubt"


def test_a_board_begins_with_the_data_and_the_best(world: Leaderboard) -> None:
    """At 0.7 one strategy is the best, at lower budgets another; oracles and baselines do not count."""
    table = best(world.rankings[0])
    assert all(
        part in table.above for part in ("composite, 6 classes, 600 test ", "3 networks of model vit", "scratch")
    )
    rows = {row["budget"]: row for row in table.rows}
    assert list(rows) == ["1", "0.7", "0.5", "0.3"] and rows["1"]["best"] == "dense"
    assert [rows[budget]["best"] for budget in ("0.7", "0.5")] == ["steep", "good"]
    accuracy = {(r["strategy"], r["macs_ratio_asked"]): [] for r in WORLD}  # type: ignore[var-annotated]
    for record in WORLD:
        accuracy[record["strategy"], record["macs_ratio_asked"]].append(record["accuracy"])
    good, dense, random = (np.mean(accuracy[key]) for key in (("good", 0.5), ("dense", 1.0), ("random_inside", 0.5)))
    expected = {"accuracy": good, "random": random, "speed_up": 2.0, "accuracy_delta": good - dense,
                "random_delta": good - random}  # fmt: skip
    assert {key: rows["0.5"][key] for key in expected} == pytest.approx(expected)
    single = judge([r | {"macs_ratio_asked": None} for r in WORLD if r["macs_ratio_asked"] in (0.5, 1.0)])
    assert [(row["budget"], row["best"]) for row in best(single.rankings[0]).rows] == [
        ("1", "dense"),
        ("macs 0.5", "good"),
    ]
    for judged in (world, single):
        made = text(judged, "table")
        assert made.index("task composite") < made.index("most accurate") < made.index("All strategies")
