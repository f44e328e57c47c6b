"""The files of boards: tables, pictures and the HTML page beside the records, and the documents that show boards.

The page is one HTML file without network access and libraries, with a restrictive content security policy.

Between `<!-- NAME board -->` and `<!-- end of NAME board -->` a page of docs/ has NAME/leaderboard.md, and README.md
the board's first table. Between `<!-- NAME verdicts -->` and its end a page has NAME/verdicts.md.
docs/results/NAME/FILE is a copy of NAME/FILE.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from sparsebench.board import picture, shares, views
from sparsebench.board.board import Board, gather
from sparsebench.board.columns import (
    ALL_COLUMNS,
    BY_KEY,
    BY_TASK,
    DIGITS,
    NOT_RANKED,
    WORDS,
    Column,
    Row,
    dicts,
    file_value,
    text_of,
)
from sparsebench.board.judge import RANDOM_TOKENS, Ranking
from sparsebench.board.over_budgets import Curves
from sparsebench.board.reading import DENSE, NO_BADGES
from sparsebench.board.tables import Table, legend_of, render, with_values
from sparsebench.errors import UserError, is_address, plain
from sparsebench.files import content_or_none, with_lf, write_whole
from sparsebench.records import store
from sparsebench.records.manifests import MANIFEST
from sparsebench.stats import style

REDUCED, LEAST_CORRELATION = 8, 0.95
"""Pictures are compared after reduction by this factor. They look alike from this correlation of grey values."""
NAME = "leaderboard.csv"
PICTURE_OF_SHARES = f"leaderboard-{shares.QUANTITY}.png"
NO_PICTURES: dict[str, bytes | None] = {f"leaderboard-{quantity}.png": None for quantity in picture.WHAT}
NO_PICTURES[PICTURE_OF_SHARES] = None
"""The pictures that only some boards have, see `files`, without content."""
KEPT = (".md", ".csv", ".png")
"""Endings of the files that a published board keeps beside its records. The page and JSON are made when needed."""
README = "README.md"
MARKED = re.compile(rb"(<!-- ([\w-]+) (board|verdicts) -->(\r?\n)).*?(<!-- end of \2 \3 -->)", re.DOTALL)
SCRIPTS = ("assets/chart.js", "assets/table.js", "assets/main.js")
"""In order of execution; each script uses declarations of the scripts before it."""
STYLE = "assets/page.css"
CAPTIONS = {
    "tokens": "Test pictures, and which of their patches each strategy keeps; removed patches are grey, patches that "
    "matter to the label have a yellow outline.",
    "agreement": "Which patches two strategies both keep, and which only one of them does.",
}
CAPTION_OF_PREDICTIONS = (
    "Test pictures, with the true and the predicted classes of their patches; objects have a yellow outline."
)
"""The caption of `tokens` on a board of predicted patches."""
FIRST = (
    "rank",
    "strategy",
    "variant",
    "sample_complexity",
    "images_to_target",
    "accuracy",  # beside the name on a narrow screen
    "iou",
    "budget",
    "aligned_gap_reduction",
    "neighbour_accuracy",
    "badge",
    "authors",
    "replayed",
    "date",
    "paper",
    "code",
    "accuracy_delta",
    "random_delta",
    "versus_random",
    "iou_delta",
    "sample_complexity_ratio",
    "macs_ratio",
    "how",
    "speed_up",
    "checks",
)
"""The page's first columns, beginning with those that a narrow screen has room for. Metrics that tasks declare follow.
Other columns are shown on request."""
TERMS = (
    (
        "macs_ratio",
        "MACs / dense",
        "is the share of dense MACs that a strategy really needs, including its own "
        "computations; it may miss the budget. Dense, the network without a strategy, is 1.",
    ),
    (
        "random_delta",
        "Random tokens",
        "are dropped at the input (random), the reference of strategies that act there, or inside the network "
        "(random_inside), the reference of all others, at the same budget. A strategy that is not better has not shown "
        "that its choice of tokens matters.",
    ),
    (
        "oracle",
        "oracle",
        "knows which tokens are relevant, and removes others first. It is not ranked. Where all tokens are relevant, "
        "it removes random ones.",
    ),
    (
        "variant",
        "variant",
        "yes marks a strategy that is not exactly the published method. The notes say how it differs.",
    ),
    (
        "versus_random",
        "vs random at its site",
        "says whether the difference is significant, corrected for all strategies.",
    ),
    (
        "kept_accuracy",
        "Kept accuracy",
        "is the mean accuracy between the lowest budget and all MACs, divided by dense's. Ranks are by it.",
    ),
    (
        "iou",
        "IoU",
        "is the intersection over union of predicted and true patches, mean over object classes. Accuracy is over all "
        "patches, so it is high if background is predicted everywhere.",
    ),
    ("how", "Reduction", f"is {BY_KEY['how'].what}."),
    ("selection_auroc", "AUROC", "measures how well scores separate relevant tokens from the others; 0.5 is chance."),
    (
        "speed_up",
        "Speed-up",
        "is images/s divided by dense's on the same machine. Fewer MACs need not make a network faster.",
    ),
)
"""Terms that the page explains: the column or kind of strategy that it must have, the term, and the explanation."""
WIDER = "The table is wider than the page: scroll or swipe it sideways."
KNOWN = {column.key for column in ALL_COLUMNS}
SORTED = ("sample_complexity", "aligned_gap_reduction", "accuracy")
"""The first of these that was measured sorts a table of the page."""
GIGA = 1e9
TEMPLATES = Environment(
    loader=PackageLoader("sparsebench.board", "assets"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
)
ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}
"""Characters that JSON inside HTML escapes; json.dumps itself escapes characters beyond ASCII."""


def publish(board: Board, out: Path) -> None:
    """Write OUT/leaderboard.{md,csv,json,png,html}, and pictures of gap, sample complexity and shares, if measured.

    Pictures of an earlier board that this board does not have are removed.
    """
    write({out / name: content for name, content in (NO_PICTURES | files(board)).items()})


def files(board: Board) -> dict[str, bytes]:
    """Return the contents of a board's files by name; a pure function of the board."""
    content = views.report(board.judged, board.notes)
    texts = {f"leaderboard.{form}": render(content, form).encode() for form in ("md", "csv", "json")}
    first, *others = picture.quantities(board)
    pictures = {"leaderboard.png": first} | {f"leaderboard-{quantity}.png": quantity for quantity in others}
    drawn = {name: style.content(picture.draw(board, quantity)) for name, quantity in pictures.items()}
    if shares.sections_of(board):
        drawn[PICTURE_OF_SHARES] = style.content(shares.draw(board))
    return texts | drawn | {"leaderboard.html": page(board)}


