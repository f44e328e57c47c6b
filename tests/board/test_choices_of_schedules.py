"""Boards of choices: strategies with schedule=auto, and beside them methods with their default schedules."""

import re
from pathlib import Path

import pandas as pd
import pytest
from commands import call

import sparsebench
from sparsebench.board import picture
from sparsebench.board.board import gather
from sparsebench.board.columns import points
from sparsebench.board.gaps import gaps_over_budgets
from sparsebench.board.judge import judge
from sparsebench.board.picture import draw
from sparsebench.board.reading import read
from sparsebench.publish.about import About
from sparsebench.publish.submission import submit

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SUITE = """
name = "choices"
version = 1
title = "Two strategies at chosen schedules"
baselines = ["dense", "random", "random_inside", "oracle"]
seeds = 1

[budget]
macs = 0.5

[[task]]
name = "composite"
track = "frozen"
network = "networks"
params = {test = 40}
budgets = [{macs = 0.5, schedule = "auto"}, {macs = 0.4, schedule = "auto"}]
n_train = [64]

[[task]]
name = "spurious"
track = "frozen"
network = "networks"
params = {test = 40}
budgets = [{macs = 0.5, schedule = "auto"}, {macs = 0.28, schedule = "auto"}]
each_schedule_at = 0.5
n_train = [64]
"""
CHOSEN = ["macs 0.5 auto", "macs 0.4 auto"]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, Path]:
    """The board of a suite that leaves schedules open, of a method with and one without a default schedule."""
    folder = tmp_path_factory.mktemp("choices")
    suite = folder / "choices.toml"
    suite.write_text(SUITE)
    out = folder / "out"
    return sparsebench.run(plugins=("tome", "attn_topk", "patch_variance"), suite=str(suite), out=out, jobs=0), out


def accuracies(board: tuple[pd.DataFrame, Path]) -> pd.DataFrame:
    """The rows with an accuracy, that of the composite task, by strategy and budget."""
    rows = board[0]
    return rows[rows["accuracy"].notna()].set_index(["strategy", "budget"])


def test_a_default_schedule_is_shown_beside_the_chosen_one_and_not_ranked(board: tuple[pd.DataFrame, Path]) -> None:
    rows = accuracies(board)
    assert set(rows.loc["tome"].index) == {"macs 0.5", "macs 0.4", *CHOSEN}
    assert set(rows.loc["attn_topk"].index) == set(CHOSEN)
    assert rows.loc["tome"].loc[["macs 0.5", "macs 0.4"], "rank_low"].isna().all()
    assert rows.loc["tome"].loc[CHOSEN, "rank_low"].notna().all()
    assert rows.loc["patch_variance", "rank_low"].notna().all()
    text = (board[1] / "leaderboard.md").read_text()
    assert "tome, default schedule" in text and "tome: also with other schedules" in text


def test_each_chosen_schedule_has_its_counts(board: tuple[pd.DataFrame, Path]) -> None:
    chosen = board[0].set_index(["strategy", "budget"])["schedule"]
    for (_, budget), text in chosen.items():
        assert isinstance(text, str) == budget.endswith("auto")
        assert not isinstance(text, str) or "after block" in text


def test_rows_are_compared_with_random_tokens_at_their_site_which_choose_their_schedule_too(
    board: tuple[pd.DataFrame, Path],
) -> None:
    rows = accuracies(board)
    assert set(rows.loc["random_inside"].index) == set(CHOSEN)
    pairs = [(("attn_topk", budget), ("random_inside", budget)) for budget in CHOSEN] + [
        (("patch_variance", budget), ("random", budget)) for budget in ("macs 0.5", "macs 0.4")
    ]
    for row, reference in pairs:
        difference = rows.loc[row, "accuracy"] - rows.loc[reference, "accuracy"]
        assert rows.loc[row, "random_delta"] == pytest.approx(difference)


def test_the_gap_at_one_budget_has_its_range_over_schedules(board: tuple[pd.DataFrame, Path]) -> None:
    gaps = board[0].dropna(subset="aligned_gap_reduction").set_index("strategy")
    at_half = gaps[gaps["budget.macs"] == 0.5]
    assert len(at_half.loc["attn_topk"]) >= 4 and len(at_half.loc[["patch_variance"]]) == 1

    text = (board[1] / "leaderboard.md").read_text()
    table = text[text.index("Spurious correlations") :]
    for name in ("attn_topk", "random_inside"):
        line = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
        reductions = at_half.loc[name, "aligned_gap_reduction"]
        assert f"{points(reductions.min())} to {points(reductions.max())}" in line


def test_the_picture_of_gaps_shows_them_over_budgets(board: tuple[pd.DataFrame, Path]) -> None:
    figure = draw(gather(board[1]), "gap")
    worst, gap, _ = figure.axes
    lines = {line.get_label(): line for line in gap.get_lines()}
    rows = board[0].dropna(subset="aligned_gap").set_index(["strategy", "budget"])
    expected = [
        rows.loc[key, "aligned_gap"] for key in (("dense", "macs 1"), ("oracle", "macs 0.5"), ("oracle", "macs 0.28"))
    ]
    assert lines["oracle"].get_ydata() == pytest.approx([100 * value for value in expected])
    assert len(worst.get_lines()) == len(gap.get_lines())


def test_by_default_the_picture_of_gaps_names_the_most_accurate_worst_groups(
    board: tuple[pd.DataFrame, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture, "NAMED_BY_DEFAULT", 2)
    gaps = gaps_over_budgets(judge(read(board[1])).rankings[0].every)
    assert gaps is not None
    means = gaps.points.groupby("name")["worst_group_accuracy"].mean().to_dict()
    strategies = [name for name in means if name.partition(",")[0] in ("tome", "attn_topk", "patch_variance")]
    assert len(strategies) > 2
    legend = draw(gather(board[1]), "gap").axes[-1].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    best = sorted(strategies, key=lambda name: -means[name])[:2]
    assert [name for name in labels if name in strategies] == best


def test_without_the_chosen_schedule_at_a_budget_the_others_are_no_curve(board: tuple[pd.DataFrame, Path]) -> None:
    records = read(board[1])
    lost = (
        (records["strategy"] == "attn_topk") & (records["budget"] == "macs 0.5 auto") & (records["task"] == "spurious")
    )
    assert lost.any()
    whole, rest = (gaps_over_budgets(judge(table).rankings[0].every) for table in (records, records[~lost]))
    assert whole is not None and rest is not None
    assert rest.rows.loc["dense"].dropna().equals(whole.rows.loc["dense"].dropna())
    assert set(rest.rows.index) == set(whole.rows.index)


def test_a_curve_of_another_schedule_says_who_reported_it(board: tuple[pd.DataFrame, Path], tmp_path: Path) -> None:
    """Two groups submit the records of tome with chosen and with default schedules."""
    for authors in ("Ada | One", "Bo Two"):
        submit(board[1], tmp_path, "tome", About(authors=(authors,)))
    text = call("leaderboard", tmp_path, "--format", "md", "--wide").stdout
    lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in text.splitlines()]
    (bo,) = [line for line in lines if "tome by Bo Two, default schedule" in line and "Bo Two" in line]
    ada = [line for line in lines if "tome by Ada \\| One, default schedule" in line]
    assert any(cell.startswith("Ada ") for line in ada for cell in line) and bo != ada[0]
