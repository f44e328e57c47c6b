"""Published boards compared with tests/golden, cell by cell and as they are shown.

Write intended changes with python .ci/golden_boards.py.
"""

import csv
import io
import math
import re
import sys
from pathlib import Path

import pytest

from sparsebench.board.board import gather
from sparsebench.board.tables import render
from sparsebench.board.views import report

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".ci"))

import golden_boards

ROOT = Path(__file__).resolve().parents[2]
WORDS = re.compile(r"[-+]?\d[\d.e-]*|\S")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("embedded", "cifar")]


def same(actual: str, golden: str) -> bool:
    """Return whether two cells are equal; numbers may differ by the rounding of another processor."""
    try:
        return math.isclose(float(actual), float(golden), rel_tol=1e-6, abs_tol=1e-9)
    except ValueError:
        return actual == golden


@pytest.mark.parametrize("name", ["quick", "tuned", "cifar-networks", *SLOW])
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


def test_what_is_shown_of_boards_is_what_is_kept() -> None:
    for name, text in golden_boards.shown():
        lines, kept = (part.splitlines() for part in (text, (golden_boards.GOLDEN / "shown" / name).read_text("utf-8")))
        assert len(lines) == len(kept), name
        others = [
            f"{name}: {line!r}, and was {before!r}"
            for line, before in zip(lines, kept, strict=True)
            if line != before and not all(map(same, *map(WORDS.findall, (line, before))))
        ]
        assert not others
