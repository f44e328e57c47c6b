from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from measured import TOKENS
from PIL import Image
from samples import SAMPLES

from sparsebench.cli import main
from sparsebench.records import store

SMALL = [
    "--task", "composite:epochs=1,test=12,pretrain_epochs=0", "--model", "vit:dim=16,depth=2,heads=2",
    "--suite", "quick-scratch", "--n-train", "20", "--jobs", "0", "--device", "cpu",
]  # fmt: skip


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["show-tokens", *map(str, arguments)])


def test_it_trains_once_and_then_only_draws(tmp_path: Path) -> None:
    first = call("--plugin", "attn_topk", *SMALL, "--out", tmp_path)
    assert first.exit_code == 0, first.output
    assert "5 of 5 cells to run" in first.output and f"written: {tmp_path}/tokens.png" in first.output
    drawn = (tmp_path / "tokens.png").read_bytes()
    records = list((tmp_path / "records").iterdir())
    again = call("--plugin", "attn_topk", *SMALL, "--out", tmp_path)
    assert again.exit_code == 0 and "all 5 cells are in the store" in again.output
    assert (tmp_path / "tokens.png").read_bytes() == drawn and list((tmp_path / "records").iterdir()) == records
    other = tmp_path / "other.png"
    more = call("--plugin", "attn_topk", *SMALL, "--out", tmp_path, "--samples", 6, "--file", other)
    assert more.exit_code == 0 and "all 5 cells" in more.output
    with Image.open(tmp_path / "tokens.png") as few, Image.open(other) as many:
        assert few.width == many.width and few.height < many.height


def test_a_strategy_that_fails_does_not_keep_the_others_from_being_drawn(tmp_path: Path) -> None:
    done = call("--plugin", SAMPLES / "raises.py", *SMALL, "--out", tmp_path)
    assert done.exit_code == 1, done.output
    assert "raises has no result: ValueError: no idea which token matters" in done.output
    assert (tmp_path / "tokens.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--plugin", TOKENS, "--task", "sets", "--n-train", "20"], "this needs a task of pictures; got 'sets'"),
        (["--task", "nowhere"], "unknown task"),
        (["--task", "composite:mask=any,half"], "one task with one model"),
        (["--file", "tokens.jpg"], "--file; got tokens.jpg; allowed: a name that ends with .png"),
        (["--samples", "0"], "--samples"),
        (["--images", "folder:nowhere"], "is not a folder"),
        (["--suite", "nowhere"], "unknown suite"),
    ],
)
def test_a_wrong_command_is_one_line_and_writes_nothing(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = call(*arguments, "--out", tmp_path / "out")
    assert done.exit_code == 2 and says in done.output and len(done.output.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_it_has_the_engines_of_a_run_and_it_can_be_said_where_tokens_are_removed(tmp_path: Path) -> None:
    done = call(*SMALL, "--keep", "0.5", "--where", "test", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "on no worker processes" in done.output and (tmp_path / "tokens.png").exists()
    assert not (tmp_path / "suites").exists()  # it is no answer to the whole suite
    found = {record.label: record.cell.where for record in store.read(tmp_path).values()}
    assert found == {"dense": "both", "random": "test", "oracle": "test", "anti_oracle": "test"}


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(tmp_path: Path) -> None:
    done = call("--plugin", "attn_topk", *SMALL, "--out", tmp_path / "out", "--dry-run")
    assert done.exit_code == 0 and done.stdout.startswith("5 of 5 cells to run\n"), done.output
    wrong = call("--plugin", TOKENS, "--task", "sets", "--n-train", 20, "--out", tmp_path / "out", "--dry-run")
    assert wrong.exit_code == 2 and "this needs a task of pictures" in wrong.output
    assert not list(tmp_path.iterdir())
