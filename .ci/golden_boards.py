"""Writes tests/golden/boards: what the records of five published boards give, cell by cell.

python .ci/golden_boards.py         # all five, half a minute
python .ci/golden_boards.py quick   # one
"""

import sys
from pathlib import Path

from sparsebench.board import budget_table, reading
from sparsebench.board.build import judge

ROOT = Path(__file__).resolve().parents[1]
BOARDS = ("embedded", "cifar", "cifar-networks", "quick", "tuned")


def path_of(board: str) -> Path:
    """Return where the rows of a board are kept."""
    return ROOT / "tests" / "golden" / "boards" / f"{board}.csv"


def rows_of(board: str) -> str:
    """Return the rows of a board that its records give, as CSV."""
    judged = judge(reading.read(ROOT / "leaderboard" / board))
    return budget_table.text(judged.rows, judged.budgets, "csv", columns=judged.columns)


if __name__ == "__main__":
    for name in sys.argv[1:] or BOARDS:
        path_of(name).parent.mkdir(parents=True, exist_ok=True)
        path_of(name).write_text(rows_of(name), encoding="utf-8")
