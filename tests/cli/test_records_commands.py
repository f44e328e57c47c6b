"""sparsebench export, merge and leaderboard, on folders written by older versions."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pytest
from click.testing import CliRunner
from commands import call
from measured import TINY

from sparsebench.board.board import gather
from sparsebench.board.published import publish
from sparsebench.cli import main
from sparsebench.records import store, table

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "store"


NO_RECORDS = "no records in NONE; run `sparsebench run --out` with this folder first"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "records", tmp_path / "out" / "records")
    return tmp_path / "out"


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """Return a folder with the records of two strategies, whose board is made quickly."""
    rows = store.rows(GOLDEN).filter(pc.field("strategy").isin(["dense", "random"]))
    table.write(tmp_path / "few" / "records" / "few.parquet", rows, store.sidecars(GOLDEN, *store.SIDECARS))
    return tmp_path / "few"


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_file_and_standard_output_get_the_same(out: Path, tmp_path: Path, form: str) -> None:
    shown = call("export", out, "--format", form)
    written = call("export", out, "--format", form, "-o", tmp_path / "new")
    assert shown.exit_code == written.exit_code == 0 and written.stdout == ""
    assert shown.stdout_bytes == (tmp_path / "new").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["export", "OUT", "-o", "OLD"], "OLD already exists and is not overwritten; give another -o"),
        (["export", "OUT", "--format", "parquet"], "parquet needs an output file; give -o FILE"),
        (["export", "NONE", "-o", "NEW"], NO_RECORDS),
        (["merge", "OUT", "NONE", "-o", "NEW"], NO_RECORDS),
        (["merge", "OUT", "-o", "OUT"], "OUT already exists and is not overwritten; give another -o"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(tmp_path: Path, out: Path, arguments: list[str], error: str) -> None:
    places = {"OUT": out, "NONE": tmp_path / "none", "NEW": tmp_path / "new", "OLD": tmp_path / "old"}
    (tmp_path / "old").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    result = call(*(places.get(a, a) for a in arguments))
    for word, path in places.items():
        error = error.replace(word, str(path))
    assert (result.exit_code, result.stderr) == (2, f"Error: {error}\n")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "old").read_text() == "mine"


def test_a_board_goes_to_a_file_or_a_pipe(few: Path, tmp_path: Path) -> None:
    shown = call("leaderboard", few, "--format", "md", "--notes")
    written = call("leaderboard", few, "--format", "md", "-o", tmp_path / "new" / "board")
    assert shown.exit_code == written.exit_code == 0 and written.stdout == ""
    assert written.stderr == f"written: {tmp_path / 'new' / 'board'}\n"
    assert shown.stdout_bytes == (tmp_path / "new" / "board").read_bytes() and b"dense" in shown.stdout_bytes


@pytest.mark.integration
def test_a_page_is_not_for_the_terminal(few: Path) -> None:
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "sparsebench", "leaderboard", str(few), "--format", "html"]
    done = subprocess.run(command, stdout=follower, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(follower)
    os.close(leader)
    assert (done.returncode, done.stderr) == (
        2,
        "Error: an HTML page cannot be shown in a terminal; give -o FILE.html\n",
    )


def test_the_page_beside_the_records_is_the_one_of_the_command(few: Path) -> None:
    publish(gather(few), few)
    assert (few / "leaderboard.html").read_bytes() == call("leaderboard", few, "--format", "html").stdout_bytes
    for words in (("--view", "pairs"), ("--columns", "rank")):
        refused = call("leaderboard", few, "--format", "html", *words)
        assert refused.exit_code == 2 and f"{words[0]} needs a table; got --format html" in refused.stderr


def test_a_run_names_the_other_strategies_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "--suite", TINY, "--n-train", "4", "--seeds", "1", "--jobs", "0", "--out", "both"]
    first = CliRunner().invoke(main, [*words, "noise"])
    second = CliRunner().invoke(main, [*words, "attn_topk"])
    assert first.exit_code == second.exit_code == 0
    assert "also has" not in first.stderr and "both also has results of noise" in second.stderr
    whole = CliRunner().invoke(main, ["leaderboard", "both"]).stdout
    assert "noise" in whole and "attn_topk" in whole and "noise" not in second.stdout
