"""What the system refuses, and an output that is full: one line where it can be said, no traceback."""

import subprocess
import sys
from collections.abc import Sequence

import pytest
from click.testing import CliRunner
from measured import TINY

from sparsebench.cli import main

LIST = [sys.executable, "-m", "sparsebench", "list", "suites"]
LONG = "a" * 300


def shell(command: Sequence[str], redirection: str = "") -> "subprocess.CompletedProcess[str]":
    words = ["bash", "-c", f'"$@" {redirection}', "bash", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--suite", TINY, "--n-train", "4", "--out", LONG],
        ["run", "--suite", "quick-scratch", "--out", "abcdefg/" * 700],
        ["leaderboard", LONG],
        ["status", LONG],
    ],
)  # fmt: skip
def test_a_path_that_is_too_long_is_one_line(words: list[str]) -> None:
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("Error: the system refuses: File name too long, 'a") and len(done.stderr) < 400


def test_a_full_standard_output_is_one_line() -> None:
    done = shell(LIST, ">/dev/full")
    assert done.returncode == 2
    assert done.stderr in {
        f"Error: {where}the system refuses: No space left on device\n" for where in ("", "standard output: ")
    }


def test_a_reader_that_has_enough_is_no_mistake() -> None:
    done = shell(["sh", "-c", '"$@" | head -c 1', "sh", *LIST[:3], "list"])
    assert "Traceback" not in done.stderr and "Error" not in done.stderr and len(done.stdout) == 1