def boards(folder: Path, *, new: bool = False) -> list[Path]:
    """Return the folders of boards: the folder itself and those below it.

    Args:
        folder: the folder.
        new: whether to return also the folders below it that have records and no board.

    Raises:
        UserError: there is no such folder.
    """
    folders = {path.parent for path in folder.rglob(NAME) if (path.parent / "records").is_dir()}
    if new:
        folders |= set(without_boards(folder))
    if not folders:
        raise UserError(
            f"no board in {folder}",
            allowed=f"folders with {NAME} and the records behind it",
            next_step="sparsebench run STRATEGY --out DIR makes one",
        )
    return sorted(folders)


def without_boards(folder: Path) -> list[Path]:
    """Return the folders below a folder that have records and no board, without submissions."""
    places = store.folders_below(folder)
    return [place for place in places if not (place / NAME).is_file() and not (place / MANIFEST).is_file()]


def board_files(folder: Path, badges: Mapping[str, str] = NO_BADGES) -> dict[Path, bytes | None]:
    """Return the expected contents of a published board's files by path, or None for files that must not exist.

    Args:
        folder: the folder of the board.
        badges: see `reading.describe`.
    """
    content = NO_PICTURES | files(gather(folder, badges))
    return {folder / name: value for name, value in content.items() if name.endswith(KEPT)}


def documents(folder: Path) -> dict[Path, bytes | None]:
    """Return the expected contents of the documents beside a folder of boards, by path. Parts of other folders stay."""
    root = folder.resolve().parent
    pages = [path for path in (root / README, *sorted((root / "docs").rglob("*.md"))) if path.is_file()]
    contents: dict[Path, bytes | None] = {
        path: _fill(path.read_bytes(), folder, path == root / README) for path in pages
    }
    for path in sorted((root / "docs" / "results").glob("*/*")):
        source = content_or_none(folder / path.parent.name / path.name) if path.suffix != ".md" else None
        contents |= {} if source is None else {path: with_lf(source)}
    return contents


def _fill(content: bytes, folder: Path, is_readme: bool) -> bytes:
    """Return a document with its marked parts replaced by the folder's texts."""

    def part(match: re.Match[bytes]) -> bytes:
        begin, name, kind, newline, end = match.groups()
        board = folder / name.decode()
        text = content_or_none(board / ("leaderboard.md" if kind == b"board" else "verdicts.md"))
        if text is None:
            return match[0]
        if is_readme and kind == b"board":
            text = "".join(render(views.best(ranking), "md") for ranking in gather(board).judged.rankings).encode()
        return begin + with_lf(text).replace(b"\n", newline) + end

    return MARKED.sub(part, content)


