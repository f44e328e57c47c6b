"""Published orders: the votes of tables, and what boards say of them."""

import csv
import io
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from flats import Flat, budgeted, of_items
from published_boards import write_part

from sparsebench.board.judge import judge
from sparsebench.board.tables import render
from sparsebench.cli import main
from sparsebench.paper import orders
from sparsebench.plan.contenders import settings_of
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.budget import FULL, Budget

NETWORKS = 6
HEAD = """
[[order]]
id = "{id}"
source = "{source}"
model = "DeiT-S"
training = "none"
baselines = "run"
matched = "{matched}"
unit = "GMACs"
dense_cost = 4
dense_accuracy = 80
"""


def table(id: str, matched: str, *rows: list[tuple[str, float, float]], source: str = "S") -> str:
    """Return a table of the ledger; a row has methods with plugin, cost and accuracy."""
    text = HEAD.format(id=id, matched=matched, source=source)
    for row in rows:
        results = [
            f'{{ method = "M", plugin = "{plugin}", cost = {cost}, accuracy = {accuracy} }}'
            for plugin, cost, accuracy in row
        ]
        text += f"[[order.row]]\nresults = [{', '.join(results)}]\n"
    return text


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["claims", "--order", *words])


def votes(file: Path, *tables: str) -> list[dict[str, str]]:
    """Return the votes of a ledger with these tables, as the command writes them."""
    file.write_text("".join(tables))
    result = run("--file", str(file), "--format", "csv")
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))


def test_a_table_has_the_vote_of_the_majority_of_the_rows_that_answer(tmp_path: Path) -> None:
    rows = (
        [("tome:per_block=8", 2.0, 70.0), ("evit", 2.0, 70.3)],  # .3 points are not enough
        [("tome:per_block=13", 2.4, 71.0), ("evit", 2.4, 71.4)],
        [("tome:per_block=16", 3.0, 72.0), ("evit", 3.2, 72.5)],
        [("tome:per_block=20", 3.6, 74.0), ("evit", 3.6, 73.0)],
    )
    (vote,) = votes(tmp_path / "a.toml", table("a", "cost", *rows))
    assert (vote["better"], vote["worse"], vote["rows"]) == ("evit", "tome", "2 of 3")
    assert float(vote["share"]) == pytest.approx((2.4 + 2.4 + 3.0 + 3.2 + 3.6 + 3.6) / 6 / 4)


def test_a_table_has_no_vote_if_no_row_answers_or_as_many_for_each(tmp_path: Path) -> None:
    tie = table("tie", "cost", [("tome", 2, 70), ("evit", 2, 71)], [("tome", 3, 75), ("evit", 3, 74)])
    equal = table("equal", "throughput", [("tome", 2, 70), ("evit", 2, 70.2)])
    assert votes(tmp_path / "a.toml", tie, equal) == []


def test_at_equal_accuracy_the_cheaper_method_is_better_by_more_than_a_twentieth(tmp_path: Path) -> None:
    row = [("tome", 3.0, 79.0), ("evit", 2.86, 79.0), ("mctf", 2.8, 79.0)]
    found = votes(tmp_path / "a.toml", table("a", "accuracy", row))
    assert [(vote["better"], vote["worse"], vote["loss"]) for vote in found] == [("mctf", "tome", "1")]


def test_methods_without_a_strategy_have_no_vote(tmp_path: Path) -> None:
    assert votes(tmp_path / "a.toml", table("a", "cost", [("", 2, 70), ("evit", 2, 75)])) == []


def test_a_wrong_table_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text(table("short", "accuracy", [("tome", 2, 70), ("evit", 2, 75)]).replace("dense_accuracy = 80\n", ""))
    result = run("--file", str(file))
    assert result.exit_code == 2 and "short" in result.output and "dense_accuracy" in result.output


def test_the_settings_of_the_ledger_can_be_typed() -> None:
    registry = Registry()
    results = [result for order in orders.load() for row in order.row for result in row.results if result.plugin]
    for plugin in {result.plugin for result in results}:
        assert len(settings_of(plugin, registry, [FULL])) == 1, plugin


def strategy(name: str, rates: dict[float, float], schedule: str | None = None, **more: float) -> list[Flat]:
    """Return the records of some networks at some budgets; by default they spend their budget."""
    flats = []
    for asked, rate in rates.items():
        about = budgeted(Budget(macs=asked, schedule=schedule)) | {"macs_ratio": asked, "track": "frozen"} | more
        for seed in range(NETWORKS):
            where = {"cell_id": f"{name} {asked} {seed} {schedule}", "setting": "s", "network": f"network {seed}"}
            flats.append(of_items(name, seed, asked, rate, **about, **where))
    return flats


