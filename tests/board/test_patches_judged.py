"""Predicted patches on a board, and drawn, from one small run of the suite patches on networks of the package."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from commands import call

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import patches as ways

import sparsebench
from sparsebench.board.board import gather
from sparsebench.board.patches import COLUMNS
from sparsebench.board.picture import draw
from sparsebench.board.published import data_of
from sparsebench.inspection.predictions import NOT_JUDGED, show_predictions
from sparsebench.measure.patches import patch_labels
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import numbers_of
from sparsebench.runner import run as runs
from sparsebench.runner.progress import SILENT

pytestmark = pytest.mark.usefixtures("timed_once")

TASK, N_TRAIN, STRATEGY = "patches:test=40", 40, "attn_topk"
EVERY = ("dense", STRATEGY, "random_inside:macs=0.5")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def board(out: Path) -> pd.DataFrame:
    """Return the board by strategy, of two repetitions."""
    runs.run_missing(asked(2), Files(), Execution("cpu", jobs=0), Registry(), out)
    return sparsebench.leaderboard(out).set_index("strategy")


def asked(seeds: int) -> Request:
    return Request(plugins=EVERY, suite="patches", tasks=(TASK,), n_train=(N_TRAIN,), seeds=seeds, alone=True)


def test_iou_is_that_of_the_records_with_an_interval(board: pd.DataFrame) -> None:
    for name, row in board.iterrows():
        assert row["iou_low"] <= row["iou"] <= row["iou_high"], name
        assert row["iou_delta"] == pytest.approx(row["iou"] - board["iou"]["dense"])
    assert board["iou_delta"]["dense"] == board["iou_delta_low"]["dense"] == 0
    gain = board["iou"][STRATEGY] - board["iou"]["random_inside"]
    assert board["iou_random_delta"][STRATEGY] == pytest.approx(gain)
    assert not {"linear_accuracy", "neighbour_accuracy", "images_to_target"} & set(board)


def test_columns_are_means_over_seeds(out: Path, board: pd.DataFrame) -> None:
    records = sparsebench.load_records(out)
    for column in ("iou", "iou_pixels", "accuracy_relevant", "accuracy_irrelevant", "accuracy_boundary"):
        means = records.groupby(records["strategy"].astype(str))[column].mean()
        for name in board.index:
            assert board[column][name] == pytest.approx(means[name]), column


def test_a_picture_has_iou(out: Path, board: pd.DataFrame) -> None:
    figure = draw(gather(out), "iou")
    (axis,) = figure.axes
    shown = sorted(x for line in axis.lines for x in line.get_xdata() if line.get_label()[0] != "_")
    assert shown == pytest.approx(sorted(100 * board["iou"].dropna()))


def test_a_table_has_them(out: Path, board: pd.DataFrame) -> None:
    text = call("leaderboard", out, "--wide").output
    table = text.partition("Predicted patches")[2]
    assert all(column.title in table for column in COLUMNS[:6])
    assert "2 classes" in text and "test patches" in text and "without a strategy" in text


def test_the_page_begins_with_them(out: Path, board: pd.DataFrame) -> None:
    (setting,) = data_of(gather(out))["settings"]
    first = [column["key"] for column in setting["columns"] if column["first"]]
    assert first.index("iou") < first.index("budget") and "iou_delta" in first


def test_predictions_are_drawn_from_the_records(out: Path, board: pd.DataFrame) -> None:
    before = len(store.read(out))
    shown = show_predictions(asked(1), Files(), Execution("cpu", jobs=0), out, SILENT, 3)
    records = {record.label: record for record in store.read(out).values() if record.cell.repetition == 0}
    assert len(store.read(out)) == before, "nothing is run again"
    assert shown.pictures.shape == (3, 32, 32, 3) and shown.patch_classes == ("background", "object")
    assert shown.truth.tolist() == patch_labels(shown.matters.astype(np.uint8), (8, 8)).tolist()
    assert {each.label for each in shown.predicted} == set(board.index)
    for each in shown.predicted:
        outcomes = records[each.label].outcomes
        assert outcomes is not None and each.iou == records[each.label].metrics["iou"].value
        every = numbers_of(outcomes.predicted, outcomes.n).reshape(40, 64).tolist()
        assert all(row in every for row in each.classes.tolist()) and NOT_JUDGED not in each.classes


def test_the_command_draws_them(out: Path, board: pd.DataFrame, tmp_path: Path) -> None:
    options = ["--suite", "patches", "--task", TASK, "--n-train", N_TRAIN, "--out", out, "--jobs", 0]
    file = tmp_path / "predicted.png"
    done = call("show-tokens", "--plugin", STRATEGY, "--macs", 0.5, *options, "--file", file)
    assert done.exit_code == 0, done.output
    assert file.read_bytes().startswith(b"\x89PNG")
    call("show-tokens", "--plugin", STRATEGY, "--macs", 0.5, *options)
    page = tmp_path / "page.html"
    call("leaderboard", out, "--format", "html", "-o", page)
    assert "predicted classes of their patches" in page.read_text("utf-8") and "removed patches" not in page.read_text()


@pytest.mark.slow
def test_ways_back_and_heads_are_compared_in_pairs(tmp_path: Path) -> None:
    """Options that benchmarks/patches.py compares differ in one thing, and differences are those of the records."""
    for params in ("", ",fill=nearest", ",head=own", ",fill=nearest,head=own"):
        request = replace(asked(1), plugins=("tome", "attn_topk", "attn_topk:returns=-1"), tasks=(TASK + params,))
        runs.run_missing(request, Files(), Execution("cpu", jobs=0), Registry(), tmp_path)
    ((_, measured),) = ways.tests(tmp_path).values()
    for _, first, second in ways.pairs(measured):
        assert sum(a != b for a, b in zip(first, second, strict=True)) == 1

    def iou(fill: str, head: str, label: str = "tome") -> float:
        (record,) = [
            record
            for record in store.read(tmp_path).values()
            if (record.label, record.cell.task.params["fill"], record.cell.task.params["head"]) == (label, fill, head)
        ]
        return 100 * (record.metrics["iou"].value or 0)

    done = CliRunner().invoke(ways.main, [str(tmp_path)])
    assert done.exit_code == 0
    rows = [[cell.strip() for cell in line.split("|")] for line in done.output.splitlines() if "|" in line]
    usual = iou("membership", "dense")
    back = iou("membership", "dense", "attn_topk(returns=-1)") - iou("membership", "dense", "attn_topk")
    expected = {
        ("tome", "membership - nearest kept patch"): (2, usual - iou("nearest", "dense")),
        ("tome", "own head - head of dense tokens"): (2, iou("membership", "own") - usual),
        ("attn_topk", "comes back - stays away"): (4, back),
    }
    for (strategy, what), (number, value) in expected.items():
        differences = [row[2] for row in rows if row[1].startswith(f"{strategy},") and row[1].endswith(what)]
        assert len(differences) == number
        assert any(text.startswith(f"{value:+.1f} [") for text in differences)
