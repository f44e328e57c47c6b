"""Boards whose main task was tested at several shares of relevant tokens: a section and a picture."""

import csv
import io
import json
from typing import Any

import numpy as np
import pytest
from flats import budgeted, with_outcomes
from matplotlib.text import Text

from sparsebench.board import shares, views
from sparsebench.board.board import Board
from sparsebench.board.judge import judge
from sparsebench.board.published import data_of
from sparsebench.board.tables import render
from sparsebench.errors import UserError
from sparsebench.strategy.budget import Budget

ITEMS = 40
N_CORRECT = {
    4: {"dense": 32, "mine": 30, "other": 20, "random": 18, "oracle": 34},
    8: {"dense": 36, "mine": 26, "other": 34, "random": 30, "oracle": 37},
}
"""For each side of the object in patches of 16 x 16, the correct items of each strategy."""


def records(*sides: int, track: str = "frozen", **more: Any) -> list[dict[str, Any]]:
    """Return records of one network at the shares of these sides, at two budgets with equal results."""
    flats = []
    for side in sides:
        setting = json.dumps([{"name": "composite", "params": {"foreground": side}}, {"name": "vit", "params": {}}])
        for strategy, n in N_CORRECT[side].items():
            hits = np.arange(ITEMS)[None] < n
            for macs in (1.0,) if strategy == "dense" else (0.5, 0.3):
                of_budget = budgeted(Budget(macs=macs)) | {"macs_ratio": macs, "macs_ratio_asked": macs}
                share = (side / 16) ** 2 if strategy == "dense" else 0.9
                flats += with_outcomes(
                    strategy, hits, setting=setting, track=track, network="w", selection_precision=share,
                    cell_id=f"{side} {strategy} {macs}", **of_budget, **more,
                )  # fmt: skip
    return flats


def board_of(flats: list[dict[str, Any]]) -> Board:
    judged = judge(flats)
    return Board(judged, judge(flats, "task", judged))


def test_other_settings_of_the_main_task_are_sections_in_tables_and_in_the_csv() -> None:
    board = board_of(records(4, 8))
    report = views.report(board.judged)
    assert [len(table.rows) for table in report.tables if "foreground=4" in table.title] == [3, 5]
    rows = list(csv.DictReader(io.StringIO(render(report, "csv"))))
    of_mine = {(row["task"], float(row["accuracy"])) for row in rows if row["strategy"] == "mine"}
    assert of_mine == {("composite(foreground=4)", 30 / 40), ("composite(foreground=8)", 26 / 40)}


def test_settings_are_in_the_order_of_their_numbers_and_a_page_begins_with_the_main_one() -> None:
    main = "composite(foreground=8)"
    several = [
        *records(8),
        *(row | {"setting": row["setting"].replace(": 4", ": 12")} for row in records(4)),
        *records(4),
        # The main setting is the one with the most strategies.
        *(
            row | {"strategy": "third", "cell_id": f"3 {row['cell_id']}"}
            for row in records(8)
            if row["strategy"] == "mine"
        ),
    ]
    board = board_of(several)
    assert board.judged.rankings[0].task == main
    tasks = ["composite(foreground=4)", main, "composite(foreground=12)"]
    assert [comparison.task for comparison in board.judged.comparisons] == tasks
    titles = [setting["title"].partition(", ")[0] for setting in data_of(board)["settings"]]
    assert titles == [main, *(task for task in tasks if task != main)]


def test_settings_are_sorted_by_whole_numbers_and_by_fractions() -> None:
    values = ("56", "168", "0.5", "0.25", "84", "1.0")
    several = [row | {"setting": row["setting"].replace(": 4", f": {value}")} for value in values for row in records(4)]
    tasks = [comparison.task for comparison in judge(several).comparisons]
    assert tasks == [f"composite(foreground={value})" for value in ("0.25", "0.5", "1.0", "56", "84", "168")]


def test_tasks_that_train_have_no_sections() -> None:
    assert not judge(records(4, 8, track="scratch")).sections


def test_the_picture_has_each_strategy_at_each_share_against_dense() -> None:
    figure = shares.draw(board_of(records(4, 8)))
    of_half = next(axis for axis in figure.axes if axis.get_title().startswith("0.5"))
    lines = {line.get_label(): line for line in of_half.lines}
    assert lines["mine"].get_ydata() == pytest.approx([-5, -25])
    assert lines["other"].get_ydata() == pytest.approx([-30, -5])
    assert lines["oracle"].get_ydata() == pytest.approx([5, 2.5])
    assert lines["mine"].get_xdata() == pytest.approx([1 / 16, 1 / 4], rel=0.2)
    # The text above is about all shares, so it names none of them.
    texts = [text.get_text() for text in figure.findobj(Text)]
    data = next(text for text in texts if text.startswith("Data:")).partition("(track")[0]
    assert "network" in data and "%" not in data


def test_by_default_it_names_no_strategy_without_a_rank() -> None:
    """A cell of the most accurate strategy failed, so it has no rank."""
    flats = [row | {"accuracy": 0.9} if row["strategy"] == "mine" else row for row in records(4, 8)]
    failed = next(row for row in flats if row["strategy"] == "mine") | {"status": "failed", "cell_id": "another"}
    (names, names_after) = (
        {text.get_text() for text in shares.draw(board_of(rows)).axes[-1].get_legend().get_texts()}
        for rows in (flats, [*flats, failed])
    )
    assert names - names_after == {"mine"}


def test_a_board_with_one_share_has_no_such_picture() -> None:
    with pytest.raises(UserError, match="two shares"):
        shares.draw(board_of(records(4)))
    with pytest.raises(UserError, match="nobody"):
        shares.draw(board_of(records(4, 8)), ["nobody"])
