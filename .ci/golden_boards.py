"""Write the rows of published boards to tests/golden/boards.

python .ci/golden_boards.py         # all, half a minute
python .ci/golden_boards.py quick   # one board
"""

import sys
from pathlib import Path

from sparsebench.board import views
from sparsebench.board.judge import judge
from sparsebench.board.reading import read
from sparsebench.board.tables import render

ROOT = Path(__file__).resolve().parents[1]
BOARDS = ("embedded", "quick", "tuned")


def path_of(board: str) -> Path:
    """Return the file of the rows of a board."""
    return ROOT / "tests" / "golden" / "boards" / f"{board}.csv"


def rows_of(board: str) -> str:
    """Return the rows of a board as CSV, computed from its records."""
    return render(views.report(judge(read(ROOT / "leaderboard" / board, None))), "csv")


if __name__ == "__main__":
    for name in sys.argv[1:] or BOARDS:
        path_of(name).write_text(rows_of(name), encoding="utf-8")
