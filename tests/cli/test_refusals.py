"""What the system refuses, and streams that are closed or full: one line where it can be said, no traceback."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

LIST = [sys.executable, "-m", "sparsebench", "list", "suites"]
LONG = "a" * 300


def shell(command: Sequence[str], redirection: str = "") -> "subprocess.CompletedProcess[str]":
    words = ["bash", "-c", f'"$@" {redirection}', "bash", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--suite", "quick-scratch", "--task", "theory:steps=10", "--n-train", "4", "--out", LONG],
        ["run", "--suite", "quick-scratch", "--out", "abcdefg/" * 700],
        ["leaderboard", LONG],
        ["status", LONG],
    ],
)  # fmt: skip
def test_a_path_that_is_too_long_is_one_line(words: list[str]) -> None:
    done = shell([*LIST[:3], *words])
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("Error: the system refuses: File name too long, 'a") and len(done.stderr) < 400


REFUSES_EACH_TIME = """
import io, os, sys
from sparsebench.cli import run_cli

class Full(io.StringIO):
    def flush(self):
        os.write(1, b"what was written before")

sys.stdout, sys.argv = Full(), ["sparsebench", "list", "suites"]
run_cli()
"""


@pytest.mark.parametrize("words", [LIST, [sys.executable, "-c", REFUSES_EACH_TIME]], ids=["once", "each time"])
def test_a_full_standard_output_is_one_line(words: list[str]) -> None:
    done = shell(words, ">/dev/full")
    assert done.returncode == 2
    assert done.stderr in {
        f"Error: {where}the system refuses: No space left on device\n" for where in ("", "standard output: ")
    }


@pytest.mark.parametrize("streams", [">&-", "<&- >&-", "2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_streams_that_are_closed_do_not_matter(streams: str) -> None:
    done = shell(LIST, streams)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&- " not in f"{streams.replace('2>', '')} ")


@pytest.mark.parametrize("streams", ["2>/dev/full", "2>&-"])
def test_a_mistake_has_its_exit_code_also_where_it_cannot_be_said(streams: str) -> None:
    assert shell([*LIST[:3], "leaderboard", "/nowhere"], streams).returncode == 2


def test_a_reader_that_has_enough_is_no_mistake() -> None:
    done = shell(["sh", "-c", '"$@" | head -c 1', "sh", *LIST[:3], "list"])
    assert "Traceback" not in done.stderr and "Error" not in done.stderr and len(done.stdout) == 1
