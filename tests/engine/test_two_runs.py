"""Two runs of one folder at the same time, and runs of a folder that may only be read."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sparsebench.cli import main
from sparsebench.records import store

RUN = [
    "run",
    "--suite",
    "quick-scratch",
    "--task",
    "theory:steps=40,test=20,tokens=20",
    "--n-train",
    "4,8",
    "--seeds",
    "3",
    "--jobs",
    "0",
]
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "store"


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.mark.slow
def test_both_end_with_the_board_that_one_alone_has(tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    line = [sys.executable, "-m", "sparsebench", *RUN, "--format", "csv", "--out", str(both)]
    runs = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    expected = call(*RUN, "--format", "csv", "--out", alone)
    ends = [run.communicate(timeout=300) for run in runs]
    assert [expected.exit_code, *(run.returncode for run in runs)] == [0, 0, 0], ends
    assert [end[0] for end in ends] == [expected.stdout] * 2
    assert (both / "leaderboard.csv").read_bytes() == (alone / "leaderboard.csv").read_bytes()
    assert set(store.read(both)) == set(store.read(alone)) and not list(both.rglob("*.part"))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounts need root")
def test_a_folder_that_may_only_be_read_gives_a_board_and_refuses_a_run(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "--bind", GOLDEN, disk], capture_output=True).returncode:
        pytest.skip("file systems may not be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True)
        board, refused = call("leaderboard", disk), call(*RUN, "--out", disk)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert board.exit_code == 0 and "dense" in board.stdout
    assert refused.exit_code == 2
    assert (
        refused.stderr.splitlines()[-1] == f"Error: cannot write to {disk}: Read-only file system; give another --out"
    )
