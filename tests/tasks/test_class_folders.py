"""Class folders are assigned to the right classes of the head, or the error is one line. The tests look at the accuracy
of a network that reads the class in the picture, and at the boards."""

import json
import logging
import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from coded import ARCH, TASK, write_pictures, write_suite, write_weights

import sparsebench
from sparsebench.cli import main
from sparsebench.records import store
from sparsebench.records.store import merge
from sparsebench.tasks.sources.labels import imagenet_classes as classes

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SHAPES = ("disc", "square", "cross", "ring")
"""Classes in the order of a head, which is not the order of the names."""


def run(root: Path, weights: Path, out: Path, task: str = TASK) -> float:
    """Return the accuracy of dense in a run."""
    suite = write_suite(out.parent / "suite.toml")
    board = sparsebench.run(
        suite=str(suite), tasks=task, model=f"timm:{ARCH}", images=f"folder:{root}", weights=weights, jobs=0, out=out
    )
    return float(board["accuracy"].iloc[0])


def command(root: Path, weights: Path, out: Path, task: str = TASK, *more: str) -> Result:
    """Return the result of the command."""
    suite = write_suite(out.parent / "suite.toml")
    words = ("--suite", suite, "--task", task, "--model", f"timm:{ARCH}", "--images", f"folder:{root}", "--jobs", 0)
    return CliRunner().invoke(main, ["run", *map(str, words), "--weights", str(weights), "--out", str(out), *more])


@pytest.fixture(scope="module")
def thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "thousand.safetensors", range(1000))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weights(tmp_path_factory.mktemp("weights") / "four.safetensors", range(4))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["numbers", "WordNet ids", "own names"])
def test_a_thousand_classes_are_all_right(way: str, thousand: Path, tmp_path: Path) -> None:
    names, task = {"numbers": list(map(str, range(1000))), "WordNet ids": list(classes())}.get(way), TASK
    if names is None:
        names = [f"Own Name {k}" for k in random.Random(0).sample(range(1000), 1000)]
        (tmp_path / "classes.txt").write_text("\n".join(names))
        task = f"{TASK},classes={tmp_path / 'classes.txt'}"
    write_pictures(tmp_path / "pictures" / "val", {name: k for k, name in enumerate(names)})
    assert run(tmp_path / "pictures", thousand, tmp_path / "out", task) == 1


def test_folders_by_number_are_the_classes_and_every_board_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = write_weights(tmp_path / "twelve.safetensors", range(12))
    write_pictures(tmp_path / "val", {str(k): k for k in range(12)}, each=2)
    out = tmp_path / "out"
    done = command(tmp_path, weights, out)
    says = "class folders are numbered by their names, which are numbers of the head's classes (a head of 12 classes)"
    assert done.exit_code == 0 and says in done.output and "warning" not in done.stderr
    (record,) = store.read(out).values()
    assert record.metrics["accuracy"].value == 1
    assert (record.cell.task.params["labels"], record.cell.task.params["head"]) == ("numbers", 12)
    for name in ("leaderboard.md", "leaderboard.html"):
        assert says.replace("'", "&#39;") in (out / name).read_text().replace("'", "&#39;")
    assert says.endswith(json.loads((out / "leaderboard.json").read_text())[0]["class_folders"])
    assert says in command(tmp_path, weights, tmp_path / "dry", TASK, "--dry-run").output
    merge([out], tmp_path / "merged")
    assert says in CliRunner().invoke(main, ["leaderboard", str(tmp_path / "merged")]).output
    (line,) = (
        message for message in caplog.messages if "ImageFolder" in message
    )  # once for both commands, as for several files of weights
    assert "class folders 0, 1, 2 and 9 more are" in line and "(0, 1, 10 and 9 more), give --task folder:labels" in line
    caplog.clear()
    (tmp_path / "val").rename(tmp_path / "test")
    write_pictures(tmp_path / "few" / "val", {str(k): k for k in range(10)})
    first_ten = write_weights(tmp_path / "ten.safetensors", range(10))
    for root, file, rule in ((tmp_path, weights, "numbers"), (tmp_path, weights, "names"), ("few", first_ten, "auto")):
        assert command(tmp_path / root, file, out, f"{TASK},labels={rule}", "--dry-run").exit_code == 0
    assert "ImageFolder" not in caplog.text


