"""The leaderboard as text: terminal, Markdown, CSV, JSON, LaTeX."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from tabulate import SEPARATING_LINE, tabulate

from sparsebench.board import latex
from sparsebench.board.board import Row
from sparsebench.board.build import columns_of
from sparsebench.board.columns import (
    BY_LOSS,
    CHECKS,
    EVERY,
    FORMATS,
    NOT_REACHED,
    Column,
    file_value,
    keys_of,
    side,
    text_of,
)
from sparsebench.errors import UserError
from sparsebench.text import cell, markdown

LEGEND = (
    "[ ]: 95 % intervals, of seeds and items, each for itself; differences and ratios are to dense unless named. "
    "vs dense, vs random_inside: all rows judged together. Oracles see the relevance mask and are not ranked."
)
LEGEND_OF_ACCURACY = "Accuracy, AUROC and MACs: {} task, where it was run."
LEGEND_OF_PARTS = {
    "trials": ("N50: training samples for half of the trials to succeed", ", {} task, where it was run"),
    "gaps": ("Gap: accuracy where the background fits the class minus that where it does not", ", {} task"),
}
"""What the columns of a part mean, and of which task they are, where that is one; see `Column.part`."""
LEGEND_OF_CHECKS = (
    "Checks: what `sparsebench check` found of this source of the strategy, and this version of sparsebench."
)

LEGEND_OF_LOSS = "N50, loss: the same by the paper's criterion, a mean test loss below a threshold."
NOT_REACHED_MEANS = (
    "Not reached: less than half of the trials succeed even with the most training samples that were tried."
)


def render(
    rows: Sequence[Row],
    form: str,
    notes: Sequence[str] = (),
    columns: Sequence[Column] | None = None,
    legend: str | None = None,
) -> str:
    """Return rows in one of FORMATS; CSV and JSON have every column, to DIGITS digits, the others join intervals.

    Args:
        rows: the leaderboard's, or another view's.
        form: one of FORMATS. LaTeX is a `table*` that needs the package booktabs.
        notes: lines below.
        columns: of another view; the leaderboard's unless given, but for those that are empty.
        legend: what is said below the table; the leaderboard's unless given.

    Raises:
        UserError: another format.
    """
    if form not in FORMATS:
        raise UserError("--format", got=f"'{form}'", allowed=FORMATS)
    if form == "json":
        return json.dumps([_short(row) for row in rows], indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    if form == "csv":
        return _csv(rows, columns_of(rows) if columns is None else columns)
    shown = shown_columns(rows) if columns is None else columns
    legend = legend_of(rows, shown) if legend is None else legend
    if form == "latex":
        return latex.table(shown, cells(rows, shown, form), legend, notes)
    legend = markdown(legend, code=True) if form == "md" else legend
    return "\n\n".join([grid(rows, shown, form), legend, *as_list(notes, form)]) + "\n"


def legend_of(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """Return what is said below a leaderboard with those columns."""
    tasks, keys = {column.part: column.task for column in columns if column.task}, {column.key for column in columns}
    first = [LEGEND_OF_ACCURACY.format(tasks["accuracy"])] if "accuracy" in tasks else []
    for part, (meaning, where) in LEGEND_OF_PARTS.items():
        if any(column.part == part for column in columns):
            first.append(f"{meaning}{where.format(tasks[part]) if part in tasks else ''}.")
    more = {BY_LOSS.key: LEGEND_OF_LOSS, CHECKS.key: LEGEND_OF_CHECKS}
    legend = " ".join([*first, LEGEND, *(text for key, text in more.items() if key in keys), *meanings_of(columns)])
    reached = not any(NOT_REACHED in text_of(row, column) for row in rows for column in columns)
    return legend if reached else f"{legend} {NOT_REACHED_MEANS}"


def meanings_of(columns: Sequence[Column]) -> list[str]:
    """Return what the columns are of metrics that tasks declare, a sentence each."""
    known = {column.key for column in EVERY}
    return [f"{column.heading}: {column.what}{_of(column)}." for column in columns if column.key not in known]


def _of(column: Column) -> str:
    return f", {column.task} task" if column.task else ""


def grid(rows: Sequence[Row], columns: Sequence[Column], form: str) -> str:
    """Return the lines of a table, for a terminal ("table") or in Markdown ("md")."""
    headings, style = [column.heading for column in columns], {"table": "simple", "md": "pipe"}[form]
    headings = [markdown(heading) for heading in headings] if form == "md" else headings
    sides = [side(column) for column in columns]
    return tabulate(cells(rows, columns, form), headings, style, disable_numparse=True, colalign=sides)


def as_list(notes: Sequence[str], form: str) -> list[str]:
    """Return notes as a list, if there are any."""
    return ["\n".join(f"- {markdown(note) if form == 'md' else note}" for note in notes)] if notes else []


def cells(rows: Sequence[Row], columns: Sequence[Column], form: str) -> list[Any]:
    """Return the cells of a table as a form has them."""
    body = [[text_of(row, column) for column in columns] for row in rows]
    if form == "md":
        return [list(map(markdown, line)) for line in body]
    if form == "latex":
        body = [list(map(latex.printable, line)) for line in body]
    return _apart(rows, body)


def _apart(rows: Sequence[Row], body: list[list[str]]) -> list[Any]:
    """Return the lines of a table with a rule before oracles, which are not ranked, where others are above them."""
    lines: list[Any] = []
    for before, row, line in zip((None, *rows), rows, body, strict=False):
        if before is not None and row.get("kind") == "oracle" != before.get("kind"):
            lines.append(SEPARATING_LINE)
        lines.append(line)
    return lines


def shown_columns(rows: Sequence[Row], columns: Sequence[Column] = EVERY) -> list[Column]:
    """Return those of columns that people are shown: those of which some row has something."""
    shown = [one for one in columns_of(rows, columns) if one.tables]
    return [one for one in shown if not rows or any(row[one.key] not in (None, "") for row in rows)]


DIGITS = 10
"""Of numbers in files, significant ones: what machines differ in is not among them."""


def _short(row: Row) -> Row:
    values = {key: file_value(value) for key, value in row.items()}
    return {key: float(format(x, f".{DIGITS}g")) if isinstance(x, float) else x for key, x in values.items()}


def _csv(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, keys_of(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: cell(value) for key, value in _short(row).items()} for row in rows)
    return out.getvalue()
