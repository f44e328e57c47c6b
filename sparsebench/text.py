"""Texts of strangers, made plain: what can be seen and nothing that acts, in terminals, tables and documents."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_FORMULA = re.compile(r"(^|;)(?=\s*(?:[=+@\uff0b\uff0d\uff1d\uff20]|-.))")
"""Where a spreadsheet sees one; the wide forms of the signs count, and semicolons divide cells in many countries."""
_ACTIVE = r"[\\|]|<(?=[A-Za-z/!?])|(?<!\[ )\](?=[(\[:])|:(?=//)|(?<=\b[wW]{3})\."
"""What begins or ends a link, an image or HTML in Markdown, and `|`, which divides cells."""
_MARKUP, _MARKUP_OR_CODE = re.compile(f"({_ACTIVE})"), re.compile(f"({_ACTIVE}|`)")
_ADDRESS = re.compile(r"(?<=[\w.+-])@(?=[\w-]+\.)")


def as_utf8(text: str) -> str:
    """Return a text as UTF-8 can write it: bytes that Python found no character for are read as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # half a pair of another kind
        return text.encode("utf-8", "replace").decode()


def few(names: Sequence[str], most: int = 3, width: int | None = None) -> str:
    """Return the first of some names and how many more there are; with a `width` each as `plain` text of so many."""
    shown = names[:most] if width is None else [plain(name, width) for name in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def plain(text: object, most: int | None = 200) -> str:
    """Return a text in one line of at most so many characters that can be seen, for people to read.

    Escape codes, carriage returns and marks that turn the direction of writing are not among them.
    """
    shown = str(text)
    if most is not None:
        shown = shown[: most + 1]
    if not shown.isprintable():
        shown = as_utf8(shown)
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in shown)
    return shown if most is None or len(shown) <= most else shown[: most - 3] + "..."


def cell(value: Any) -> Any:
    """Return a value as CSV may hold it: a text that a spreadsheet would take for a formula begins with a quote."""
    return _FORMULA.sub(r"\1'", value) if isinstance(value, str) else value


def markdown(text: str, code: bool = False) -> str:
    """Return a plain text so that Markdown shows it, without links, images, HTML or, unless it may have it, code."""
    escaped = (_MARKUP if code else _MARKUP_OR_CODE).sub(r"\\\1", text)
    return _ADDRESS.sub("@ ", escaped)
