"""What is printed in a terminal of some width."""

import fcntl
import os
import pty
import struct
import sys
import termios
from pathlib import Path

import pytest

BOARD = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"


def lines_in_a_terminal(columns: int, *arguments: object) -> list[str]:
    """Return the lines that the command prints in a pseudo-terminal of so many columns."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        os.environ.pop("COLUMNS", None)
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
    return printed.decode().replace("\r", "").split("\n")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("columns", [80, 100, 160])
@pytest.mark.parametrize(
    "arguments",
    [["leaderboard", BOARD], ["leaderboard", BOARD, "--view", "pairs"], ["leaderboard", BOARD, "--by", "task"],
     ["list"], ["list", "suites"], ["show", "attn_topk"], ["show", "quick"], ["status", BOARD]],
    ids=lambda arguments: " ".join(str(one) for one in arguments if one != BOARD),
)  # fmt: skip
def test_no_line_is_wider_than_the_terminal(columns: int, arguments: list[object]) -> None:
    lines = lines_in_a_terminal(columns, *arguments)
    assert len(lines) > 3 and max(map(len, lines)) <= columns
