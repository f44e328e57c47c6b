"""Text, code blocks and commands of README.md and the pages of docs/."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
FENCED = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: its page and language, and the reason why it is not run, or "" if it is run."""

    page: str
    language: str
    code: str
    why_not: str


def text_of(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[Block]:
    """Return the blocks of one language on a page."""
    every = (Block(page, match[2], match[3], match[1] or "") for match in FENCED.finditer(text_of(page)))
    return [block for block in every if block.language == language]


def code(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return [block.code for block in blocks(page, "python")]


@cache
def commands() -> list[Block]:
    """Return the shell commands of all pages, one per line, without comments."""
    every = [block for page in PAGES for block in blocks(page, "bash")]
    lines = (block._replace(code=line) for block in every for line in block.code.splitlines())
    return [line._replace(code=line.code.partition("  #")[0].strip()) for line in lines]
