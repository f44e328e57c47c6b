"""Boards as DataFrames that can be computed with."""

import math
from pathlib import Path

import pandas as pd
import pytest

import sparsebench
from sparsebench.board.columns import COLUMNS
from sparsebench.board.frame import frame

BOARD = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"
ROWS = [
    {"rank": "1-3", "strategy": "far(power=1.0, on=True)", "budget": "macs 0.5", "trained": "no", "pareto": "yes",
     "sample_complexity": math.inf},
    {"rank": "2", "strategy": "far", "budget": "keep 0.7 power-floor @0,1", "trained": "yes", "sample_complexity": 8},
    {"rank": "not ranked", "strategy": "dense", "budget": "macs 1", "trained": "no", "sample_complexity": None},
]  # fmt: skip


@pytest.fixture
def table() -> pd.DataFrame:
    columns = [column for column in COLUMNS if not column.interval and column.key in ROWS[0]]
    return frame(ROWS, [*columns, next(c for c in COLUMNS if c.key == "sample_complexity")._replace(interval=False)])


def test_what_is_not_reached_is_infinity_with_a_flag(table: pd.DataFrame) -> None:
    numbers = table["sample_complexity"]
    assert numbers.dtype == float and numbers[0] == math.inf and math.isnan(numbers[2])
    assert table["sample_complexity_reached"].tolist() == [False, True, pd.NA]
    assert table.sort_values("sample_complexity")["strategy"].iloc[0] == "far"


def test_parameters_budgets_and_ranks_are_columns(table: pd.DataFrame) -> None:
    assert table["strategy.power"].dtype == float and table["strategy.power"][0] == 1.0
    assert table["strategy.on"][0] is True
    assert table["budget.macs"].dropna().tolist() == [0.5, 1.0] and table["budget.keep_rate"][1] == 0.7
    assert table["rank_low"].dropna().tolist() == [1, 2] and table["rank_high"].dropna().tolist() == [3, 2]


def test_every_column_of_a_published_board_says_what_it_is_and_no_number_is_text() -> None:
    table = sparsebench.leaderboard(BOARD)
    assert set(table.columns) == set(table.attrs) and all(table.attrs.values())
    assert table["macs_at_2"].dtype == float and table.select_dtypes("number").shape[1] > 30
    lowest = table[table["macs_at_2_at_most"]]
    assert set(lowest["strategy"]) == {"oracle"} and lowest["macs_at_2"].round(3).unique().tolist() == [0.406]
    assert not table.isin(["yes", "no", "not reached"]).any(axis=None)
