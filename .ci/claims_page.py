"""Write the tables of docs/results/claims.md and orders.md from the ledgers of published numbers and orders."""

import re
from pathlib import Path

from sparsebench.board import tables
from sparsebench.board.tables import Choice
from sparsebench.paper import claims, orders
from sparsebench.plugin.registry import Registry

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"
COLUMNS_OF_VOTES = ("order", "better", "worse", "rows", "matched", "share", "loss", "training", "baselines")


def of_claims() -> str:
    """Return the table of published numbers."""
    return claims.render(claims.recount_all(claims.load(), Registry()), "md")


def of_votes() -> str:
    """Return the table of the votes of published orders."""
    return tables.render(orders.report_of_votes(orders.load()), "md", Choice(COLUMNS_OF_VOTES))


TABLES = {"claims.md": ("claims", of_claims), "orders.md": ("votes", of_votes)}
"""The mark of the table of each page, and what writes it."""


def with_table(text: str, mark: str, table: str) -> str:
    """Return the text of a page with a new table between its marks."""
    marked = re.compile(f"(<!-- {mark} -->\n).*(<!-- end of {mark} -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}{table}{match[2]}", text)


if __name__ == "__main__":
    for name, (mark, write) in TABLES.items():
        page = RESULTS / name
        page.write_text(with_table(page.read_text(encoding="utf-8"), mark, write()), encoding="utf-8")
