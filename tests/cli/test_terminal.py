"""What is printed in a terminal of some width."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

BOARD = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"


def lines_in_a_terminal(columns: int, *arguments: object, folder: Path | None = None) -> list[str]:
    """Return the lines that the command prints in a pseudo-terminal of so many columns, with what a bar draws over.

    It is called in the folder, if one is given.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        os.environ.pop("COLUMNS", None)
        os.chdir(folder or os.curdir)
        os.execv(sys.executable, [sys.executable, "-m", "sparsebench", *map(str, arguments)])
    printed = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:  # how a terminal ends
            break
        if not part:
            break
        printed += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, printed.decode()
    return printed.decode().replace("\r\n", "\n").split("\n")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("columns", [80, pytest.param(100, marks=pytest.mark.slow), 160])
@pytest.mark.parametrize(
    "arguments",
    [["leaderboard", BOARD], ["leaderboard", BOARD, "--view", "pairs"], ["leaderboard", BOARD, "--by", "task"],
     ["list"], ["list", "suites"], ["show", "attn_topk"], ["show", "quick"], ["status", BOARD]],
    ids=lambda arguments: " ".join(str(one) for one in arguments if one != BOARD),
)  # fmt: skip
def test_no_line_is_wider_than_the_terminal(columns: int, arguments: list[object]) -> None:
    lines = lines_in_a_terminal(columns, *arguments)
    assert len(lines) > 3 and max(map(len, lines)) <= columns


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which a small run is done, but for one cell."""
    return tmp_path_factory.mktemp("ran")


def drawn(line: str) -> list[str]:
    """Return what a line of a terminal shows, one after the other where a bar is drawn over and over."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).split("\r")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("columns", [80, 100, 160])
def test_no_line_of_a_run_is_wider_than_the_terminal(columns: int, ran: Path) -> None:
    lines = lines_in_a_terminal(
        columns, "run", "attn_topk", "--suite", "quick-scratch", "--task", "theory:steps=10,test=10,tokens=20",
        "--n-train", "4", "--seeds", str(1 + [80, 100, 160].index(columns)), "--jobs", "0", "--out", "sparsebench-out",
        folder=ran,
    )  # fmt: skip
    shown = [one for line in lines for one in drawn(line)]
    assert any("cells, 00:0" in one for one in shown) and any("rank" in one for one in shown)
    assert max(map(len, shown)) <= columns, max(shown, key=len)
