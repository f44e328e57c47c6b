"""Rows of published boards compared with tests/golden/boards, cell by cell.

Write intended changes with python .ci/golden_boards.py.
"""

import csv
import io
import math
from pathlib import Path

import pytest

from sparsebench.board.board import gather
from sparsebench.board.tables import render
from sparsebench.board.views import report

ROOT = Path(__file__).resolve().parents[2]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("embedded", "quick")]


def same(actual: str, golden: str) -> bool:
    """Return whether two cells are equal; numbers may differ by the rounding of another processor."""
    try:
        return math.isclose(float(actual), float(golden), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return actual == golden


@pytest.mark.parametrize("name", ["tuned", *SLOW])
def test_the_records_give_the_board_that_is_kept(name: str) -> None:
    board = gather(ROOT / "leaderboard" / name)
    content = report(board.judged, board.notes)
    assert render(content, "md") == (ROOT / "leaderboard" / name / "leaderboard.md").read_text(encoding="utf-8")
    golden = (ROOT / "tests" / "golden" / "boards" / f"{name}.csv").read_text(encoding="utf-8")
    texts = (render(content, "csv"), golden)
    (headings, *rows), (kept_headings, *kept) = (list(csv.reader(io.StringIO(text))) for text in texts)
    assert headings == kept_headings
    assert [row[1:5] for row in rows] == [row[1:5] for row in kept]  # strategy, kind, trained, budget
    others = [
        f"{row[1]}, {row[4]}: {heading} is {value}, and was {was}"
        for row, before in zip(rows, kept, strict=True)
        for heading, value, was in zip(headings, row, before, strict=True)
        if not same(value, was)
    ]
    assert not others
