"""Writing a run's leaderboard beside its records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sparsebench.board import figures
from sparsebench.board.build import build, cautions, failures, other_settings, remarks
from sparsebench.board.tables import render
from sparsebench.sweep.store import write_whole


def notes_on(flat: Sequence[dict[str, Any]]) -> list[str]:
    """Return what a reader of the board must know besides: what is left out, what failed, what checks found."""
    more = [
        f"{task}: {n} other setting{'s' if n > 1 else ''} (data, model or size) not shown; see them with --by task"
        for task, n in other_settings(flat).items()
    ]
    return more + cautions(flat) + failures(flat) + remarks(flat)


def publish(flat: Sequence[dict[str, Any]], out: Path) -> None:
    """Write OUT/leaderboard.{md,csv,json,png}."""
    rows, notes = build(flat), notes_on(flat)
    for form in ("md", "csv", "json"):
        write_whole(out / f"leaderboard.{form}", render(rows, form, notes).encode())
    write_whole(out / "leaderboard.png", figures.draw(rows))
