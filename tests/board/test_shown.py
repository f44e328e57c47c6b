"""What the terminal's table, Markdown, the page and the pictures of a board must show, however they word it.

The board has the published records of six strategies on one task; one cell of `noise` failed. Expected accuracies are
computed from the records alone.
"""

import functools
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from flats import WHOLE, with_outcomes

from sparsebench.board import picture
from sparsebench.board.board import Board, gather
from sparsebench.board.judge import judge
from sparsebench.board.published import page
from sparsebench.cli import main
from sparsebench.records import store, table
from sparsebench.records.record import Failure, Record

QUICK = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"
STRATEGIES = ["dense", "tome", "attn_topk", "noise", "random_inside", "oracle"]
BUDGETS = (0.7, 0.5)
REASON = "the disk was full"
Accuracies = dict[tuple[str, float], float]


def fails(record: Record) -> bool:
    cell = record.cell
    return (cell.strategy.name, cell.budget.macs, cell.repetition) == ("noise", 0.5, 0)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    rows = store.rows(QUICK)
    rows = rows.filter(pc.field("strategy").isin(STRATEGIES) & (pc.field("task") == "composite"))
    failed: dict[str, Any] = {
        "status": "failed", "metrics": {}, "outcomes": None, "failure": Failure(reason=REASON),
    }  # fmt: skip
    every = [table.record_of(row) for row in table.rows_of(rows)]
    every = [record for record in every if record.cell.budget.macs in (*BUDGETS, 1.0) and not is_default(record)]
    return [record.model_copy(update=failed) if fails(record) else record for record in every]


def is_default(record: Record) -> bool:
    """Whether it is a row beside a chosen schedule, which is shown with a name of its own."""
    return record.cell.strategy.name == "tome" and record.cell.budget.schedule is None


