"""Write docs/results/NAME/page.html, which the site links to, from the records of each published board.

docs/results/submissions/page.html has the board of all submissions, or says that there are none.
"""

from pathlib import Path

from sparsebench.board.board import gather
from sparsebench.board.published import boards, page
from sparsebench.publish.collection import TITLE, collect, is_collection

ROOT = Path(__file__).resolve().parents[1]
SUBMISSIONS = ROOT / "leaderboard" / "submissions"
NONE = (
    b"<!doctype html><html lang=en><meta charset=utf-8><title>Submissions</title><p>There are no submissions yet.</p>"
)


def write(name: str, content: bytes) -> None:
    """Write the page of a board."""
    folder = ROOT / "docs" / "results" / name
    folder.mkdir(exist_ok=True)
    (folder / "page.html").write_bytes(content)


if __name__ == "__main__":
    for folder in boards(ROOT / "leaderboard"):
        if (ROOT / "docs" / "results" / f"{folder.name}.md").is_file():
            write(folder.name, page(gather(folder), docs="../.."))
    submissions = NONE
    if is_collection(SUBMISSIONS):
        submissions = page(collect(SUBMISSIONS).board(), docs="../..", title=TITLE)
    write(SUBMISSIONS.name, submissions)
