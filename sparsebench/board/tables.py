"""The leaderboard as text: terminal, Markdown, CSV, JSON, LaTeX."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from tabulate import tabulate

from sparsebench.board.board import Row
from sparsebench.board.build import columns_of
from sparsebench.board.columns import CHECKS, FORMATS, Column, keys_of, text_of
from sparsebench.errors import UserError

LEGEND = (
    "Accuracy, AUROC and MACs: composite task, where it was run. N50: training samples for half of the trials to "
    "succeed, theory task, where it was run. "
    "Gap: average minus worst-group accuracy, spurious task. [ ]: 95 % intervals over seeds; differences and ratios "
    "are to dense. Oracles see the relevance mask and are not ranked."
)
LEGEND_OF_CHECKS = (
    "Checks: what `sparsebench check` found of this source of the strategy, and this version of sparsebench."
)


def render(rows: Sequence[Row], form: str, notes: Sequence[str] = ()) -> str:
    """Return the leaderboard in one of FORMATS; CSV and JSON have every column, the others join intervals.

    Raises:
        UserError: another format.
    """
    if form not in FORMATS:
        raise UserError("--format", got=f"'{form}'", allowed=FORMATS)
    if form == "json":
        return json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    if form == "csv":
        return _csv(rows)
    style = {"table": "simple", "md": "pipe", "latex": "latex_booktabs"}[form]
    columns = shown_columns(rows)
    body = [[text_of(row, column) for column in columns] for row in rows]
    if form == "md":
        body = [[cell.replace("|", "\\|") for cell in line] for line in body]
    sides = ["left" if column.shown == "text" and column.key != "rank" else "right" for column in columns]
    headings = [column.heading for column in columns]
    text = tabulate(body, headers=headings, tablefmt=style, disable_numparse=True, colalign=sides)
    legend = f"{LEGEND} {LEGEND_OF_CHECKS}" if CHECKS in columns else LEGEND
    if form == "latex":
        return "\n".join([text, *(f"% {note}" for note in (legend, *notes))]) + "\n"
    return "\n\n".join([text, legend, *(["\n".join(f"- {note}" for note in notes)] if notes else [])]) + "\n"


def shown_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that people are shown: those of which some row has something."""
    return [one for one in columns_of(rows) if not rows or any(row[one.key] not in (None, "") for row in rows)]


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, keys_of(columns_of(rows)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
