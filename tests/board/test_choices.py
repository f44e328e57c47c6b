"""Tables with the strategies and columns that a user names, and the sentence on a board's only strategy."""

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from flats import Flat, drawn, in_blocks, of_items, seeded, with_outcomes
from matplotlib.figure import Figure

from sparsebench.board import picture, views
from sparsebench.board.board import Board, gather
from sparsebench.board.columns import Column, dicts
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.published import page
from sparsebench.board.tables import fit, render
from sparsebench.cli import main
from sparsebench.records import store, table

SOME = ["dense", "random", "random_inside", "anti_oracle", "attn_topk", "evit", "noise", "tome"]
QUICK = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the records of some strategies of the frozen track of a board; do not write to it."""
    path = tmp_path_factory.mktemp("chosen")
    rows = store.rows(QUICK).filter((pc.field("task") == "composite") & pc.field("strategy").isin(SOME))
    table.write(path / "records" / "some.parquet", rows, {})
    return path


def call(*words: object) -> str:
    result = CliRunner().invoke(main, ["leaderboard", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*words: object) -> str:
    result = CliRunner().invoke(main, ["leaderboard", *map(str, words)])
    assert result.exit_code == 2 and "Traceback" not in result.output
    return result.output


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


VIEWS = ("board", "matched", "paper")


@pytest.mark.parametrize("view", VIEWS)
def test_a_file_has_the_chosen_strategies_and_dense(folder: Path, view: str) -> None:
    """A file has the named strategies and dense with the numbers of the whole board."""
    words = (folder, "--view", view, "--format", "csv")
    chosen = rows_of(call(*words, "--strategies", "tome, random"))
    whole = rows_of(call(*words))
    assert chosen == [row for row in whole if row["strategy"] in ("dense", "tome", "random")]
    assert len(whole) > len(chosen) and {row["strategy"] for row in chosen} >= {"tome", "random"}


def test_pairs_are_those_between_the_named_strategies_and_dense(folder: Path) -> None:
    words = (folder, "--view", "pairs", "--format", "json")
    chosen = json.loads(call(*words, "--strategies", "tome,attn_topk"))
    assert chosen == [
        row for row in json.loads(call(*words)) if {row["strategy"], row["other"]} <= {"dense", "tome", "attn_topk"}
    ]
    assert len(chosen) == 9 * 8 / 2  # two strategies at four budgets, and dense


@pytest.mark.parametrize(
    ("view", "form"),
    [
        ("board", "table"),
        ("board", "md"),
        ("board", "latex"),
        ("matched", "md"),
        ("paper", "latex"),
        ("pairs", "table"),
    ],
)
def test_a_table_for_people_names_no_other_strategy(folder: Path, view: str, form: str) -> None:
    text = call(folder, "--view", view, "--format", form, "--strategies", "tome,attn_topk", "--columns", COLUMNS[view])
    assert "tome" in text and "dense" in text
    assert "noise" not in text and "anti" not in text


COLUMNS = {"board": "strategy,accuracy", "matched": "strategy,rank", "paper": "method,accuracy",
           "pairs": "strategy,other,p"}  # fmt: skip


def test_of_the_named_strategies_the_table_of_a_paper_marks_the_best(folder: Path) -> None:
    """The most accurate strategies of the board are not among them."""
    text = call(folder, "--view", "paper", "--format", "latex", "--strategies", "noise,random")
    marked = [line for line in text.splitlines() if r"\textbf" in line]
    assert len(marked) == 4 and all(line.startswith("random ") for line in marked)


def test_an_unknown_strategy_is_named_with_the_nearest(folder: Path) -> None:
    for view in (*VIEWS, "pairs"):
        assert "did you mean 'tome'" in refused(folder, "--view", view, "--strategies", "tomme")
    assert "--strategies" in refused(folder, "--strategies", "tome", "--format", "html", "-o", "page.html")


def test_parameters_of_a_strategy_may_have_commas(folder: Path, tmp_path: Path) -> None:
    rows = store.rows(folder).to_pylist()
    for row in rows:
        row["strategy"] = {"tome": "mine(a=1,b=2)", "noise": "mine(a=1,b=3)"}.get(row["strategy"], row["strategy"])
    table.write(
        tmp_path / "records" / "some.parquet", store.rows(folder).from_pylist(rows, store.rows(folder).schema), {}
    )
    shown = rows_of(call(tmp_path, "--format", "csv", "--strategies", "mine(a=1,b=3),random"))
    assert {row["strategy"] for row in shown} == {"dense", "mine(a=1,b=3)", "random"}


def test_the_caption_of_a_paper_has_the_number_of_networks() -> None:
    def caption(*parts: list[Flat]) -> str:
        return render(views.paper(judge([row for part in parts for row in part]).rankings), "latex")

    dense, mine = seeded("dense", [0.8, 0.7, 0.9, 0.8]), seeded("mine", [0.7, 0.6, 0.8, 0.7])
    assert re.search(r"\b4 networks", caption(dense, mine))
    assert re.search(r"\b1 network\b", caption(dense[:1], mine[:1]))


@pytest.mark.parametrize("names", ["budget", "strategy,budget,accuracy", "n_seeds,kept_accuracy_rank", "badge,rank"])
def test_the_same_columns_are_in_every_format(folder: Path, names: str) -> None:
    (header, *lines) = csv.reader(io.StringIO(call(folder, "--columns", names, "--format", "csv")))
    assert [name for name in header if not name.endswith(("_low", "_high"))] == names.split(",")
    shown = call(folder, "--columns", names, "--format", "md").split("\n\n")[0].splitlines()
    assert shown[0].count("|") == len(names.split(",")) + 1
    if "budget" in names or "n_seeds" in names:  # columns of a row for each strategy and budget
        assert len(shown) - 2 == len(lines)


def test_a_column_of_the_table_of_strategies_is_in_a_file_too(folder: Path) -> None:
    words = (folder, "--columns", "strategy,accuracy_at_0.7")
    in_file = {row["strategy"]: row["accuracy_at_0.7"] for row in rows_of(call(*words, "--format", "csv"))}
    assert f"{100 * float(in_file['tome']):.1f}" in call(*words) and in_file["dense"] == ""


def test_columns_that_no_table_has_together_are_refused(folder: Path) -> None:
    for form in ("table", "csv"):
        assert "accuracy_at_0.7" in refused(folder, "--columns", "accuracy_at_0.7,budget", "--format", form)
        assert "allowed: " in refused(folder, "--columns", "budgets", "--format", form)


BUDGETS = (0.8, 0.6, 0.4)


def at_budgets(strategy: str, rates: Sequence[float], **more: Any) -> list[Flat]:
    return [
        of_items(strategy, seed, asked, rate, setting="s", **more)
        for asked, rate in zip(BUDGETS, rates, strict=False)
        for seed in range(4)
    ]


BASE = [
    *(of_items("dense", seed, 1.0, 0.9, setting="s") for seed in range(4)),
    *at_budgets("random_inside", [0.7, 0.6, 0.5]),
]
MIXED = at_budgets("mine", [0.85, 0.6, 0.2])


def sentences_of(judged: Leaderboard) -> list[str]:
    """Return the parts of the sentence on a board's only strategy, as the terminal, Markdown and the page have it."""
    terminal = re.findall(r"^.*against random tokens.*$", render(views.report(judged), "table"), re.MULTILINE)
    markdown = re.findall(r"^.*against random tokens.*$", render(views.report(judged), "md"), re.MULTILINE)
    shown = re.findall(r"<p>(.*against random tokens.*)</p>", page(Board(judged, judged)).decode())
    assert terminal == markdown == shown
    return [part for text in terminal for part in text.split(". ")[0].partition(": ")[2].split("; ")]