def test_an_order_unlike_the_heads_is_a_warning(four: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another order than the head's is a warning and a file says the right one."""
    write_pictures(tmp_path / "val", {name: k for k, name in enumerate(SHAPES)}, each=10)
    done = command(tmp_path, four, tmp_path / "out")
    says = (
        "folder, timm: dense is right in 0 of 40 pictures, and chance would be 10: the class folders are probably in "
    )
    says += "another order than the head's classes; give their order with --task folder:classes=FILE"
    assert done.exit_code == 0 and f"warning: {says}" in done.stderr.splitlines()[-4:]
    assert says in (tmp_path / "out" / "leaderboard.md").read_text()
    with caplog.at_level(logging.WARNING):
        run(tmp_path, four, tmp_path / "out")
    assert says in caplog.text
    (tmp_path / "classes.json").write_text(json.dumps({name: k for k, name in enumerate(SHAPES)}))
    done = command(tmp_path, four, tmp_path / "right", f"{TASK},classes={tmp_path / 'classes.json'}")
    (record,) = store.read(tmp_path / "right").values()
    assert record.metrics["accuracy"].value == 1 and record.cell.task.params["labels"] == "file"
    assert f"by the file {record.cell.task.params['classes']}" in done.output and "warning" not in done.stderr
    assert str(tmp_path) not in record.model_dump_json()


@pytest.mark.parametrize(
    ("names", "more", "says"),
    [
        (("Zebra", "ant", "Bee", "cat"), "", "torchvision sorts class folder Bee before ant"),
        (("a", "b", "c"), "", "3 class folders, and the head has 4 classes"),
        (SHAPES, ",classes=nowhere.txt", "classes: nowhere.txt cannot be read"),
        (SHAPES, ",labels=names,classes=x.txt", "labels=names and classes=x.txt number class folders twice"),
        (SHAPES, ",labels=file", "labels=file: no file is given"),
        (SHAPES, ",head=7", "got head=7; allowed: 4"),
    ],
)
def test_ambiguous_class_orders_are_one_line_before_any_cell(
    names: tuple[str, ...], more: str, says: str, four: Path, tmp_path: Path
) -> None:
    """Unknown or contradictory class orders are one line before anything runs."""
    write_pictures(tmp_path / "val", {name: k for k, name in enumerate(names)})
    done = command(tmp_path, four, tmp_path / "out", TASK + more)
    (line,) = done.stderr.splitlines()
    assert done.exit_code == 2 and says in line and not (tmp_path / "out").exists()
    assert more or ("classes=FILE" in line and str(tmp_path) in line)


def test_the_run_and_the_board_report_files_that_are_left_out(four: Path, tmp_path: Path) -> None:
    write_pictures(tmp_path / "val", {str(k): k for k in range(4)}, each=2)
    write_pictures(tmp_path / "val", {"@eaDir": 0, "0/@eaDir": 1})
    (tmp_path / "val" / "1" / "notes.txt").write_text("x")
    out = tmp_path / "out"
    done = command(tmp_path, four, out)
    (record,) = store.read(out).values()
    says = "left out: a system's folders: 2 (0/@eaDir, @eaDir); files of another kind: 1 (1/notes.txt)"
    assert says in done.output and record.metrics["accuracy"].value == 1 and record.metrics["accuracy"].n == 8
    merge([out], tmp_path / "merged")
    for folder in (out, tmp_path / "merged"):
        board = CliRunner().invoke(main, ["leaderboard", str(folder)]).output
        assert f"{tmp_path.name}: {says}" in board
        assert str(tmp_path) not in board


def test_a_constant_prediction_is_no_warning(tmp_path: Path) -> None:
    weights = write_weights(tmp_path / "same.safetensors", [3] * 4)  # it predicts class 0 for all pictures
    write_pictures(tmp_path / "val", {"0": 0}, each=1)
    write_pictures(tmp_path / "val", {str(k): k for k in (1, 2, 3)}, each=30)
    done = command(tmp_path, weights, tmp_path / "out")
    (record,) = store.read(tmp_path / "out").values()
    assert record.metrics["accuracy"].value is not None and record.metrics["accuracy"].value < 0.02
    assert done.exit_code == 0 and "warning" not in done.stderr
