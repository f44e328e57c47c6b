"""Write the table of docs/results/claims.md from the ledger of published numbers."""

import re
from pathlib import Path

from sparsebench.paper import claims
from sparsebench.plugin.registry import Registry

PAGE = Path(__file__).resolve().parents[1] / "docs" / "results" / "claims.md"
MARKED = re.compile(r"(<!-- claims -->\n).*(<!-- end of claims -->)", re.DOTALL)


def page() -> str:
    """Return the page with the current table."""
    text = PAGE.read_text(encoding="utf-8")
    shown = claims.render(claims.recount_all(claims.load(), Registry()), "md")
    return MARKED.sub(lambda match: f"{match[1]}{shown}{match[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
