"""Boards of networks that are tested as they are: seeds are networks, repetitions are draws on one network."""

import csv
import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from flats import build, copy_without, flat, row_of
from PIL import Image
from running import run_without_board
from safetensors.torch import save_file
from scipy import stats

import sparsebench
from sparsebench.board.board import gather
from sparsebench.board.columns import dicts
from sparsebench.board.comparison import about
from sparsebench.board.judge import judge
from sparsebench.board.notes import notes_on
from sparsebench.board.reading import read
from sparsebench.cli import main
from sparsebench.records import store
from sparsebench.records.record import Record, bytes_of

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ARCH, SIDE = "test_vit", 32
CLASSES = {"n01440764": 0, "n01443537": 1, "n01484850": 2}
Flat = dict[str, Any]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with pictures in three classes of ImageNet, and three random networks for these classes."""
    root, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    for name in CLASSES:
        (root / "pictures" / name).mkdir(parents=True)
        for i in range(8):
            pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "pictures" / name / f"{i}.png")
    for seed, name in enumerate(("one", "two", "three")):
        torch.manual_seed(seed)
        model = timm.create_model(ARCH)
        with torch.no_grad():
            model.head.weight.normal_()
            model.head.bias.fill_(-1000.0)
            model.head.bias[list(CLASSES.values())] = 0.0
        save_file(model.state_dict(), root / f"{name}.safetensors")
    return root


def run(files: Path, out: Path, *networks: str, plugins: tuple[str, ...] = ("attn_topk",), **options: Any) -> None:
    values = {"macs": [0.8, 0.6], "seeds": 3, "tasks": f"folder:canvas={SIDE}"}
    values |= {"images": f"folder:{files / 'pictures'}"} | options
    weights = [files / f"{network}.safetensors" for network in networks]
    run_without_board(*plugins, suite="folder", model=f"timm:{ARCH}", weights=weights, out=out, **values)


@pytest.fixture(scope="module")
def of_one(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    run(files, out, "one", plugins=("attn_topk", "random_inside"))
    return out


@pytest.fixture(scope="module")
def of_three(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("three")
    run(files, out, "one", "two", "three", plugins=("attn_topk", "random_inside"), seeds=2, macs=[0.6])
    return out


def named(out: Path, record: Record) -> str | None:
    known = [json.loads(text) for text in store.sidecars(out, "files").values()]
    return {entry["name"]: entry["file"] for entry in known}.get(str(record.cell.model.params["weights"]))


def records(out: Path) -> list[Record]:
    return list(store.read(out).values())


def right(record: Record) -> np.ndarray:
    from sparsebench.records.record import numbers_of

    assert record.outcomes is not None
    predicted, label = record.outcomes.predicted, record.outcomes.label
    return numbers_of(predicted, record.outcomes.n) == numbers_of(label, record.outcomes.n)


def test_each_repetition_is_run_that_tests_on_other_pictures(files: Path, tmp_path: Path) -> None:
    run(files, tmp_path, "one", macs=[0.7], tasks=f"folder:canvas={SIDE},test=10")
    every = records(tmp_path)
    names = ("dense", "attn_topk", "random", "random_inside")
    assert Counter(record.cell.strategy.name for record in every) == dict.fromkeys(names, 3)
    dense = sorted((r for r in every if r.cell.strategy.name == "dense"), key=lambda r: r.cell.repetition)
    table = read(tmp_path)
    judged = judge(table)
    rows = dicts(judged.rows)
    assert {row["n_seeds"] for row in rows} == {1}
    hits = np.concatenate([right(record) for record in dense])
    row = row_of(rows, "dense")
    assert row["accuracy"] == pytest.approx(hits.mean())
    low, high = stats.binomtest(int(hits.sum()), 30).proportion_ci(method="wilson")
    assert row["accuracy_low"] < low and row["accuracy_high"] > high  # some of the 24 pictures were drawn twice
    assert "folder: one network: intervals and tests are over its test items alone" in notes_on(table, judged)


def test_weights_whose_outputs_overflow_are_no_fault_of_a_training(files: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(ARCH)
    for block in model.blocks:
        torch.nn.init.constant_(block.mlp.fc2.weight, 1e38)
    save_file(model.state_dict(), tmp_path / "huge.safetensors")
    run(tmp_path, tmp_path / "out", "huge", images=f"folder:{files / 'pictures'}", macs=[0.6], seeds=1)
    records = sparsebench.load_records(tmp_path / "out")
    assert set(records["status"]) == {"failed"}
    assert all("training" not in reason and "finite" in reason for reason in records["reason"])
    assert {"accuracy", "macs_ratio", "test_loss", "images_per_s"} <= set(records)
    assert records[["accuracy", "macs_ratio"]].isna().all(axis=None) and (records["accuracy"] > 0.5).sum() == 0
    assert sparsebench.leaderboard(records).empty
    assert not any("training" in line for line in gather(tmp_path / "out").notes)


def test_one_network_has_intervals_over_its_items(of_one: Path) -> None:
    judged = judge(read(of_one))
    rows = dicts(judged.rows)
    every = {(r.cell.strategy.name, r.cell.budget.macs, r.cell.repetition): right(r) for r in records(of_one)}
    dense, topk = every["dense", 1.0, 0], every["attn_topk", 0.6, 0]
    row = row_of(rows, "attn_topk", budget="macs 0.6")
    low, high = stats.binomtest(int(topk.sum()), 24).proportion_ci(method="wilson")
    assert (row["accuracy"], row["accuracy_low"]) == pytest.approx((topk.mean(), low), abs=0.01)
    assert row["accuracy_high"] == pytest.approx(high, abs=0.01)
    assert row["accuracy_delta"] == pytest.approx(topk.mean() - dense.mean())
    assert row["accuracy_delta_low"] < row["accuracy_delta"] < row["accuracy_delta_high"]
    assert {row["n_seeds"] for row in rows} == {1}
    drawn = row_of(rows, "random_inside", budget="macs 0.6")
    mean = np.mean([every["random_inside", 0.6, draw] for draw in range(3)], axis=0)
    assert drawn["accuracy"] == pytest.approx(mean.mean())
    assert row["random_delta"] == pytest.approx((topk - mean).mean())
    error = stats.sem(topk - mean)
    half = row["random_delta_high"] - row["random_delta"]
    assert stats.t.ppf(0.975, 23) * error < half < stats.t.ppf(0.975, 23) * (error + 0.06)
    ranking = judged.over_budgets
    assert ranking is not None and ranking.curves is not None
    kept = ranking.curves.rows[1:]
    assert (kept["kept_accuracy_low"] < kept["kept_accuracy"]).all()
    assert (kept["kept_accuracy"] < kept["kept_accuracy_high"]).all()
    assert ranking.every.dropna(subset="curve")[["accuracy_low", "accuracy_high"]].notna().all(axis=None)


def test_networks_are_compared_network_by_network(of_three: Path) -> None:
    """Networks are compared network by network and called by their files."""
    board, every = gather(of_three), records(of_three)
    rows = dicts(board.judged.rows)
    assert {row["n_seeds"] for row in rows} == {3} and len({row["model"] for row in dicts(board.by_task.rows)}) == 1
    means = {name: np.mean([right(r).mean() for r in every if r.cell.strategy.name == "attn_topk"
                            and r.cell.budget.macs == 0.6 and named(of_three, r) == name])
             for name in ("one.safetensors", "two.safetensors", "three.safetensors")}  # fmt: skip
    row = row_of(rows, "attn_topk", budget="macs 0.6")
    assert row["accuracy"] == pytest.approx(np.mean(list(means.values())))
    low, high = stats.t.interval(0.95, 2, loc=row["accuracy"], scale=stats.sem(list(means.values())))
    assert row["accuracy_low"] <= max(0.0, low) and row["accuracy_high"] >= min(1.0, high)
    description = about(board.judged.rankings[0].comparison)
    assert "24 test images" in description and "3 networks" in description
    assert "one.safetensors, three.safetensors, two.safetensors" in description
    assert not any("one network" in line for line in board.notes)


def test_sets_of_pictures_are_called_by_their_folders(files: Path, tmp_path: Path) -> None:
    """Cells name a set of pictures by a hash, and boards by its folder."""
    other = Path(shutil.copytree(files / "pictures", tmp_path / "sketch"))
    next(other.glob("*/0.png")).unlink()
    (other / "n01440764" / "readme.txt").write_text("")
    images = [f"folder:{files / 'pictures'}", f"folder:{other}"]
    run(files, tmp_path / "out", "one", images=images, macs=[0.6], seeds=1)
    every = Counter(str(record.cell.task.params["images"])[:7] for record in records(tmp_path / "out"))
    assert set(every) == {"folder-"}
    for words in ((), ("--by", "task"), ("--view", "shifts")):
        shown = CliRunner().invoke(main, ["leaderboard", str(tmp_path / "out"), "--format", "md", *words]).output
        assert not re.search(r"folder-[0-9a-f]{12}", shown), shown
        assert words == () or ("sketch" in shown and "pictures" in shown)
    assert "sketch: left out: files" in " ".join(gather(tmp_path / "out").notes)


def test_what_lacks_a_network_or_a_draw_is_not_ranked_and_a_note_says_so(of_three: Path, tmp_path: Path) -> None:
    def is_removed(record: Record) -> bool:
        cell, file = record.cell, named(of_three, record)
        whole = cell.strategy.name == "attn_topk" and file == "two.safetensors"
        drawn = cell.strategy.name == "random_inside" and file == "one.safetensors" and cell.repetition == 1
        return whole or drawn

    removed = [record for record in records(of_three) if is_removed(record)]
    assert len(removed) == 2
    some = copy_without(of_three, tmp_path / "some", [record.cell_id for record in removed])
    result = CliRunner().invoke(main, ["leaderboard", str(some), "--format", "csv"])
    ranks = {row["strategy"]: row["rank"] for row in csv.DictReader(io.StringIO(result.stdout))}
    assert ranks["attn_topk"] == ranks["random_inside"] == "not ranked" != ranks["random"]
    (line,) = (line for line in result.stderr.splitlines() if "not ranked there" in line)
    assert line.startswith("attn_topk, random_inside on folder: ") and "without 1 of 6 tests" in line


def flats(strategy: str, tests: int) -> list[Flat]:
    """Return flat records of a network that is tested `tests` times, with the same outcome."""
    labels = np.arange(200) % 2
    hits = np.random.default_rng(len(strategy)).random(200) < (0.95 if strategy == "dense" else 0.8)
    outcomes = {"test_labels": bytes_of(labels), "test_predictions": bytes_of(np.where(hits, labels, 60000))}
    more = {"n_train": 0, "network": "weights-1", "accuracy": hits.mean(), "test_items": 200}
    return [flat(strategy, draw, **outcomes, **more) for draw in range(tests)]


def test_copies_of_one_network_make_nothing_surer_or_less_sure() -> None:
    """Earlier versions repeated tests whose results cannot differ."""
    once = [*flats("dense", 1), *flats("mine", 1)]
    assert (
        build([*flats("dense", 3), *flats("mine", 3)]) == build([*flats("dense", 3), *flats("mine", 1)]) == build(once)
    )
    dense, mine = build(once)
    assert (dense["rank"], mine["rank"]) == ("1", "2") and mine["versus_dense"] == "worse"


def against(first: Path, other: Path) -> list[dict[str, str]]:
    result = CliRunner().invoke(main, ["leaderboard", str(first), "--against", str(other), "--format", "csv"])
    assert result.exit_code == 0, result.output
    return list(csv.DictReader(io.StringIO(result.stdout)))


def with_file_called(out: Path, dest: Path, before: str, after: str) -> Path:
    """Return a copy of a folder of records in which a file of weights has another name."""
    shutil.copytree(out, dest)
    ((name, text),) = [(name, text) for name, text in store.sidecars(out, "files").items() if f'"{before}"' in text]
    (dest / "files").mkdir(exist_ok=True)
    (dest / name).write_text(text.replace(f'"{before}"', f'"{after}"'), encoding="utf-8")
    return dest


def test_networks_of_two_boards_are_the_same_by_their_weights(files: Path, tmp_path: Path) -> None:
    """Names of files decide nothing: not equal ones of two networks, nor two of one network."""
    strategies = ("attn_topk", "feature_norm", "random_inside", "tome", "value_norm")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pictures").symlink_to(files / "pictures")
    shutil.copy(files / "two.safetensors", tmp_path / "other" / "one.safetensors")
    one, other = tmp_path / "first", tmp_path / "second"
    run(files, one, "one", plugins=strategies, macs=[0.6], seeds=1)
    run(tmp_path / "other", other, "one", plugins=strategies, macs=[0.6], seeds=1)
    for folder in (one, other):
        assert {named(folder, record) for record in records(folder)} == {"one.safetensors"}

    renamed = with_file_called(one, tmp_path / "renamed", "one.safetensors", "best.safetensors")
    with_itself = against(one, one)
    assert against(one, renamed) == with_itself
    assert {(float(row["spearman_low"]), float(row["spearman_high"])) for row in with_itself} == {(1, 1)}
    apart = with_file_called(other, tmp_path / "apart", "one.safetensors", "two.safetensors")
    assert against(one, other) == against(one, apart)
