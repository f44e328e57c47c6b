"""A table for a paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate

from sparsebench.board.columns import Column, side

_ESCAPED = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "`": r"\textasciigrave{}",
}  # fmt: skip


def printable(text: str) -> str:
    """Return a text with a question mark for what Latin-1, and so the fonts of pdflatex, has not."""
    visible = "".join(" " if c.isspace() else c if c.isprintable() else "?" for c in text)
    return visible.encode("latin-1", "replace").decode("latin-1")


def escape(text: str) -> str:
    """Return a text as LaTeX shows it."""
    return "".join(_ESCAPED.get(c, c) for c in printable(text))


def table(columns: Sequence[Column], body: Sequence[Any], legend: str, notes: Sequence[str]) -> str:
    """Return a `table*` of lines of printable cells, the legend as its caption, and notes as comments.

    It is scaled down to the width of the text where it is wider. Without lines there is no table.
    """
    comments = [f"% {' '.join(note.split())}" for note in notes]
    if not body:
        return "\n".join(["% no rows", *comments]) + "\n"
    headings, sides = [column.heading for column in columns], [side(column) for column in columns]
    inner = tabulate(body, headings, "latex_booktabs", disable_numparse=True, colalign=sides)
    return "\n".join([
        r"% needs \usepackage{booktabs,graphicx}", r"\begin{table*}", r"\centering", r"\footnotesize",
        f"\\sbox0{{{inner}}}%", r"\ifdim\wd0>\textwidth\resizebox{\textwidth}{!}{\usebox0}\else\usebox0\fi",
        f"\\caption{{{escape(legend)}}}", r"\end{table*}", *comments,
    ]) + "\n"  # fmt: skip