def differences(contents: Mapping[Path, bytes | None]) -> list[Path]:
    """Return the paths of texts that differ in more than line endings, and of pictures that look different.

    None stands for no file.
    """
    return [path for path, content in contents.items() if not _same(content_or_none(path), content)]


def write(contents: Mapping[Path, bytes | None]) -> list[Path]:
    """Write the files that differ in more than line endings, remove those with None, and return the paths of both."""
    changed = []
    for path, content in contents.items():
        before = content_or_none(path)
        if content is None and before is not None:
            path.unlink(missing_ok=True)
            changed.append(path)
        elif content is not None and (before is None or with_lf(before) != with_lf(content)):
            write_whole(path, content)
            changed.append(path)
    return changed


def _same(content: bytes | None, expected: bytes | None) -> bool:
    """Return whether texts are equal, or pictures look alike: versions of matplotlib write different bytes."""
    if content is None or expected is None:
        return content == expected
    if with_lf(content) == with_lf(expected):
        return True
    try:
        pictures = [Image.open(BytesIO(data), formats=("PNG",)) for data in (expected, content)]
        if pictures[0].size != pictures[1].size:  # known before decoding
            return False
        first, second = (np.asarray(picture.convert("L").reduce(REDUCED), np.float64).ravel() for picture in pictures)
    except (OSError, ValueError, SyntaxError):
        return False
    return bool(second.std() > 0 and np.corrcoef(first, second)[0, 1] >= LEAST_CORRELATION)


