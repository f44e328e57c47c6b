"""What is written of boards: files beside their records, one of them a page, and the documents that show them.

The page is one HTML file: no network, no library, and a policy that forbids what it does not need.

Between `<!-- NAME board -->` and `<!-- end of NAME board -->` a page of docs/ has NAME/leaderboard.md, and README.md
what the board tells first; between `<!-- NAME verdicts -->` and its end NAME/verdicts.md. docs/results/NAME/FILE is a
copy of NAME/FILE.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from sparsebench.board import picture, views
from sparsebench.board.board import Board, gather
from sparsebench.board.columns import BY_KEY, BY_TASK, EVERY, NOT_RANKED, Column, Row, dicts, file_value, text_of
from sparsebench.board.judge import RANDOM, Curves
from sparsebench.board.settings import DENSE
from sparsebench.board.tables import legend_of, render, with_values
from sparsebench.errors import UserError
from sparsebench.files import content_or_none, write_whole
from sparsebench.stats import style

REDUCED, ALIKE = 8, 0.95
"""Pictures are made so many times smaller to be compared; they show the same from this correlation of greys on."""
NAME = "leaderboard.csv"
KEPT = (".md", ".csv", ".png")
"""Endings of what lies beside the records of a published board; page and JSON are made of the records when wanted."""
README = "README.md"
MARKED = re.compile(rb"(<!-- ([\w-]+) (board|verdicts) -->\n).*?(<!-- end of \2 \3 -->)", re.DOTALL)
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
"""Columns that a table of the page begins with, before those of metrics that tasks declare; the others only a reader
asks for."""
KNOWN = {column.key for column in EVERY}
SORTED = ("sample_complexity", "aligned_gap_reduction", "accuracy")
"""The first of them that was measured decides the order of a table of the page."""
DIGITS, GIGA = 6, 1e9
TEMPLATES = Environment(
    loader=PackageLoader("sparsebench.board", "assets"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
)  # fmt: skip
ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}
"""In JSON inside of HTML; json.dumps has no characters beyond ASCII."""


def publish(board: Board, out: Path) -> None:
    """Write OUT/leaderboard.{md,csv,json,png,html}, and a picture each of the spurious gap and sample complexity."""
    write({out / name: content for name, content in files(board).items()})


def files(board: Board) -> dict[str, bytes]:
    """Return what is written of a board, by the files' names; a pure function of it."""
    content = views.report(board.judged, board.notes)
    texts = {f"leaderboard.{form}": render(content, form).encode() for form in ("md", "csv", "json")}
    first, *others = picture.quantities(board)
    pictures = {"leaderboard.png": first} | {f"leaderboard-{quantity}.png": quantity for quantity in others}
    drawn = {name: style.content(picture.draw(board, quantity)) for name, quantity in pictures.items()}
    return texts | drawn | {"leaderboard.html": page(board)}


def boards(folder: Path) -> list[Path]:
    """Return the folders of boards: the one given, or those below it.

    Raises:
        UserError: there is none.
    """
    folders = sorted(path.parent for path in folder.rglob(NAME) if (path.parent / "records").is_dir())
    if not folders:
        raise UserError(
            f"no board in {folder}", allowed=f"folders with {NAME} and the records behind it",
            next_step="sparsebench run STRATEGY --out DIR makes one",
        )  # fmt: skip
    return folders


def board_files(folder: Path) -> dict[Path, bytes]:
    """Return what must lie beside the records of a board, by its paths."""
    content = files(gather(folder))
    return {folder / name: value for name, value in content.items() if name.endswith(KEPT)}


def documents(folder: Path) -> dict[Path, bytes]:
    """Return what the documents beside a folder of boards must hold, by their paths; parts of other folders stay."""
    root = folder.resolve().parent
    pages = [path for path in (root / README, *sorted((root / "docs").rglob("*.md"))) if path.is_file()]
    contents = {path: _fill(path.read_bytes(), folder, path == root / README) for path in pages}
    for path in sorted((root / "docs" / "results").glob("*/*")):
        source = content_or_none(folder / path.parent.name / path.name) if path.suffix != ".md" else None
        contents |= {} if source is None else {path: source}
    return contents


def _fill(content: bytes, folder: Path, is_readme: bool) -> bytes:
    """Return a document with each marked part as the folder has it."""

    def part(match: re.Match[bytes]) -> bytes:
        begin, name, kind, end = match.groups()
        board = folder / name.decode()
        text = content_or_none(board / ("leaderboard.md" if kind == b"board" else "verdicts.md"))
        if text is None:
            return match[0]
        if is_readme and kind == b"board":
            text = "".join(render(views.best(ranking), "md") for ranking in gather(board).judged.rankings).encode()
        return begin + text + end

    return MARKED.sub(part, content)


def differences(contents: Mapping[Path, bytes]) -> list[Path]:
    """Return the paths whose files do not hold what they must, or pictures that do not show it."""
    return [path for path, content in contents.items() if not _same(content_or_none(path), content)]


def write(contents: Mapping[Path, bytes]) -> list[Path]:
    """Write the files that do not hold what they must, and return their paths."""
    changed = [path for path, content in contents.items() if content_or_none(path) != content]
    for path in changed:
        write_whole(path, contents[path])
    return changed


