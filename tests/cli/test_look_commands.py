"""The commands show-tokens and compare."""

import json
from pathlib import Path

import pytest
from commands import call
from measured import TOKENS
from pages import code
from PIL import Image
from samples import SAMPLES

from sparsebench.records import store

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

SMALL = [
    "--task", "composite:epochs=1,test=12,pretrain_epochs=0", "--model", "vit:dim=16,depth=2,heads=2",
    "--n-train", "20", "--jobs", "0", "--device", "cpu",
]  # fmt: skip
IMAGES = [*SMALL, "--suite", "quick-scratch"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["show-tokens", "--plugin", TOKENS, "--task", "sets", "--n-train", "20"],
            "pictures need a task with images; got 'sets'",
        ),
        (["show-tokens", "--task", "nowhere"], "unknown task"),
        (["show-tokens", "--suite", "folder"], "task 'folder'"),
        (["compare", "attn_topk", "random", "--suite", "folder"], "task 'folder'"),
        (["show-tokens", "--suite", "nowhere"], "unknown suite"),
        (["show-tokens", "--task", "composite:mask=any,half"], "one task with one model"),
        (["show-tokens", "--file", "tokens.jpg"], "--file; got tokens.jpg; allowed: a name that ends with .png"),
        (["show-tokens", "--samples", "0"], "--samples"),
        (["compare", "attn_topk"], "Missing argument 'B'"),
        (["compare", "attn_topk", "nowhere.py"], "nowhere.py"),
        (
            ["compare", "attn_topk", "random", "--picture", "a.jpg"],
            "--picture; got a.jpg; allowed: a name that ends with .png",
        ),
        (["compare", "attn_topk", "random", "--task", "nowhere"], "unknown task"),
    ],
)
def test_a_wrong_command_is_one_line_and_writes_nothing(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = call(*arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2 and says in done.output and len(done.output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_show_tokens_trains_once_and_then_only_draws(tmp_path: Path) -> None:
    first = call("show-tokens", "--plugin", "attn_topk", *IMAGES, "--out", tmp_path)
    assert first.exit_code == 0, first.output
    assert "5 of 5 cells to run" in first.output and f"written: {tmp_path}/tokens.png" in first.output
    drawn = (tmp_path / "tokens.png").read_bytes()
    records = list((tmp_path / "records").iterdir())
    again = call("show-tokens", "--plugin", "attn_topk", *IMAGES, "--out", tmp_path)
    assert again.exit_code == 0 and "all 5 cells are in the store" in again.output
    assert (tmp_path / "tokens.png").read_bytes() == drawn and list((tmp_path / "records").iterdir()) == records
    other = tmp_path / "other.png"
    more = call("show-tokens", "--plugin", "attn_topk", *IMAGES, "--out", tmp_path, "--samples", 6, "--file", other)
    assert more.exit_code == 0 and "all 5 cells" in more.output
    with Image.open(tmp_path / "tokens.png") as few, Image.open(other) as many:
        assert few.width == many.width and few.height < many.height


def test_a_strategy_that_fails_does_not_keep_the_others_from_being_drawn(tmp_path: Path) -> None:
    done = call("show-tokens", "--plugin", SAMPLES / "raises.py", *IMAGES, "--out", tmp_path)
    assert done.exit_code == 1, done.output
    assert "raises has no result: ValueError: no idea which token matters" in done.output
    assert (tmp_path / "tokens.png").stat().st_size > 10_000


def test_show_tokens_has_the_engines_of_a_run_and_the_option_where(tmp_path: Path) -> None:
    done = call("show-tokens", *IMAGES, "--keep", "0.5", "--where", "test", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "on no worker processes" in done.output and (tmp_path / "tokens.png").exists()
    assert not (tmp_path / "suites").exists()  # only part of the suite was run
    where = {record.label: record.cell.where for record in store.read(tmp_path).values()}
    assert where == {"dense": "both", "random": "test", "oracle": "test", "anti_oracle": "test"}


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(tmp_path: Path) -> None:
    done = call("show-tokens", "--plugin", "attn_topk", *IMAGES, "--out", tmp_path / "out", "--dry-run")
    assert done.exit_code == 0 and done.stdout.startswith("5 of 5 cells to run\n"), done.output
    wrong = call(
        "show-tokens", "--plugin", TOKENS, "--task", "sets", "--n-train", 20, "--out", tmp_path / "out", "--dry-run"
    )
    assert wrong.exit_code == 2 and "pictures need a task with images" in wrong.output
    assert not list(tmp_path.iterdir())


def test_a_task_of_a_file_can_be_drawn(tmp_path: Path) -> None:
    text = next(block for block in code("docs/write/task.md") if block.startswith("# stripes.py\n"))
    (tmp_path / "stripes.py").write_text(text)
    words = ("--plugin", tmp_path / "stripes.py", "--task", "stripes", "--n-train", 20, "--out", tmp_path / "out")
    done = call("show-tokens", *words, "--dry-run")
    assert done.exit_code == 0 and "cells to run" in done.stdout, done.output


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run's folder in which the network is already trained."""
    folder = tmp_path_factory.mktemp("out")
    done = call("compare", "attn_topk", "random", *SMALL, "--out", folder)
    assert done.exit_code == 0, done.output
    assert "1 of 1 cells to run" in done.stderr and "A: attn_topk, macs 0.5\nB: random, macs 0.5" in done.stdout
    return folder


def test_compare_trains_once_and_then_only_compares(out: Path, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "agreement.png"
    done = call("compare", "attn_topk", "value_norm", *SMALL, "--out", out, "--picture", picture, "--samples", 3)
    assert done.exit_code == 0, done.output
    assert "the only cell is in the store" in done.stderr and f"written: {picture}" in done.stderr
    with Image.open(picture) as image:
        assert image.format == "PNG"
    assert not list(out.glob("*.png"))


def test_json_and_markdown_are_all_that_is_on_standard_output(out: Path) -> None:
    done = call("compare", "attn_topk", SAMPLES / "good.py", *SMALL, "--keep", 0.4, "--json", "--out", out)
    result = json.loads(done.stdout)
    assert result["a"] == {"label": "attn_topk", "budget": "keep 0.4 power-floor"} and result["b"]["label"] == "norm"
    assert [row["end"] for row in result["rows"]] == [False] * (len(result["rows"]) - 1) + [True]
    assert (result["samples"], result["patches"], result["n_train"]) == (12, 64, 20)
    assert all(0 <= row["iou_low"] <= row["iou"] <= row["iou_high"] <= 1 for row in result["rows"])
    table = call("compare", "attn_topk", SAMPLES / "good.py", *SMALL, "--keep", 0.4, "--markdown", "--out", out).stdout
    assert sum(line.startswith("|") for line in table.splitlines()) == 2 + len(result["rows"])


def test_files_bring_the_task_and_the_model(tmp_path: Path) -> None:
    for name, page in (("stripes", "docs/write/task.md"), ("plain_vit", "docs/write/model.md")):
        text = next(block for block in code(page) if block.startswith(f"# {name}.py\n"))
        (tmp_path / f"{name}.py").write_text(text)
    more = ["--n-train", "20", "--device", "cpu", "--model", "plain_vit:depth=2", "--task", "stripes:epochs=1,test=12"]
    files = [word for name in ("stripes", "plain_vit") for word in ("--plugin", tmp_path / f"{name}.py")]
    done = call(
        "compare", "attn_topk", SAMPLES / "good.py", *more, *files, "--jobs", "0", "--out", tmp_path / "a", "--json"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"] == 12
    assert call("compare", "attn_topk", "random", *more, *files, "--dry-run", "--out", tmp_path / "c").exit_code == 0
    refused = call("compare", "attn_topk", "random", *more, "--out", tmp_path / "c")
    assert refused.exit_code == 2 and "stripes" in refused.output
    wrong = call("compare", "attn_topk", "random", *SMALL, "--plugin", "tome", "--out", tmp_path / "c")
    assert wrong.exit_code == 2 and "--plugin; got 'tome'; allowed: files with the task" in wrong.output


def test_observers_receive_the_record_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(code("docs/write/observer.md")[0])
    words = ("attn_topk", "random", *SMALL, "--out", tmp_path / "out", "--observe", tmp_path / "lines.py")
    dry = call("compare", *words, "--dry-run")
    assert dry.exit_code == 0 and dry.stdout.startswith("1 of 1 cells to run\n") and not (tmp_path / "out").exists()
    done = call("compare", *words)
    assert done.exit_code == 0, done.output
    (line,) = (tmp_path / "out" / "lines.txt").read_text().splitlines()
    assert line.split()[:3] == [*store.read(tmp_path / "out"), "dense", "ok"]
