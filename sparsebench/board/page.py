"""A board as one HTML file: no network, no library, and a policy that forbids what it does not need."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sparsebench.board import picture, views
from sparsebench.board.board import Board
from sparsebench.board.columns import BY_TASK, EVERY, HOW, NOT_RANKED, Column, Row, dicts, file_value, text_of
from sparsebench.board.judge import Curves
from sparsebench.board.settings import DENSE
from sparsebench.board.tables import with_values

SCRIPTS = ("assets/chart.js", "assets/table.js", "assets/main.js")
"""In the order in which they run; each sees what those before it declare."""
STYLE = "assets/page.css"
CAPTIONS = {
    "tokens": "Test pictures, and which of their patches each strategy keeps; removed patches are grey, patches that "
    "matter to the label have a yellow outline.",
    "agreement": "Which patches two strategies both keep, and which only one of them does.",
}
FIRST = ("rank", "strategy", "budget", "how", "macs_ratio", "sample_complexity", "sample_complexity_ratio",
         "aligned_gap_reduction", "accuracy", "accuracy_delta", "random_inside_delta", "versus_random_inside",
         "speed_up", "checks", "badge")  # fmt: skip
"""Columns that a table begins with, before those of metrics that tasks declare; the others only a reader asks for."""
KNOWN = {column.key for column in EVERY}
SORTED = ("sample_complexity", "aligned_gap_reduction", "accuracy")
"""The first of them that was measured decides the order of a table."""
DIGITS, GIGA = 6, 1e9
ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def render(board: Board, docs: str = "") -> bytes:
    """Return the page of a board as UTF-8; the same board gives the same bytes anywhere.

    Every text of a board is shown as text, whatever is in it.

    Args:
        board: the board.
        docs: where the site of the documentation lies, seen from the page; "" if the page links to none.
    """
    scripts, style = [_asset(name) for name in SCRIPTS], _asset(STYLE)
    policy = "; ".join([  # nothing from outside, and inline only what is known by its hash
        "default-src 'none'", f"script-src {' '.join(map(_hash, scripts))}", f"style-src {_hash(style)}",
        "img-src data:", "base-uri 'none'", "form-action 'none'",
    ])  # fmt: skip
    data = json.dumps(data_of(board), ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(ESCAPED)
    # What has several budgets begins, or else what the board is about.
    opening = [one for one in board.by_task.rankings if one.curves is not None] or board.judged.rankings
    environment = Environment(loader=PackageLoader("sparsebench.board", "assets"), autoescape=True,
                              undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                              keep_trailing_newline=True)  # fmt: skip
    page = environment.get_template("page.html").render(
        policy=policy, style=style, scripts=scripts, data=Markup(data), board=board, docs=docs,
        first=[(one.setting.title, views.best(one)) for one in opening], text_of=text_of,
        legend=views.LEGEND_OF_BEST, reduction=HOW.what,
        pictures=[(CAPTIONS.get(name, name), base64.b64encode(png).decode()) for name, png in board.pictures.items()],
    )  # fmt: skip
    return page.encode("utf-8", "replace")  # a lone surrogate is in no UTF-8


@cache
def _asset(name: str) -> Markup:
    return Markup(resources.files(__package__).joinpath(name).read_text("utf-8"))


@cache
def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def data_of(board: Board) -> dict[str, Any]:
    """Return all that the scripts know of a board: of each task and model columns, and a row a strategy and budget."""
    # Those with charts come first.
    rankings = sorted(board.by_task.rankings, key=lambda one: one.curves is None)
    settings = [_setting(one.setting.title, board.by_task.columns, one.every, one.curves) for one in rankings]
    return {"settings": settings or [_setting("", [], pd.DataFrame(), None)], "papers": dict(board.papers)}


def _setting(title: str, columns: Sequence[Column], frame: pd.DataFrame, over: Curves | None) -> dict[str, Any]:
    """Return what the page knows of one task and model."""
    about: dict[str, Any] = {"budgets": [], "middle": None, "named": []}
    titles, hidden = {"rank": "rank, by accuracy"}, {column.key for column in BY_TASK} | {"track"}
    if over is not None:
        about = {"budgets": list(over.budgets), "middle": over.middle, "named": picture.named(frame, over)}
        titles, hidden = {"rank": "rank, all budgets"}, hidden | {"budget"}
        # A row for each strategy and budget, dense's first, with the rank of the strategy.
        frame = pd.concat([frame[frame["line"] == name] for name in over.rows.index])
        of_line = over.rows.loc[frame["line"], ["strategy", "rank"]].set_index(frame.index)
        frame = frame.assign(**of_line, at=frame["asked"].mask(frame["line"] == DENSE))
    rows = dicts(frame)
    columns = [one for one in (with_values(rows, columns) if rows else []) if one.key not in hidden]
    columns.sort(key=lambda one: FIRST.index(one.key) if one.key in FIRST else len(FIRST) + (one.key in KNOWN))
    keys = ["at", "gmacs", *(key for one in columns for key in one.keys)]
    rows = [row | {"gmacs": row["macs"] / GIGA} if row.get("macs") else row for row in rows]
    known = {column.key for column in columns}
    return about | {
        "title": title,
        "sort": next((key for key in SORTED if key in known), "strategy"),
        "columns": [_column(one, titles.get(one.key, one.heading)) for one in columns],
        "keys": keys, "rows": [[_value(row, key) for key in keys] for row in rows],
    }  # fmt: skip


def _column(column: Column, heading: str) -> dict[str, Any]:
    """Return what the page knows of a column; `unit` decides how its numbers are written."""
    unit = "percent" if column.percent else "points" if column.shown == "signed" else column.shown
    words = {"percent": ", %", "points": ", points"}.get(unit, "")
    return {
        "key": column.key, "heading": f"{heading}{words}", "what": column.what, "unit": unit,
        "interval": column.interval, "first": column.key not in KNOWN or column.key in FIRST,
        "falling": column.shown != "text" and column.falling,
    }  # fmt: skip


def _value(row: Row, key: str) -> Any:
    """Return a row's value as JSON has it, with as many digits as anybody sees."""
    value = file_value(row, key)
    return None if value == NOT_RANKED else float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
