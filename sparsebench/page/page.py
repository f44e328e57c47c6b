"""A board as one HTML file: no network, no framework, and a policy that forbids what it does not need."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sparsebench.board import budget_table, summary
from sparsebench.board.board import Board, BudgetBoard, Row
from sparsebench.board.columns import EVERY, NOT_RANKED, Column, file_value, keys_of, text_of

SCRIPTS = ("vendor/table-core.js", "vendor/d3.min.js", "vendor/plot.umd.min.js", "assets/state.js", "assets/copy.js",
           "assets/table.js", "assets/charts.js", "assets/cost.js", "assets/curves.js", "assets/groups.js",
           "assets/main.js")  # fmt: skip
"""In the order in which they run; each sees what those before it declare."""
SCRIPT_OF_BUDGETS = "assets/budgets.js"
"""Runs last, on pages of boards whose strategies have several budgets."""
STYLE = "assets/page.css"
STYLE_OF_PLOT = "assets/plot.css"
"""What Plot writes into each of its pictures: never sent, but allowed by its hash."""
CAPTIONS = {
    "critical-difference": "Mean ranks over the tasks; a bar joins strategies that Nemenyi's test does not tell apart.",
    "tokens": "Test pictures, and which of their patches each strategy keeps; removed patches are grey, patches that "
    "matter to the label have a yellow outline.",
    "agreement": "Which patches two strategies both keep, and which only one of them does.",
}
ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def render(board: Board) -> bytes:
    """Return the page of a board as UTF-8; the same board gives the same bytes anywhere.

    Every text of a board is shown as text, whatever is in it.
    """
    named = (("all", "All tasks", board.rows), ("task", "By task", board.by_task))
    views = [_view(name, title, rows, columns_with_values(rows, board.columns)) for name, title, rows in named]
    scripts = [_asset(name) for name in (*SCRIPTS, *([SCRIPT_OF_BUDGETS] if board.budgets else []))]
    data = {"views": views} | {name: [asdict(each) for each in getattr(board, name)] for name in ("curves", "groups")}
    data |= {"budgets": [_drawing(one) for one in board.budgets]} if board.budgets else {}
    page = (
        _environment()
        .get_template("page.html")
        .render(
            policy=_policy(scripts),
            style=_asset(STYLE),
            scripts=scripts,
            data=_embed(data),
            board=board,
            plain=_plain(board.rows, columns_with_values(board.rows, board.columns)),
            budgets=[_over_budgets(one) for one in board.budgets],
            explained=columns_with_values([*board.by_task, *board.rows], board.columns),
            pictures=[(CAPTIONS.get(name, name), _data_url(png)) for name, png in board.pictures.items()],
        )
    )
    return page.encode("utf-8", "replace")  # a lone surrogate is in no UTF-8


def columns_with_values(rows: Sequence[Row], columns: Sequence[Column] = EVERY) -> list[Column]:
    """Return those of columns that people are shown in which some row has a value, in order."""
    known = [column for column in columns if column.tables]
    return [column for column in known if any(row.get(column.key) not in (None, "", NOT_RANKED) for row in rows)]


def _view(name: str, title: str, rows: Sequence[Row], columns: Sequence[Column]) -> dict[str, Any]:
    """Return one table, column by column: of each key the values, and of each number what people read of it."""
    numbers = [column for column in columns if column.shown != "text"]
    return {
        "name": name,
        "title": title,
        "length": len(rows),
        "columns": [_data_of(column) for column in columns],
        "values": {key: _pack([file_value(row.get(key)) for row in rows]) for key in keys_of(columns)},
        "texts": {c.key: _pack([text_of(_whole(row, c), c) for row in rows]) for c in numbers},
    }


def _data_of(column: Column) -> dict[str, Any]:
    """Return what the page knows of a column."""
    return {
        "key": column.key, "heading": column.heading, "shown": column.shown, "what": column.what,
        "interval": column.interval, "task": column.task, "tables": column.tables, "keys": column.keys,
    }  # fmt: skip


def _pack(values: list[Any]) -> Any:
    """Return values as they are, or shorter.

    Where they recur, as what there is `of` and which of it stands `at` each place. Numbers as `floats`: in base 64, in
    single precision, with the lowest byte first, NaN for none: pages of many rows are a fifth smaller than with digits.
    """
    of = {value: number for number, value in enumerate(dict.fromkeys(values))}
    if 2 * len(of) < len(values):
        return {"of": list(of), "at": [of[value] for value in values]}
    if all(value is None or isinstance(value, float) for value in values):
        numbers = np.array([np.nan if value is None else value for value in values], dtype="<f4")
        return {"floats": base64.b64encode(numbers.tobytes()).decode()}
    return values


def _whole(row: Row, column: Column) -> Row:
    return {key: row.get(key) for key in column.keys}


def _plain(rows: Sequence[Row], columns: Sequence[Column]) -> list[list[str]]:
    """Return the table for those who run no scripts: headings, then the rows."""
    return [[column.heading for column in columns]] + [[text_of(_whole(r, c), c) for c in columns] for r in rows]


def _over_budgets(board: BudgetBoard) -> dict[str, Any]:
    """Return the table of one board of curves, with what differs significantly."""
    columns, title = budget_table.columns_of(board), f"{board.task}, {board.model}, N {board.n_train}"
    body = [[text_of(row, column) for column in columns] for row in board.rows]
    first = [one for one in summary.COLUMNS if any(row[one.key] for row in board.best)]
    return {
        "title": title, "headings": [column.heading for column in columns], "body": body, "notes": board.notes,
        "about": board.about, "legend": budget_table.BEST, "first": [column.heading for column in first],
        "best": [[text_of(row, column) for column in first] for row in board.best],
    }  # fmt: skip


def _drawing(board: BudgetBoard) -> dict[str, Any]:
    """Return what is drawn of one board of curves."""
    about = {name: getattr(board, name) for name in ("task", "model", "n_train", "budgets")}
    return about | {"curves": [asdict(curve) for curve in board.curves]}


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("sparsebench.page", "assets"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip


@cache
def _asset(name: str) -> Markup:
    """Return a file of this package, without the comment that would have browsers look for its source map."""
    text = resources.files(__package__).joinpath(name).read_text("utf-8")
    return Markup("\n".join(line for line in text.split("\n") if not line.startswith("//# sourceMappingURL")))


def _policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: nothing from outside, and inline only what is known by its hash."""
    styles = [_asset(STYLE), resources.files(__package__).joinpath(STYLE_OF_PLOT).read_text("utf-8").rstrip("\n")]
    return "; ".join([
        "default-src 'none'",
        f"script-src {' '.join(map(_hash, scripts))}",
        f"style-src {' '.join(map(_hash, styles))}",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ])  # fmt: skip


@cache
def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embed(data: Any) -> Markup:
    """Return JSON that no HTML parser mistakes for markup."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.translate(ESCAPED))


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
