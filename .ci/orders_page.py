"""Write what boards say to published orders, and how they agree with each other, into docs/results/orders.md."""

from itertools import combinations
from pathlib import Path

from claims_page import RESULTS, with_table

from sparsebench.board import orders as standings
from sparsebench.board import tables
from sparsebench.board.judge import Leaderboard, judge
from sparsebench.board.reading import read
from sparsebench.board.tables import Report, Table
from sparsebench.errors import UserError
from sparsebench.paper import orders

LEADERBOARD = Path(__file__).resolve().parents[1] / "leaderboard"
NAMES = ("embedded", "vit-s", "detail", "tuned")
"""The published boards of many strategies on pictures."""
MORE = ("vit-s-three",)
"""Boards that share networks with one of these: published orders are asked, and not whether they agree with it."""
PAGE = RESULTS / "orders.md"


def of_pairs(boards: dict[str, Leaderboard]) -> Report:
    """Return the agreement of each pair of boards that have strategies in common."""
    parts = []
    for first, other in combinations(boards, 2):
        try:
            (table,) = standings.agreement(boards[first], boards[other]).tables
        except UserError:  # no strategies in common
            continue
        parts.append(table._replace(title=f"{first} and {other}"))
    return Report(parts, Table([], standings.AGREEMENT))


if __name__ == "__main__":
    boards = {name: judge(read(LEADERBOARD / name)) for name in (*NAMES, *MORE)}
    text = PAGE.read_text(encoding="utf-8")
    said = orders.report_on_boards(orders.load(), boards)
    text = with_table(text, "boards", tables.render(said, "md"))
    independent = {name: boards[name] for name in NAMES}
    text = with_table(text, "agreement", tables.render(of_pairs(independent), "md"))
    PAGE.write_text(text, encoding="utf-8")