@pytest.fixture(scope="module")
def folder(records: list[Record], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown")
    sidecars = store.sidecars(QUICK, *store.SIDECARS)
    table.write(path / "records" / "some.parquet", table.table_of((record, 0) for record in records), sidecars)
    return path


@pytest.fixture(scope="module")
def board(folder: Path) -> Board:
    return gather(folder)


@pytest.fixture(scope="module")
def accuracies(records: list[Record]) -> Accuracies:
    """Return the mean accuracy of each strategy at each budget, over seeds without a failed cell."""
    incomplete = {(record.cell.strategy.name, record.cell.repetition) for record in records if fails(record)}
    values = defaultdict(list)
    for record in records:
        if (record.cell.strategy.name, record.cell.repetition) not in incomplete:
            values[record.cell.strategy.name, record.cell.budget.macs or 1.0].append(record.metrics["accuracy"].value)
    return {key: float(np.mean(of_seeds)) for key, of_seeds in values.items()}


Printed = Callable[[str], str]


@pytest.fixture(scope="module")
def printed(folder: Path) -> Printed:
    """Return a function that prints the board in a format, once for each format."""

    @functools.cache
    def print_in(form: str) -> str:
        result = CliRunner().invoke(main, ["leaderboard", str(folder), "--format", form])
        assert result.exit_code == 0, result.output
        return result.output

    return print_in


def rows_of(text: str, form: str) -> dict[str, dict[str, str]]:
    """Return the cells of the table with the strategies, by strategy and heading."""
    rows: dict[str, dict[str, str]] = {}
    headings: list[str] = []
    for line in text.splitlines():
        cells = line.strip("| ").split("|") if form == "md" else re.split(r"\s{2,}", line.strip())
        cells = [cell.strip() for cell in cells]
        if "rank" in cells and "strategy" in cells:
            headings = cells
        elif len(cells) == len(headings) and cells[headings.index("strategy")] in STRATEGIES:
            rows[cells[headings.index("strategy")]] = dict(zip(headings, cells, strict=True))
    return rows


def data_of_page(board: Board) -> list[dict[str, Any]]:
    """Return the rows that a page has for its scripts."""
    text = page(board).decode().split('id="data">')[1].split("</script>")[0]
    (setting,) = json.loads(text)["settings"]
    return [dict(zip(setting["keys"], row, strict=True)) for row in setting["rows"]]


@pytest.mark.parametrize("form", ["table", "md"])
def test_a_table_has_the_accuracy_of_each_strategy_at_each_budget(
    printed: Printed, accuracies: Accuracies, form: str
) -> None:
    rows = rows_of(printed(form), form)
    for strategy in set(STRATEGIES) - {"dense"}:
        for budget in BUDGETS:
            text = rows[strategy][f"@{budget:g}".replace("@0.", "@.")]
            assert float(text) == pytest.approx(100 * accuracies[strategy, budget], abs=0.051), (strategy, budget)


def test_a_page_has_the_accuracy_of_each_strategy_at_each_budget(board: Board, accuracies: Accuracies) -> None:
    on_page = {(row["strategy"], row["at"] or 1.0): row["accuracy"] for row in data_of_page(board)}
    assert on_page == pytest.approx(accuracies, abs=1e-5)


@pytest.mark.parametrize("form", ["table", "md"])
def test_strategies_that_do_not_differ_share_an_interval_of_ranks(printed: Printed, form: str) -> None:
    ranks = {strategy: row["rank"] for strategy, row in rows_of(printed(form), form).items()}
    assert ranks["attn_topk"] == ranks["tome"] == "1-2" and ranks["random_inside"] == "3"
    assert not {ranks[name] for name in ("dense", "oracle", "noise")} & {"1", "2", "3", "4", "5", "6"}


def test_a_page_has_the_ranks_of_the_table(printed: Printed, board: Board) -> None:
    ranks = {row["strategy"]: row["rank"] or "-" for row in data_of_page(board)}
    assert ranks == {strategy: row["rank"] for strategy, row in rows_of(printed("table"), "table").items()}


@pytest.mark.parametrize("form", ["table", "md"])
def test_dense_is_the_first_row_and_oracles_the_last(printed: Printed, form: str) -> None:
    names = list(rows_of(printed(form), form))
    assert names[0] == "dense" and names[-1] == "oracle" and sorted(names) == sorted(STRATEGIES)


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_a_note_names_the_strategy_with_a_failed_cell_and_the_reason(printed: Printed, form: str) -> None:
    lines = [line for line in printed(form).splitlines() if REASON in line]
    assert any("noise" in line for line in lines)


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_the_best_strategy_at_each_budget_stands_above_all_strategies(
    printed: Printed, accuracies: Accuracies, form: str
) -> None:
    text = re.sub(r"<t[hdr][^>]*>", " ", printed(form))
    above = text[: text.index("All strategies")].splitlines()
    for budget in BUDGETS:
        # The oracle and baselines are no candidates.
        best = max(("tome", "attn_topk", "noise"), key=lambda name: accuracies[name, budget])
        (line,) = (words for line in above if (words := line.replace("|", " ").split()) and words[0] == f"{budget:g}")
        assert line[1] == best and float(line[2]) == pytest.approx(100 * accuracies[best, budget], abs=0.051)


@pytest.mark.parametrize("form", ["table", "md", "html"])
def test_a_board_says_what_was_measured(printed: Printed, form: str) -> None:
    text = printed(form)
    for fact in ("task composite", "3 networks", "1,000 test images", "track frozen"):
        assert fact in text


def test_curves_have_a_line_for_each_strategy_with_a_point_at_each_budget(board: Board, accuracies: Accuracies) -> None:
    (axes,) = picture.draw(board, strategies=["tome", "noise"]).axes
    lines = {str(line.get_label()): line for line in axes.lines}
    dense = accuracies["dense", 1.0]
    for name in ("tome", "noise", "random_inside", "oracle"):
        x, y = map(np.asarray, lines[name].get_data())
        assert x == pytest.approx((1, *BUDGETS), abs=0.02)  # realised MACs
        if name != "noise":  # noise is compared with dense over the seeds that it has
            assert y == pytest.approx([0, *(100 * (accuracies[name, budget] - dense) for budget in BUDGETS)])
    assert sum(len(np.asarray(line.get_xdata())) == 1 + len(BUDGETS) for line in axes.lines) == len(STRATEGIES) - 1


def test_axes_of_curves_and_dots_name_their_units(board: Board) -> None:
    (axes,) = picture.draw(board).axes
    assert "MACs" in axes.get_xlabel() and "share" in axes.get_xlabel()
    assert "accuracy" in axes.get_ylabel() and "points" in axes.get_ylabel()
    groups, rng = np.arange(200) % 4, np.random.default_rng(0)
    names = [f"accuracy: {digit} on {place}" for digit in (3, 8) for place in ("land", "sea")]
    more = {"task": "spurious", "spurious_gap": 0.2, "worst_group_accuracy": 0.5} | dict.fromkeys(names, 0.5)
    gaps = [
        record
        for strategy in ("dense", "mine")
        for record in with_outcomes(strategy, rng.random((3, 200)) < 0.7, groups, **more)
    ]
    samples = [record for record in WHOLE if record["task"] == "theory"]
    for quantity, records, unit in (("gap", gaps, "points"), ("samples", samples, "training samples")):
        (axes,) = picture.draw(Board(judge(records), judge(records, "task")), quantity).axes
        assert unit in axes.get_xlabel()
