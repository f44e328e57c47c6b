"""Boards of choices: strategies with schedule=auto, and beside them methods with their published schedules."""

from pathlib import Path

import pandas as pd
import pytest

import sparsebench

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
n_train = [256]
"""


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, Path]:
    """The board of a suite that leaves schedules open, of a method with and one without a published schedule."""
    folder = tmp_path_factory.mktemp("choices")
    suite = folder / "choices.toml"
    suite.write_text(SUITE)
    out = folder / "out"
    return sparsebench.run(plugins=("tome", "attn_topk", "patch_variance"), suite=str(suite), out=out, jobs=0), out


def test_a_published_schedule_is_shown_beside_the_chosen_one_and_not_ranked(board: tuple[pd.DataFrame, Path]) -> None:
    rows = board[0].set_index(["strategy", "budget"])
    assert set(rows.loc["tome"].index) == {"macs 0.5", "macs 0.4", "macs 0.5 auto", "macs 0.4 auto"}
    assert set(rows.loc["attn_topk"].index) == {"macs 0.5 auto", "macs 0.4 auto"}
    assert rows.loc["tome"].loc[["macs 0.5", "macs 0.4"], "rank_low"].isna().all()
    assert rows.loc["tome"].loc[["macs 0.5 auto", "macs 0.4 auto"], "rank_low"].notna().all()
    assert rows.loc["patch_variance", "rank_low"].notna().all()
    text = (board[1] / "leaderboard.md").read_text()
    assert "tome, published schedule" in text and "tome: also with the published schedule" in text


def test_each_chosen_schedule_has_its_counts(board: tuple[pd.DataFrame, Path]) -> None:
    chosen = board[0].set_index(["strategy", "budget"])["schedule"]
    for (_, budget), text in chosen.items():
        assert isinstance(text, str) == budget.endswith("auto")
        assert not isinstance(text, str) or "after block" in text


def test_random_tokens_inside_choose_their_schedule_too(board: tuple[pd.DataFrame, Path]) -> None:
    rows = board[0].set_index(["strategy", "budget"])
    assert set(rows.loc["random_inside"].index) == {"macs 0.5 auto", "macs 0.4 auto"}
    for macs in ("0.5", "0.4"):
        difference = rows.loc[("attn_topk", f"macs {macs} auto"), "random_inside_delta"]
        reference = rows.loc[("random_inside", f"macs {macs} auto"), "accuracy"]
        assert difference == pytest.approx(rows.loc[("attn_topk", f"macs {macs} auto"), "accuracy"] - reference)