def page(board: Board, docs: str = "", title: str = "", link: str = "", url: str = "", picture_url: str = "") -> bytes:
    """Return the HTML page of a board as UTF-8; the same board gives the same bytes on each machine.

    All texts of the board are escaped.

    Args:
        board: the board.
        docs: address of the documentation's site, relative to the page; "" for no links.
        title: title of the page; "" for that of all boards.
        link: address below the title, such as that of a paper; "" for none.
        url: address of the page, for previews of links to it; "" if it is not known.
        picture_url: address of the picture of these previews; "" for none.

    Raises:
        UserError: the link or the address of the page is not an address.
    """
    package = resources.files(__package__)
    *scripts, sheet = (Markup(package.joinpath(name).read_text("utf-8")) for name in (*SCRIPTS, STYLE))
    for option, address in (("--link", link), ("--url", url)):
        if address and not is_address(address):
            raise UserError(option, got=f"'{plain(address, 80)}'", allowed="an address https://HOST/PATH")
    policy = "; ".join(
        [  # nothing from outside; inline only code with these hashes
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {_hash(sheet)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    data = data_of(board)
    keys = {column["key"] for comparison in data["settings"] for column in comparison["columns"]}
    captions = CAPTIONS | ({"tokens": CAPTION_OF_PREDICTIONS} if keys & {"iou", "accuracy_irrelevant"} else {})
    rows = board.by_task.rows
    # The page begins with the comparisons that have several budgets, or otherwise with the main comparison.
    opening = [ranking for ranking in _in_order(board) if ranking.curves is not None] or board.judged.rankings
    first = [(ranking.comparison.title, views.best(ranking)) for ranking in opening]
    suites = f": {', '.join(board.suites)}" if board.suites else ""
    content = TEMPLATES.get_template("page.html").render(
        policy=policy,
        style=sheet,
        scripts=scripts,
        board=board,
        docs=docs,
        title=plain(title, 200),
        name=plain(title, 200) or f"sparsebench leaderboard{suites}",
        summary=_summary(first),
        link=link,
        url=url,
        picture_url=picture_url,
        keys=keys | set(rows["kind"]),
        data=Markup(json.dumps(data, separators=(",", ":")).translate(ESCAPED)),
        first=first,
        text_of=text_of,
        legend_of=legend_of,
        terms=TERMS,
        wider=WIDER,
        pictures=[(captions.get(name, name), base64.b64encode(png).decode()) for name, png in board.pictures.items()],
    )
    return content.encode("utf-8", "replace")  # UTF-8 has no lone surrogates


def _summary(first: Sequence[tuple[str, Table]]) -> str:
    """Return the best of the page's first table in one line, for previews of links to the page."""
    texts = []
    for _, table in first[:1]:
        by_key = {column.key: column for column in table.columns}
        for row in table.rows:
            if not row.get("best"):  # all strategies exceed this budget
                continue
            budget, best, accuracy = (text_of(row, by_key[key]) for key in ("budget", "best", "accuracy"))
            is_share = budget.replace(".", "").isdigit()
            at = f"at {budget} of the MACs" if is_share else f"at {plain(budget, 60)}"
            texts.append(f"{plain(best, 60)}, accuracy {accuracy} %, {at}")
    return plain("; ".join(texts) or "Token sparsification of Vision Transformers", 300)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _in_order(board: Board) -> list[Ranking]:
    """Return the rankings of all comparisons: those with charts first, and of these that of the main task."""
    main = [ranking.comparison for ranking in board.judged.rankings]
    return sorted(board.by_task.rankings, key=lambda one: (one.curves is None, one.comparison not in main))


def data_of(board: Board) -> dict[str, Any]:
    """Return the data for the page's scripts: columns and rows for each task and model."""
    comparisons = []
    for ranking in _in_order(board):
        chart = _chart_data(ranking.every, ranking.curves, board.third_party)
        table = _table_data(ranking.every, ranking.curves, board.by_task.columns)
        comparisons.append(chart | {"title": ranking.comparison.title} | table)
    if not comparisons:
        nothing = pd.DataFrame()
        comparisons.append(_chart_data(nothing, None, ()) | {"title": ""} | _table_data(nothing, None, []))
    return {"settings": comparisons, "papers": dict(board.papers)}


def _chart_data(rows: pd.DataFrame, curves: Curves | None, third_party: Collection[str]) -> dict[str, Any]:
    """Return what the page's chart of a comparison needs besides the rows of its table."""
    if curves is None:
        return {"budgets": [], "middle": None, "named": [], "colours": ""}
    return {
        "budgets": list(curves.budgets),
        "middle": curves.middle,
        "named": picture.main_strategies(rows, curves, third_party),
        "colours": picture.named_by_default(rows, third_party),
    }


def _table_data(rows: pd.DataFrame, curves: Curves | None, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the columns and rows of the page's table of a comparison, and the column that sorts it."""
    hidden = {"track", *(column.key for column in BY_TASK)}
    headings = {"rank": "rank, by accuracy"}
    if curves is not None:
        hidden.add("budget")
        headings = {"rank": "rank, all budgets"}
        rows = _points(rows, curves)
    first = set(FIRST)
    if "n_seeds" in rows and rows["n_seeds"].nunique() > 1:
        first.add("n_seeds")

    values = [row | {"gmacs": row["macs"] / GIGA} if row.get("macs") else row for row in dicts(rows)]
    shown = with_values(values, columns) if values else []
    shown = [column for column in shown if column.key not in hidden]
    shown.sort(key=_place)
    keys = ["at", "gmacs", "strategy_name", *(key for column in shown for key in column.keys)]
    known = {column.key for column in shown}
    return {
        "sort": next((key for key in SORTED if key in known), "strategy"),
        "columns": [_column(column, headings.get(column.key, column.title), first) for column in shown],
        "keys": keys,
        "rows": [[_value(row, key) for key in keys] for row in values],
    }


def _points(rows: pd.DataFrame, curves: Curves) -> pd.DataFrame:
    """Return the points of all curves, dense first, with the rank of the strategy over its budgets.

    `at` is the budget of the point. Dense and random tokens have no differences to themselves.
    """
    points = pd.concat([rows[rows["curve"] == name] for name in curves.rows.index])
    of_curve = curves.rows.loc[points["curve"], ["strategy", "rank"]].set_index(points.index)
    points = points.assign(**of_curve, at=points["asked"].mask(points["curve"] == DENSE))
    for key, references in (("accuracy_delta", [DENSE]), ("random_delta", RANDOM_TOKENS)):
        points.loc[points["strategy"].isin(references), list(BY_KEY[key].keys)] = None
    return points


def _place(column: Column) -> int:
    """Return the place of a column: as in FIRST, then metrics that tasks declare, then the others."""
    if column.key in FIRST:
        return FIRST.index(column.key)
    return len(FIRST) + (column.key in KNOWN)


def _column(column: Column, heading: str, first: Collection[str]) -> dict[str, Any]:
    """Return the page's data of a column; `unit` selects its number format. `first` has the keys that are shown."""
    return {
        "key": column.key,
        "heading": heading,
        "what": column.what,
        "unit": column.shown,
        "interval": column.interval,
        "first": column.key not in KNOWN or column.key in first,
        "falling": column.shown not in WORDS and column.falling,
    }


def _value(row: Row, key: str) -> Any:
    """Return a row's value for JSON, rounded to DIGITS; None if not ranked."""
    value = file_value(row, key)
    if value == NOT_RANKED:
        return None
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