DENSE = strategy("dense", {1.0: 0.9})
STEEP, FLAT = {0.7: 0.88, 0.5: 0.5, 0.3: 0.3}, {0.7: 0.8, 0.5: 0.78, 0.3: 0.75}


def said(file: Path, tables: list[str], flats: list[Flat]) -> list[dict[str, str]]:
    """Return what a board says to the votes of some tables."""
    file.write_text("".join(tables))
    report = orders.report_on_boards(orders.load(file), {"board": judge(flats)})
    return list(csv.DictReader(io.StringIO(render(report, "csv"))))


def vote(id: str, better: str, worse: str, share: float, source: str = "S") -> str:
    """Return a table with one vote at a share of dense cost."""
    return table(id, "cost", [(better, 4 * share, 75), (worse, 4 * share, 70)], source=source)


def test_a_board_answers_at_the_budget_nearest_to_the_cost_of_the_table(tmp_path: Path) -> None:
    board = [*DENSE, *strategy("tome", STEEP), *strategy("evit", FLAT)]
    tables = [vote(f"at-{share:g}", "tome", "evit", share) for share in (0.9, 0.62, 0.6, 0.1)]
    found = {row["order"]: (row["at"], row["said"]) for row in said(tmp_path / "a.toml", tables, board)}
    assert found == {
        "at-0.9": ("0.7", "agrees"), "at-0.62": ("0.7", "agrees"),
        "at-0.6": ("0.5", "opposite"),  # the smaller one of two that are equally near
        "at-0.1": ("0.3", "opposite"),
    }  # fmt: skip


def test_the_difference_on_a_board_has_an_interval_around_it(tmp_path: Path) -> None:
    board = [*DENSE, *strategy("tome", STEEP), *strategy("evit", FLAT)]
    (row,) = said(tmp_path / "a.toml", [vote("a", "evit", "tome", 0.5)], board)
    mean, low, high = (float(row[key]) for key in ("difference", "difference_low", "difference_high"))
    assert low < mean < high
    assert (low + high) / 2 == pytest.approx(mean) == pytest.approx(0.28, abs=0.02)


def test_chosen_and_default_schedules_answer_apart(tmp_path: Path) -> None:
    board = [
        *DENSE,
        *strategy("tome", {0.5: 0.8}), *strategy("tome", {0.5: 0.6}, "auto"),
        *strategy("evit", {0.5: 0.7}), *strategy("evit", {0.5: 0.7}, "auto"),
        *strategy("patch_variance", {0.5: 0.5}),
    ]  # fmt: skip
    tables = [vote("a", "tome", "evit", 0.5), vote("b", "evit", "patch_variance", 0.5)]
    found = {(row["order"], row["schedules"]): row["said"] for row in said(tmp_path / "a.toml", tables, board)}
    assert found == {
        ("a", "published"): "agrees", ("a", "auto"): "opposite",
        ("b", "published"): "agrees", ("b", "auto"): "agrees",
    }  # fmt: skip


def test_at_equal_accuracy_a_board_compares_the_macs_at_the_loss_of_the_table(tmp_path: Path) -> None:
    board = [*DENSE, *strategy("tome", STEEP), *strategy("evit", FLAT)]
    row = [("tome", 2.0, 80.0), ("evit", 2.5, 80.0)]
    small = table("small", "accuracy", [(plugin, cost, 74.0) for plugin, cost, _ in row])  # six points
    large = table("large", "accuracy", [(plugin, cost, 60.0) for plugin, cost, _ in row])  # twenty points
    found = {one["order"]: one for one in said(tmp_path / "a.toml", [small, large], board)}
    assert (found["small"]["said"], found["small"]["at"]) == ("agrees", "loss of 6 points")
    assert (found["large"]["said"], found["large"]["at"]) == ("opposite", "loss of 20 points")
    # At six points evit has lost more at its largest budget. It never loses twenty, and tome does between .7 and .5.
    assert float(found["large"]["difference"]) == pytest.approx(0.7 - 0.2 * 18 / 38 - 0.3, abs=0.02)


def test_curves_that_never_lose_as_much_do_not_differ(tmp_path: Path) -> None:
    flat, more = {0.7: 0.8, 0.5: 0.78}, {0.3: 0.75}
    board = [
        *DENSE, *strategy("tome", flat | more),
        *strategy("evit", flat), *strategy("evit", more, macs_ratio=0.28),
    ]  # fmt: skip
    order = table("a", "accuracy", [("tome", 2.0, 60.0), ("evit", 2.5, 60.0)])
    (row,) = said(tmp_path / "a.toml", [order], board)
    assert (row["said"], float(row["difference"])) == ("no answer", 0)


