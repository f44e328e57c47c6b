"""What a run's folder comes to as a board."""

import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from flats import rows_in
from scipy import stats

from sparsebench.board import gather, reading
from sparsebench.board.board import Board
from sparsebench.board.build import build
from sparsebench.board.gather import PNG, WANTED, board_of
from sparsebench.board.notes import notes_on
from sparsebench.records import store

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"
GROUPS = {"accuracy: 3 on china": None, "accuracy: 8 on flower": None}
Flat = dict[str, Any]


def record(strategy: str = "mine", seed: int = 0, n_train: int = 8, **more: Any) -> Flat:
    return {
        "cell_id": f"{strategy} {seed} {n_train}", "status": "ok", "reason": "", "task": "theory", "model": "vit",
        "strategy": strategy, "kind": "deployable", "budget": "macs 0.5", "n_train": n_train, "repetition": seed,
        "setting": "one", "device": "cpu", "started": "2026-01-01T00:00:00+00:00", "seconds": 1.0, "revision": "abc",
        "environment": "", "success": None,
    } | GROUPS | more  # fmt: skip


def described(folder: Path, name: str, **more: Any) -> None:
    about = {"name": name, "revision": "abc", "kind": "deployable", "site": "input", "trained": False,
             "adaptive": False, "citation": "", "bibtex": f"@article{{{name}}}"}  # fmt: skip
    store.keep(folder / "strategies", about | more)


def test_a_curve_counts_the_successes_at_each_size(tmp_path: Path) -> None:
    words = {4: [0, 0, 1], 8: [0, 1, 1], 16: [1, 1]}
    records = [record(seed=k, n_train=n, success=float(x)) for n, word in words.items() for k, x in enumerate(word)]
    records += [record("other", status="failed", success=1.0), record("third", accuracy=0.5)]
    (curve,) = board_of(records, tmp_path).curves
    assert (curve.task, curve.model, curve.strategy, curve.budget) == ("theory", "vit", "mine", "macs 0.5")
    assert (curve.sizes, curve.n) == ((4, 8, 16), (3, 3, 2))
    assert curve.rates == pytest.approx((1 / 3, 2 / 3, 1.0))
    ends = [stats.binomtest(k, n).proportion_ci(method="wilson") for k, n in ((1, 3), (2, 3), (2, 2))]
    assert curve.low == pytest.approx([one.low for one in ends])
    assert curve.high == pytest.approx([one.high for one in ends])


def test_groups_are_means_over_seeds_at_the_largest_size(tmp_path: Path) -> None:
    values = [0.2, 0.4, 0.9]
    records = [record(seed=k, n_train=600, **{"accuracy: 3 on china": x}) for k, x in enumerate(values)]
    records += [record(seed=k, n_train=100, **dict.fromkeys(GROUPS, 0.0)) for k in range(3)]
    (group,) = board_of(records, tmp_path).groups  # nobody has measured the other at that size
    t = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (group.group, group.n_seeds) == ("3 on china", 3)
    assert (group.accuracy, group.low, group.high) == pytest.approx((0.5, max(0, t.low), min(1, t.high)))
    (one,) = board_of([record(**{"accuracy: 8 on flower": 0.25})], tmp_path).groups
    assert (one.group, one.accuracy, one.low, one.high) == ("8 on flower", 0.25, None, None)


def test_settings_of_a_task_have_curves_of_their_own(tmp_path: Path) -> None:
    board = board_of([record(setting=x, success=float(x == "two")) for x in ("one", "two")], tmp_path)
    assert [curve.rates for curve in board.curves] == [(0.0,), (1.0,)]


def test_the_order_of_records_means_nothing(tmp_path: Path) -> None:
    draw = random.Random(0)
    records = [record(name, k, n, success=float(draw.random() < 0.5), **dict.fromkeys(GROUPS, draw.random()))
               for name in ("a", "b") for k in range(5) for n in (4, 8)]  # fmt: skip
    expected = board_of(records, tmp_path)
    draw.shuffle(records)
    assert board_of(records, tmp_path) == expected


def marked(board: Board) -> dict[str, str | None]:
    return {row["strategy"]: row["trained"] for row in board.rows}


def test_strategies_say_whether_they_are_trained_and_what_to_cite(tmp_path: Path) -> None:
    described(tmp_path, "mine", trained=True)
    described(tmp_path, "other", bibtex="")
    described(tmp_path, "elsewhere")
    described(tmp_path, "third", revision="another")
    names = ("mine(power=2)", "other", "third")
    records = pd.DataFrame([record(name, accuracy=0.5) for name in names])
    board = board_of(reading.describe(records, tmp_path), tmp_path)
    assert marked(board) == {"mine(power=2)": "yes", "other": "no", "third": ""}
    assert board.bibtex == ["@article{mine}"]


def test_environments_are_those_of_the_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "environments"
    folder.mkdir()
    for name, text in {"one": '{"python": "3.11", "cores": 2}', "two": "{}", "bad": "[1", "list": "[1]"}.items():
        (folder / f"{name}.json").write_text(text)
    used = ("one", "bad", "list", "gone", "")
    with caplog.at_level(logging.WARNING):
        board = board_of([record(seed=k, environment=name) for k, name in enumerate(used)], tmp_path)
    assert board.environments == {"one": {"python": "3.11", "cores": "2"}}
    assert all(f"{name}.json is left out" in caplog.text for name in ("bad", "list"))


def test_pictures_of_the_folder_are_in_it_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "MOST_BYTES", 30)
    for name, size in {"agreement": 14, "leaderboard": 9, "large": 17, "tokens": 16}.items():
        (tmp_path / f"{name}.png").write_bytes(PNG + bytes(size - len(PNG)))
    assert {name: len(png) for name, png in board_of([record()], tmp_path).pictures.items()} == {
        "agreement": 14,
        "tokens": 16,
    }


def rows_without(rows: Sequence[Flat], key: str) -> list[Flat]:
    return [{name: value for name, value in row.items() if name != key} for row in rows]


def test_a_folder_is_its_records_board(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    for settings in ([], ["1" * 64]):  # the same suite, asked for with other words, is said once
        store.keep(tmp_path / "suites", {"name": "quick", "version": 3, "settings": settings})
    records = rows_in(tmp_path)
    board = gather.gather(tmp_path)
    assert rows_without(board.rows, "trained") == rows_without(build(records), "trained")
    assert rows_without(board.by_task, "trained") == rows_without(build(records, "task"), "trained")
    assert (board.notes, board.suites) == (notes_on(records), ["quick, version 3"])


def test_the_metrics_of_a_board_are_its_own_and_those_of_groups() -> None:
    assert "accuracy" in WANTED and "accuracy: 3 on china" in WANTED
    assert "train_loss" not in WANTED and "train_samples: 3 on china" not in WANTED
