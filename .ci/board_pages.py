"""Write docs/results/NAME/page.html, which the site links to, from the records of each published board."""

from pathlib import Path

from sparsebench.board.board import gather
from sparsebench.board.published import boards, page

ROOT = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    for folder in boards(ROOT / "leaderboard"):
        out = ROOT / "docs" / "results" / folder.name
        if out.with_suffix(".md").is_file():
            out.mkdir(exist_ok=True)
            (out / "page.html").write_bytes(page(gather(folder), docs="../.."))