def test_boards_do_not_answer_without_a_significant_difference_or_at_a_higher_cost(tmp_path: Path) -> None:
    board = [
        *DENSE, *strategy("tome", {0.5: 0.7}), *strategy("evit", {0.5: 0.7}),
        *strategy("mctf", {0.5: 0.8}, macs_ratio=0.6),
    ]  # fmt: skip
    pairs = [("tome", "evit"), ("mctf", "evit"), ("evit", "mctf"), ("tome", "ats")]
    tables = [vote(f"{one}-{other}", one, other, 0.5) for one, other in pairs]
    found = {row["order"]: (row["said"], row["why"]) for row in said(tmp_path / "a.toml", tables, board)}
    spends = ("no answer", "mctf is better and spends more")
    assert found == {
        "tome-evit": ("no answer", "not significant"), "mctf-evit": spends, "evit-mctf": spends,
        "tome-ats": ("not measured", "not measured"),
    }  # fmt: skip


def test_the_share_that_agrees_counts_answers_alone_and_copied_tables_apart(tmp_path: Path) -> None:
    board = [
        *DENSE,
        *strategy("tome", STEEP),
        *strategy("evit", FLAT),
        *strategy("mctf", {0.7: 0.6, 0.5: 0.4, 0.3: 0.3}),
    ]
    tables = [
        vote("a", "tome", "evit", 0.7, "A"), vote("b", "evit", "tome", 0.7, "B"), vote("c", "evit", "mctf", 0.7, "C"),
        vote("d", "tome", "mctf", 0.3, "D"), vote("e", "ats", "mctf", 0.5, "D"),
        vote("f", "tome", "mctf", 0.7, "E").replace('"run"', '"partly copied"'),
    ]  # fmt: skip
    file = tmp_path / "a.toml"
    file.write_text("".join(tables))
    report = orders.report_on_boards(orders.load(file), {"board": judge(board)})
    shares, opposites = report.tables
    counts = ("baselines", "n_votes", "agrees", "opposite", "no_answer", "not_measured", "n_tables", "n_pairs")
    assert [[row[key] for key in counts] for row in shares.rows] == [
        ["run", 5, 2, 1, 1, 1, 3, 2],
        ["copied", 1, 1, 0, 0, 0, 1, 1],
    ]
    (row, _) = shares.rows
    assert row["share"] == pytest.approx(2 / 3) and row["share_low"] < 0.3 and row["share_high"] > 0.9
    assert [(row["order"], row["explanation"]) for row in opposites.rows] == [("b", "not explained")]


def test_class_attention_ahead_of_mergers_is_explained_where_few_tokens_are_relevant(tmp_path: Path) -> None:
    def board(relevant: float) -> list[Flat]:
        dense = strategy("dense", {1.0: 0.9}, selection_precision=relevant)
        return [*dense, *strategy("tome", {0.5: 0.6}), *strategy("evit", {0.5: 0.8})]

    tables = [vote("a", "tome", "evit", 0.5)]
    explanations = [said(tmp_path / "a.toml", tables, board(relevant))[0]["explanation"] for relevant in (0.1, 1.0)]
    assert "relevant" in explanations[0] and explanations[1] == "not explained"


def test_an_explanation_holds_at_the_budgets_at_which_it_was_measured(tmp_path: Path) -> None:
    rates = {0.7: 0.8, 0.5: 0.8, 0.3: 0.8}
    dense = strategy("dense", {1.0: 0.9}, selection_precision=0.1)
    board = [*dense, *strategy("tome", {budget: 0.6 for budget in rates}), *strategy("evit", rates)]
    tables = [vote(f"at-{budget}", "tome", "evit", budget) for budget in rates]
    tables.append(table("loss", "accuracy", [("tome", 2.0, 65.0), ("evit", 2.5, 65.0)]))
    found = {row["order"]: row for row in said(tmp_path / "a.toml", tables, board)}
    assert {row["said"] for row in found.values()} == {"opposite"}
    explained = [name for name, row in found.items() if row["explanation"] != "not explained"]
    assert explained == ["at-0.5"]


def test_the_command_takes_folders_of_boards(tmp_path: Path) -> None:
    folder = write_part(tmp_path / "board", ("dense", "tome", "attn_topk", "random", "random_inside"))
    result = run(str(folder), "--format", "json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert {row["order"] for row in rows} > {"dora-deit-b", "mame-deit-s"}
    assert {row["said"] for row in rows} <= {"agrees", "opposite", "no answer", "not measured"}


def test_a_folder_without_records_is_an_error(tmp_path: Path) -> None:
    result = run(str(tmp_path))
    assert result.exit_code == 2 and str(tmp_path) in result.output
