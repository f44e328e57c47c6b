"""Boards in documents: what README.md and docs/ show of the folders of boards beside them.

Between `<!-- NAME board -->` and `<!-- end of NAME board -->` a page has NAME/leaderboard.md, and README.md what
the board tells first; between `<!-- NAME verdicts -->` and its end NAME/verdicts.md. A picture
docs/results/NAME/FILE is a copy of NAME/FILE.
"""

from __future__ import annotations

import re
from pathlib import Path

from sparsebench.board import budget_table
from sparsebench.board.gather import gather
from sparsebench.records.files import content_or_none, write_whole

README = "README.md"
MARKED = re.compile(r"(<!-- ([\w-]+) (board|verdicts) -->\n).*?(<!-- end of \2 \3 -->)", re.DOTALL)


def differing(folder: Path) -> list[Path]:
    """Return the documents beside a folder of boards that do not show what is in it."""
    return [path for path, content in _documents(folder).items() if path.read_bytes() != content]


def update(folder: Path) -> list[Path]:
    """Write those documents anew, and return their paths."""
    changed = {path: content for path, content in _documents(folder).items() if path.read_bytes() != content}
    for path, content in changed.items():
        write_whole(path, content)
    return list(changed)


def _documents(folder: Path) -> dict[Path, bytes]:
    """Return what the documents beside a folder must hold, by their paths."""
    root = folder.resolve().parent
    pages = [path for path in (root / README, *sorted((root / "docs").rglob("*.md"))) if path.is_file()]
    wanted = {path: _fill(path.read_bytes(), folder, path == root / README) for path in pages}
    copies = [path for path in sorted((root / "docs" / "results").glob("*/*")) if path.suffix != ".md"]
    sources = {path: folder / path.parent.name / path.name for path in copies}
    contents = {path: content_or_none(source) for path, source in sources.items()}
    return wanted | {path: content for path, content in contents.items() if content is not None}


def _fill(content: bytes, folder: Path, is_readme: bool) -> bytes:
    """Return a document with each marked part as the folder has it; parts of other folders, and odd bytes, stay."""

    def part(match: re.Match[str]) -> str:
        begin, name, kind, end = match.groups()
        shown = content_or_none(folder / name / ("leaderboard.md" if kind == "board" else "verdicts.md"))
        if shown is None:
            return match[0]
        board = gather(folder / name).over_budgets if is_readme and kind == "board" else None
        text = shown.decode("utf-8", "surrogateescape") if board is None else f"{budget_table.first(board)}\n"
        return f"{begin}{text}{end}"

    return MARKED.sub(part, content.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
