"""Writing a run's leaderboard beside its records."""

from __future__ import annotations

from pathlib import Path

from sparsebench.board import figures
from sparsebench.board.build import Flats, judge
from sparsebench.board.notes import notes_on
from sparsebench.board.tables import render
from sparsebench.sweep.store import write_whole


def publish(flat: Flats, out: Path) -> None:
    """Write OUT/leaderboard.{md,csv,json,png}."""
    judged = judge(flat)
    rows, notes = judged.rows, notes_on(flat, judged.contests)
    for form in ("md", "csv", "json"):
        write_whole(out / f"leaderboard.{form}", render(rows, form, notes).encode())
    write_whole(out / "leaderboard.png", figures.draw(rows))
