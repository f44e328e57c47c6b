import csv
import io
from typing import Any

import pytest

from sparsebench.board import views
from sparsebench.board.build import Ranking, judge
from sparsebench.board.columns import keys_of
from sparsebench.board.tables import render

Flat = dict[str, Any]


def seeded(strategy: str, values: list[float], macs: float, budget: str = "", task: str = "composite") -> list[Flat]:
    return [
        {
            "cell_id": f"{task} {strategy} {macs} {seed}", "status": "ok", "task": task, "model": "vit",
            "strategy": strategy, "kind": "oracle" if strategy == "oracle" else "deployable", "setting": task,
            "budget": budget or f"macs {macs:g}", "n_train": 100, "repetition": seed, "accuracy": value,
            "macs_ratio": macs, "device": "cpu",
        }
        for seed, value in enumerate(values)
    ]  # fmt: skip


def rankings(*parts: list[Flat]) -> list[Ranking]:
    return judge([row for part in parts for row in part]).rankings


DENSE = seeded("dense", [0.80, 0.81, 0.79], 1.0)
GOOD = seeded("good", [0.80, 0.82, 0.79], 0.5)
CHEAP = seeded("good", [0.7, 0.71, 0.68], 0.25)
BAD = seeded("bad", [0.40, 0.41, 0.39], 0.505)
SEER = seeded("oracle", [0.99, 0.98, 0.99], 0.5)


def test_each_two_ranked_rows_are_compared_once_the_better_one_first() -> None:
    rows = views.pairs(rankings(DENSE, GOOD, BAD, SEER))
    assert {(row["strategy"], row["other"]) for row in rows} == {("good", "dense"), ("good", "bad"), ("dense", "bad")}
    assert rows[0]["other"] == "bad" and rows[0]["told"] == "yes" and rows[0]["p"] <= 0.05
    assert rows[-1]["told"] == "no" and rows[-1]["difference"] == pytest.approx(0.01 / 3)
    assert rows[-1]["difference_low"] < 0 < rows[-1]["difference_high"] and rows[-1]["n_seeds"] == 3
    assert all(list(row) == keys_of(views.PAIRS) for row in rows)


def test_rows_of_equal_cost_are_ranked_among_themselves() -> None:
    rows = [row for row in views.matches(rankings(DENSE, GOOD, CHEAP, BAD, SEER)) if "MACs" in row["matched"]]
    assert [(row["matched"], row["rank"], row["strategy"]) for row in rows] == [
        ("at 0.50 of dense MACs", "1", "good"), ("at 0.50 of dense MACs", "2", "bad"),
    ]  # fmt: skip


def test_of_each_strategy_the_cheapest_row_as_accurate_as_dense_is_named_and_nothing_is_interpolated() -> None:
    rows = [row for row in views.matches(rankings(DENSE, GOOD, CHEAP, BAD)) if row["matched"] == "at dense accuracy"]
    assert [(row["strategy"], row["macs_ratio"]) for row in rows] == [("good", 0.5), ("bad", None)]
    near = seeded("near", [0.7992, 0.8092, 0.7892], 0.3)
    rows = views.matches(rankings(DENSE, near))
    assert rows[-1]["strategy"] == "near" and rows[-1]["macs_ratio"] == 0.3  # within a tenth of a point


@pytest.mark.parametrize("form", ["table", "md", "csv", "json", "latex"])
def test_views_come_in_every_form(form: str) -> None:
    judged = rankings(DENSE, GOOD, BAD)
    for rows, columns, legend in (
        (views.pairs(judged), views.PAIRS, views.LEGEND_OF_PAIRS),
        (views.matches(judged), views.MATCHED, views.LEGEND_OF_MATCHED),
    ):
        text = render(rows, form, (), columns, legend)
        assert "good" in text and "bad" in text
        if form == "csv":
            assert list(next(csv.reader(io.StringIO(text)))) == keys_of(columns)


def test_without_dense_or_equal_costs_there_is_nothing_to_match() -> None:
    assert views.matches(rankings(GOOD, CHEAP)) == [] and views.pairs([]) == []