def test_a_board_says_how_its_only_strategy_compares_with_random_tokens() -> None:
    judged = judge([*BASE, *MIXED])
    rows = {row["budget"]: row for row in dicts(judged.rows) if row["strategy"] == "mine"}
    assert {budget: row["versus_random"] for budget, row in rows.items()} == {
        "macs 0.8": "better", "macs 0.6": "not significant", "macs 0.4": "worse",
    }  # fmt: skip
    parts = sentences_of(judged)
    assert len(parts) == 3
    for part, budget, words in zip(
        parts, ("macs 0.8", "macs 0.6", "macs 0.4"), ("better", "not significantly", "worse"), strict=True
    ):
        points = [100 * rows[budget][f"random_delta{end}"] for end in ("", "_low", "_high")]
        assert words in part and re.findall(r"macs [\d.]+", part) == [budget]
        assert [float(number) for number in re.findall(r"[-+]?\d+\.\d", part.partition("(")[2])] == pytest.approx(
            points, abs=0.051
        )


def test_other_boards_have_no_sentence_about_random_tokens() -> None:
    """A board of several strategies or without random tokens has no such sentence."""
    others = at_budgets("other", [0.8, 0.7, 0.6])
    assert sentences_of(judge([*BASE, *MIXED, *others])) == []
    assert sentences_of(judge(BASE)) == []
    assert sentences_of(judge([row for row in [*BASE, *MIXED] if row["strategy"] != "random_inside"])) == []


def test_the_most_accurate_is_compared_with_the_better_random_tokens() -> None:
    """At each budget they are those at the input or those inside the network, whichever are more accurate."""
    at_input = at_budgets("random", [0.5, 0.65, 0.3])
    judged = judge([*BASE, *MIXED, *at_input])
    (ranking,) = judged.rankings
    accuracies = {(row["strategy"], row["budget"]): row["accuracy"] for row in dicts(ranking.rows)}
    rows = [row for row in views.best(ranking).rows if row["best"] == "mine"]
    better = ("random_inside", "random", "random_inside")
    for row, budget, name in zip(rows, ("macs 0.8", "macs 0.6", "macs 0.4"), better, strict=True):
        assert row["random"] == pytest.approx(accuracies[name, budget])
        gain = accuracies["mine", budget] - accuracies[name, budget]
        assert row["random_delta"] == pytest.approx(gain)
        assert row["random_delta_low"] < gain < row["random_delta_high"]


