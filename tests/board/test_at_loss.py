"""MACs and images/s at a loss of accuracy, on boards with known answers."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from flats import Flat, budgeted, flat
from published_boards import write_part

from sparsebench.board import at_loss, picture, views
from sparsebench.board.board import Board
from sparsebench.board.judge import judge
from sparsebench.board.tables import render
from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.stats.curves import speed_at_loss
from sparsebench.stats.paired import Results
from sparsebench.strategy.budget import Budget

SETTING = json.dumps([{"name": "composite", "params": {}}, {"name": "timm", "params": {"arch": "deit_small"}}])


def records(strategy: str, points: dict[float, tuple[float, float]], spread: float = 0.0) -> list[Flat]:
    """Return records of three seeds: accuracy and images/s by share of dense MACs; seeds differ by `spread`."""
    flats = []
    for macs, (accuracy, speed) in points.items():
        about = budgeted(Budget(macs=macs)) | {"macs_ratio": macs, "macs_ratio_asked": macs, "macs": macs * 4.6e9}
        about |= {"timed_batch": 200.0, "environment": "here", "setting": SETTING, "track": "frozen"}
        for seed in range(3):
            cell = f"{strategy} {macs} {seed}"
            value = accuracy + spread * (seed - 1) * (macs < 1)
            flats.append(flat(strategy, seed, cell_id=cell, accuracy=value, images_per_s=speed, **about))
    return flats


DENSE = records("dense", {1.0: (0.9, 1000.0)})
MINE = {0.7: (0.88, 1250.0), 0.5: (0.84, 2000.0)}


def rows_at(loss: float, flats: list[Flat], speed: Path | None = None) -> dict[str, dict[str, str]]:
    report = views.matched(judge(flats).rankings, loss, speed)
    rows = csv.DictReader(io.StringIO(render(report, "csv")))
    return {row["strategy"]: row for row in rows if row["matched"].endswith(f"-{loss:g} points")}


def test_macs_and_times_are_linear_between_budgets() -> None:
    """At -4 points, half way between .7 and .5, an image takes the mean of 1/1250 and 1/2000 seconds."""
    row = rows_at(4, [*DENSE, *records("mine", MINE)])["mine"]
    assert float(row["macs_at_loss"]) == pytest.approx(0.6)
    assert float(row["images_per_s"]) == pytest.approx(2 / (1 / 1250 + 1 / 2000))
    assert rows_at(4, [*DENSE, *records("mine", MINE)])["dense"]["images_per_s"] == "1000.0"


def test_a_loss_beyond_the_curve_has_its_end_and_one_before_it_nothing() -> None:
    flats = [*DENSE, *records("mine", MINE)]
    beyond, before = rows_at(10, flats)["mine"], rows_at(1, flats)["mine"]
    assert (beyond["macs_at_loss"], float(beyond["images_per_s"])) == ("<= 0.500", pytest.approx(2000))
    assert (before["macs_at_loss"], before["images_per_s"]) == ("not reached", "")


def test_the_interval_of_speeds_follows_that_of_macs() -> None:
    row = rows_at(4, [*DENSE, *records("mine", MINE | {0.9: (0.9, 1050.0)}, spread=0.01)])["mine"]
    macs = [float(row[f"macs_at_loss{end}"]) for end in ("_low", "", "_high")]
    speeds = [float(row[f"images_per_s{end}"]) for end in ("_high", "", "_low")]
    assert macs == pytest.approx([0.55, 0.6, 0.65])  # one point is a quarter of the way between the budgets
    times = np.interp(macs, [0.5, 0.7], [1 / 2000, 1 / 1250])
    assert speeds == pytest.approx((1 / times).tolist())


def test_times_of_seeds_vary_with_the_seeds() -> None:
    points = [Results(dict.fromkeys(range(8), accuracy), {}) for accuracy in (0.8, 0.9)]
    speeds = np.stack([np.linspace(1500, 2500, 8), np.full(8, 1000.0)], axis=1)
    value, low, high = speed_at_loss(points, [0.5], speeds, loss=0.2)
    assert value == pytest.approx(1 / np.mean(1 / speeds[:, 0]))
    assert low is not None and high is not None and 1500 < low < value < high < 2500


def test_a_board_without_speeds_has_macs() -> None:
    flats = [row | {"images_per_s": None} for row in [*DENSE, *records("mine", MINE)]]
    row = rows_at(4, flats)["mine"]
    assert float(row["macs_at_loss"]) == pytest.approx(0.6) and not row["images_per_s"]


def test_two_points_are_those_of_the_board() -> None:
    flats = [*DENSE, *records("mine", MINE | {0.9: (0.9, 1050.0)}, spread=0.01)]
    curves = judge(flats).rankings[0].curves
    assert curves is not None
    of_board = curves.rows.loc["mine"]
    row = rows_at(at_loss.LOSS, flats)["mine"]
    for end in ("", "_low", "_high"):
        assert float(row[f"macs_at_loss{end}"]) == pytest.approx(of_board[f"macs_at_2{end}"])


def times(file: Path, **network: Any) -> None:
    """Write times as `sparsebench speed` does, of dense and of two budgets at two batch sizes."""
    lines = []
    for strategy, budget, macs, speed in (
        ("dense", "", 1.0, 400), ("mine", "macs 0.7", 0.7, 500), ("mine", "macs 0.5", 0.5, 1000),
    ):  # fmt: skip
        for batch, factor in ((1, 0.1), (64, 1)):
            about = {"network": "deit_small", "mode": "eager", "precision": "float32", "device": "GPU", "memory": None}
            about |= {"macs": macs * 4.6e9, "macs_ratio": macs, "latency": 1.0, "speed_up": speed / 400} | network
            row = {"strategy": strategy, "budget": budget, "batch": batch, "images_per_s": speed * factor}
            lines.append(json.dumps(about | row))
    file.write_text("\n".join(lines))


def test_speeds_of_one_and_of_many_images_come_from_a_folder(tmp_path: Path) -> None:
    times(tmp_path / "speed.jsonl")
    row = rows_at(4, [*DENSE, *records("mine", MINE)], tmp_path)["mine"]
    speed = 2 / (1 / 500 + 1 / 1000)
    assert (float(row["images_per_s"]), float(row["images_per_s_1"])) == (
        pytest.approx(speed), pytest.approx(speed / 10),
    )  # fmt: skip


def test_a_folder_with_times_of_another_network_is_named(tmp_path: Path) -> None:
    times(tmp_path / "speed.jsonl", network="vit_large")
    report = views.matched(judge([*DENSE, *records("mine", MINE)]).rankings, 4, tmp_path)
    assert any(str(tmp_path.name) in note for note in report.notes)
    (row,) = [row for row in report.data.rows if row["strategy"] == "mine" and row.get("macs_at_loss")]
    assert row["images_per_s"] == pytest.approx(2 / (1 / 1250 + 1 / 2000))


def test_the_command_has_the_loss_and_refuses_it_elsewhere(tmp_path: Path) -> None:
    folder = write_part(tmp_path / "board", ("dense", "tome", "attn_topk"))
    words = ["leaderboard", str(folder), "--loss", "5"]
    result = CliRunner().invoke(main, [*words, "--view", "matched", "--format", "csv"])
    assert result.exit_code == 0, result.output
    assert "at -5 points" in result.stdout
    assert CliRunner().invoke(main, words).exit_code == 2


def test_the_picture_over_images_per_second_has_timed_strategies_alone() -> None:
    """A strategy that is slower than dense begins left of it."""
    slow = records("slow", {0.7: (0.86, 800.0), 0.5: (0.8, 1500.0)})
    untimed = [row | {"images_per_s": None} for row in records("untimed", MINE)]
    judged = judge([*DENSE, *records("mine", MINE), *slow, *untimed])
    (axis,) = picture.over_speed(Board(judged, judged)).axes
    lines = {line.get_label(): np.asarray(line.get_xdata()).tolist() for line in axis.lines}
    assert lines["mine"] == pytest.approx([1, 1.25, 2]) and lines["slow"] == pytest.approx([1, 0.8, 1.5])
    assert "untimed" not in lines
    assert axis.get_xlim()[0] == pytest.approx(0.8) and axis.get_xlim()[1] > 2
    with pytest.raises(UserError, match="untimed"):
        picture.over_speed(Board(judged, judged), ["untimed"])


def test_a_board_without_speeds_has_no_such_picture() -> None:
    judged = judge([row | {"images_per_s": None} for row in [*DENSE, *records("mine", MINE)]])
    with pytest.raises(UserError, match="images/s"):
        picture.over_speed(Board(judged, judged))