def _same(content: bytes | None, expected: bytes) -> bool:
    """Say whether a file holds what is made, or a picture shows it: another version of matplotlib draws other bytes."""
    if content == expected or content is None:
        return content == expected
    try:
        pictures = [Image.open(BytesIO(data), formats=("PNG",)) for data in (expected, content)]
        if pictures[0].size != pictures[1].size:  # known before anything is decoded
            return False
        first, second = (np.asarray(picture.convert("L").reduce(REDUCED), np.float64).ravel() for picture in pictures)
    except (OSError, ValueError, SyntaxError):
        return False
    return bool(second.std() > 0 and np.corrcoef(first, second)[0, 1] >= ALIKE)


def page(board: Board, docs: str = "") -> bytes:
    """Return the page of a board as UTF-8; the same board gives the same bytes anywhere.

    Every text of a board is shown as text, whatever is in it.

    Args:
        board: the board.
        docs: where the site of the documentation lies, seen from the page; "" if the page links to none.
    """
    package = resources.files(__package__)
    *scripts, sheet = (Markup(package.joinpath(name).read_text("utf-8")) for name in (*SCRIPTS, STYLE))
    policy = "; ".join([  # nothing from outside, and inline only what is known by its hash
        "default-src 'none'", f"script-src {' '.join(map(_hash, scripts))}", f"style-src {_hash(sheet)}",
        "img-src data:", "base-uri 'none'", "form-action 'none'",
    ])  # fmt: skip
    data = json.dumps(data_of(board), separators=(",", ":")).translate(ESCAPED)
    # What has several budgets begins, or else what the board is about.
    opening = [ranking for ranking in board.by_task.rankings if ranking.curves is not None] or board.judged.rankings
    content = TEMPLATES.get_template("page.html").render(
        policy=policy, style=sheet, scripts=scripts, data=Markup(data), board=board, docs=docs,
        first=[(ranking.setting.title, views.best(ranking)) for ranking in opening], text_of=text_of,
        legend_of=legend_of, reduction=BY_KEY["how"].what,
        pictures=[(CAPTIONS.get(name, name), base64.b64encode(png).decode()) for name, png in board.pictures.items()],
    )  # fmt: skip
    return content.encode("utf-8", "replace")  # a lone surrogate is in no UTF-8


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def data_of(board: Board) -> dict[str, Any]:
    """Return all that the scripts know of a board: of each task and model columns, and a row a strategy and budget."""
    # Those with charts come first.
    rankings = sorted(board.by_task.rankings, key=lambda ranking: ranking.curves is None)
    settings = [
        _setting(ranking.setting.title, board.by_task.columns, ranking.every, ranking.curves) for ranking in rankings
    ]
    return {"settings": settings or [_setting("", [], pd.DataFrame(), None)], "papers": dict(board.papers)}


def _setting(title: str, columns: Sequence[Column], frame: pd.DataFrame, over: Curves | None) -> dict[str, Any]:
    """Return what the page knows of one task and model."""
    about: dict[str, Any] = {"budgets": [], "middle": None, "named": []}
    headings, hidden = {"rank": "rank, by accuracy"}, {column.key for column in BY_TASK} | {"track"}
    if over is not None:
        about = {"budgets": list(over.budgets), "middle": over.middle, "named": picture.main_strategies(frame, over)}
        headings, hidden = {"rank": "rank, all budgets"}, hidden | {"budget"}
        # A row for each strategy and budget, dense's first, with the rank of the strategy.
        frame = pd.concat([frame[frame["line"] == name] for name in over.rows.index])
        of_line = over.rows.loc[frame["line"], ["strategy", "rank"]].set_index(frame.index)
        frame = frame.assign(**of_line, at=frame["asked"].mask(frame["line"] == DENSE))
        for key, base in (("accuracy_delta", DENSE), ("random_inside_delta", RANDOM)):  # to themselves none
            frame.loc[frame["strategy"] == base, list(BY_KEY[key].keys)] = None
    rows = dicts(frame)
    columns = [column for column in (with_values(rows, columns) if rows else []) if column.key not in hidden]
    columns.sort(
        key=lambda column: FIRST.index(column.key) if column.key in FIRST else len(FIRST) + (column.key in KNOWN)
    )
    keys = ["at", "gmacs", *(key for column in columns for key in column.keys)]
    rows = [row | {"gmacs": row["macs"] / GIGA} if row.get("macs") else row for row in rows]
    known = {column.key for column in columns}
    return about | {
        "title": title,
        "sort": next((key for key in SORTED if key in known), "strategy"),
        "columns": [_column(column, headings.get(column.key, column.title)) for column in columns],
        "keys": keys, "rows": [[_value(row, key) for key in keys] for row in rows],
    }  # fmt: skip


def _column(column: Column, heading: str) -> dict[str, Any]:
    """Return what the page knows of a column; `unit` decides how its numbers are written."""
    return {
        "key": column.key, "heading": heading, "what": column.what, "unit": column.shown,
        "interval": column.interval, "first": column.key not in KNOWN or column.key in FIRST,
        "falling": column.shown != "text" and column.falling,
    }  # fmt: skip


def _value(row: Row, key: str) -> Any:
    """Return a row's value as JSON has it, with as many digits as anybody sees."""
    value = file_value(row, key)
    return None if value == NOT_RANKED else float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
