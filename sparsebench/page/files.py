"""Writing a run's leaderboard beside its records."""

from __future__ import annotations

from pathlib import Path

from sparsebench import page, style
from sparsebench.board import picture_input
from sparsebench.board.board import Board
from sparsebench.board.budget_table import text
from sparsebench.board.build import Flats
from sparsebench.board.gather import board_of
from sparsebench.records.files import write_whole


def publish(flat: Flats, out: Path) -> None:
    """Write OUT/leaderboard.{md,csv,json,png,html}, and a picture each of the spurious gap and sample complexity."""
    for name, content in files(board_of(flat, out)).items():
        write_whole(out / name, content)


def files(board: Board) -> dict[str, bytes]:
    """Return what is written of a board, by the files' names; a pure function of it."""
    forms = ("md", "csv", "json")
    over = [] if board.over_budgets is None else [board.over_budgets]
    texts = {
        f"leaderboard.{form}": text(board.rows, over, form, board.notes, columns=board.columns).encode()
        for form in forms
    }
    first, *others = picture_input.measured(board)
    pictures = {"leaderboard.png": first} | {f"leaderboard-{what}.png": what for what in others}
    drawn = {name: style.content(picture_input.draw(board, what)) for name, what in pictures.items()}
    return texts | drawn | {"leaderboard.html": page.render(board)}
