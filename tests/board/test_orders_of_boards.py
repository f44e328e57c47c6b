"""Agreement of the orders of two boards."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from flats import Flat, budgeted, of_items
from published_boards import write_part
from scipy.stats import spearmanr

from sparsebench.board import orders
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.tables import render
from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.strategy.budget import Budget

NAMES = [f"s{number}" for number in range(8)]
QUICK = str(Path(__file__).resolve().parents[2] / "leaderboard" / "quick")


def board(budgets: dict[float, np.ndarray], schedule: str | None = None) -> Leaderboard:
    """Return a board on which the strategies NAMES have these rates of correct items at some budgets."""
    return judge(records(budgets, schedule))


def records(budgets: dict[float, np.ndarray], schedule: str | None = None, setting: str = "s") -> list[Flat]:
    flats: list[Flat] = []
    for name, place in [("dense", None), ("oracle", None), *zip(NAMES, range(8), strict=True)]:
        for asked, rates in ({1.0: np.ones(8)} if name == "dense" else budgets).items():
            where = None if name == "dense" else schedule
            about = budgeted(Budget(macs=asked, schedule=where)) | {"track": "frozen", "setting": setting}
            for seed in range(3):
                rate = 0.95 if place is None else float(rates[place])
                cell = {"cell_id": f"{setting} {name} {asked} {seed}", "network": f"network {seed}"}
                flats.append(of_items(name, seed, asked, rate, **about, **cell))
    return flats


def agreement(first: Leaderboard, other: Leaderboard) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(render(orders.agreement(first, other), "csv"))))


RISING = np.linspace(0.3, 0.9, 8)
SWAPPED = RISING[[1, 0, 3, 2, 5, 4, 7, 6]]
CLOSE = np.linspace(0.5, 0.52, 8)
"""Rates whose order depends on the networks that are drawn."""


def named(names: str, contents: str, arch: str = "a", **more: str) -> Leaderboard:
    """Return a board of three networks with the names and contents of files."""
    setting = json.dumps([{"name": "task", "params": {}}, {"name": "timm", "params": {"arch": arch, **more}}])
    networks = [{"network": name, "weights": content} for name, content in zip(names, contents, strict=True)]
    return judge([flat | networks[flat["repetition"]] for flat in records({0.5: CLOSE}, setting=setting)])


def test_networks_are_drawn_once_for_both_boards_if_their_weights_are_the_same() -> None:
    """Files may have any names and any order; a network is drawn with itself."""
    first = named("abc", "123")
    same, apart = agreement(first, named("abc", "123")), agreement(first, named("def", "456"))
    assert same != apart
    assert agreement(first, named("cab", "123")) == agreement(first, named("zyx", "123", precision="bfloat16")) == same
    assert agreement(first, named("abc", "456")) == agreement(first, named("abc", "124")) == apart
    assert agreement(first, named("abc", "123", arch="b")) == apart


def test_budgets_are_compared_with_the_nearest_of_the_other_board() -> None:
    first = board({0.7: RISING, 0.5: RISING, 0.3: RISING})
    other = board({0.65: SWAPPED, 0.4: RISING[::-1]})
    found = {(float(row["budget"]), float(row["other_budget"])): float(row["spearman"])
             for row in agreement(first, other)}  # fmt: skip
    swapped = spearmanr(RISING, SWAPPED).statistic
    assert found == {(0.7, 0.65): pytest.approx(swapped), (0.5, 0.4): pytest.approx(-1), (0.3, 0.4): pytest.approx(-1)}


def test_oracles_and_dense_do_not_count() -> None:
    (row,) = agreement(board({0.5: RISING}), board({0.5: SWAPPED}))
    assert row["n_strategies"] == "8"
    assert float(row["spearman_low"]) < float(row["spearman"]) < float(row["spearman_high"])


def test_chosen_schedules_are_compared_with_chosen_ones() -> None:
    """The default schedule of a strategy does not stand for its chosen one."""
    chosen, default = board({0.5: RISING}, "auto"), board({0.5: RISING})
    assert [row["schedules"] for row in agreement(chosen, chosen)] == ["auto"]
    with pytest.raises(UserError, match="in common"):
        orders.agreement(chosen, default)


def test_each_section_of_a_board_is_compared() -> None:
    settings = [
        json.dumps([{"name": "composite", "params": {"foreground": side}}, {"name": "vit", "params": {}}])
        for side in (4, 8)
    ]
    parts = [records({0.5: rates}, setting=setting)
             for rates, setting in zip((RISING, RISING[::-1]), settings, strict=True)]  # fmt: skip
    found = {row["section"].partition("=")[2][0]: float(row["spearman"])
             for row in agreement(judge([*parts[0], *parts[1]]), board({0.5: RISING}))}  # fmt: skip
    assert found == {"4": pytest.approx(1), "8": pytest.approx(-1)}


def test_only_chosen_strategies_count() -> None:
    first, other = board({0.5: RISING}), board({0.5: SWAPPED})
    (row,) = orders.agreement(first, other, NAMES[:2] + NAMES[4:6]).data.rows
    assert row["n_strategies"] == 4 and row["spearman"] == pytest.approx(0.6) and row["spearman_low"] is None


def test_the_heat_map_has_each_pair_of_budgets() -> None:
    figure = orders.draw(board({0.7: RISING, 0.3: SWAPPED}), board({0.6: RISING, 0.5: RISING, 0.2: RISING[::-1]}))
    (axis,) = [axis for axis in figure.axes if axis.images]
    swapped = spearmanr(RISING, SWAPPED).statistic
    values = np.asarray(axis.images[0].get_array())
    assert values == pytest.approx(np.array([[1, 1, -1], [swapped, swapped, -swapped]]), abs=1e-6)
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0.6", "0.5", "0.2"]


def test_the_command_writes_table_and_picture(tmp_path: Path) -> None:
    folder = write_part(tmp_path / "board", ("dense", "tome", "attn_topk", "noise", "random_inside"))
    words = ["leaderboard", str(folder), "--against", str(folder)]
    result = CliRunner().invoke(main, [*words, "--format", "csv"])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert rows and {float(row["spearman"]) for row in rows} == {1.0}
    picture = tmp_path / "heat.png"
    assert CliRunner().invoke(main, [*words, "--picture", str(picture)]).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("more", [["--view", "pairs"], ["--check"], ["--format", "html", "-o", "x.html"]])
def test_two_boards_have_no_other_view(more: list[str]) -> None:
    result = CliRunner().invoke(main, ["leaderboard", QUICK, "--against", QUICK, *more])
    assert result.exit_code == 2 and "against" in result.output
