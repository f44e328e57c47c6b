"""Writing a run's leaderboard beside its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsebench.board import figures, page
from sparsebench.board.build import build
from sparsebench.board.gather import board_of
from sparsebench.board.tables import render
from sparsebench.sweep.store import write_whole


def publish(flat: Sequence[dict[str, Any]], out: Path) -> None:
    """Write OUT/leaderboard.{md,csv,json,png,html}."""
    rows, board = build(flat), board_of(flat, out)
    for form in ("md", "csv", "json"):
        write_whole(out / f"leaderboard.{form}", render(rows, form, board.notes).encode())
    write_whole(out / "leaderboard.png", figures.draw(rows))
    write_whole(out / "leaderboard.html", page.render(board))