def test_random_tokens_beyond_the_budget_are_not_those_of_a_leader() -> None:
    costly = at_budgets("random", [0.95, 0.95, 0.95])
    for row in costly:
        row["macs_ratio"] = 0.97
    (ranking,) = judge([*BASE, *MIXED, *costly]).rankings
    assert [row["random"] for row in views.best(ranking).rows if row["best"] == "mine"] == pytest.approx(
        [row["accuracy"] for row in dicts(ranking.rows) if row["strategy"] == "random_inside"][::-1]
    )


def test_random_tokens_of_other_blocks_are_those_of_a_leader() -> None:
    rows = [*with_outcomes("dense", drawn(0.9, 0)), *with_outcomes("mine", drawn(0.8, 1), **in_blocks(0.5, 1, 2))]
    rows += with_outcomes("random_inside", drawn(0.6, 2), **in_blocks(0.5, 3))
    (ranking,) = judge(rows).rankings
    (best,) = (row for row in views.best(ranking).rows if row["best"] == "mine")
    assert best["random_delta"] == pytest.approx(best["accuracy"] - best["random"]) and best["random_delta"] > 0.1


def test_a_budget_that_the_only_strategy_exceeds_is_no_comparison() -> None:
    costly = at_budgets("mine", [0.85, 0.8, 0.7])
    for row in costly:
        row["macs_ratio"] = max(row["macs_ratio"], 0.55)  # beyond the budget 0.4
    (part,) = sentences_of(judge([*BASE, *costly]))
    assert re.findall(r"macs [\d.]+", part) == ["macs 0.8", "macs 0.6"]


LONG = [f"mixture_of_depths(switch={x},heads=2,rounds=12)" for x in ("0.125", "0.250", "0.375")]
GRID = [f"mine(alpha={a},a_long_parameter=10,beta={b})" for a in (1, 2) for b in (1, 2, 3)]


def labels(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("names", [LONG, GRID], ids=["one parameter", "grid"])
def test_variants_are_told_apart_in_pictures_and_narrow_tables(names: list[str]) -> None:
    records = [*BASE, *(row for k, name in enumerate(names) for row in at_budgets(name, [0.85, 0.8 - k / 50, 0.6]))]
    judged = judge(records)
    for width in ("one", "two"):
        made = labels(picture.draw(Board(judged, judged), strategies=names, width=width))
        assert len(set(made)) == len(made) == len(names) + 1
        assert all(len(text) < 40 for text in made)
    dots = picture.draw(
        Board(judge([row for row in records if row["budget"] in ("macs 1", "macs 0.6")]), judged), width="one"
    )
    rows = [tick.label1.get_text() for tick in dots.axes[0].yaxis.get_major_ticks()]
    assert len(set(rows)) == len(rows) == len(names) + 2
    columns = [Column("strategy", "strategy", "text", ""), Column("accuracy", "accuracy", "percent", "")]
    shown, _ = fit([{"strategy": name, "accuracy": 0.5} for name in [*names, "dense", names[0]]], columns, 34)
    cells = [row["strategy"] for row in shown]
    assert cells[0] == cells[-1] and len(set(cells)) == len(cells) - 1 and cells[-2] == "dense"
    assert max(map(len, cells)) <= 34


def test_third_party_strategies_are_named_and_in_colour_in_the_picture() -> None:
    """By default the picture names the best; a third-party strategy is named even if it is the worst."""
    rates = {f"s{k}": 0.88 - k / 100 for k in range(9)} | {"mine": 0.2}
    records = [row for name, rate in rates.items() for row in at_budgets(name, [rate, rate, rate - 0.1])]
    judged = judge([*BASE, *records])
    without = labels(picture.draw(Board(judged, judged)))
    assert "mine" not in without and len(without) < 9
    assert {*labels(picture.draw(Board(judged, judged, third_party=frozenset({"mine"}))))} == {*without, "mine"}


def test_the_origin_of_a_strategy_decides_whether_it_is_third_party(folder: Path, tmp_path: Path) -> None:
    rows = store.rows(folder).to_pylist()
    for row in rows:
        if row["strategy"] in ("tome", "noise"):
            row["distribution"] = {"tome": "", "noise": "a-package-of-mine"}[row["strategy"]]
    table.write(
        tmp_path / "records" / "some.parquet", store.rows(folder).from_pylist(rows, store.rows(folder).schema), {}
    )
    assert gather(tmp_path).third_party == {"tome", "noise"} and not gather(folder).third_party


@pytest.mark.parametrize(
    ("task", "items"), [('{"images":"digits","canvas":32}', "images"), ('{"tokens":50}', "samples")]
)
def test_tokens_of_a_task_without_pictures_are_no_images(task: str, items: str) -> None:
    setting = f'[{{"name":"t","params":{task}}},{{"name":"m","params":{{}}}}]'
    hits = np.ones((2, 50), dtype=bool)
    (ranking,) = judge(with_outcomes("dense", hits, setting=setting)).rankings
    text = views.best(ranking).above
    assert f"50 test {items}" in text and ("image" in text) == (items == "images")
