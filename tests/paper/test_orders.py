"""Published orders: the votes of tables, and what boards say of them."""

import csv
import io
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sparsebench.cli import main
from sparsebench.paper import orders
from sparsebench.plan.contenders import settings_of
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.budget import FULL

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
