"""Texts of strangers, made plain: one line of characters that can be seen."""

from __future__ import annotations


def plain(text: object, most: int | None = 200) -> str:
    """Return a text in one line of at most so many characters that can be seen, for people to read.

    Escape codes, carriage returns and marks that turn the direction of writing are not among them.
    """
    shown = str(text) if most is None else str(text)[: most + 1]
    if not shown.isprintable():
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return shown if most is None or len(shown) <= most else shown[: most - 3] + "..."
