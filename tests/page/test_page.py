"""The page as bytes: what is in it, and what cannot be."""

import base64
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import numpy as np
import pytest
from page_boards import board_of, row

from sparsebench import page
from sparsebench.board.board import Board, BudgetBoard, BudgetCurve
from sparsebench.board.columns import COLUMNS, keys_of, text_of
from sparsebench.page.page import SCRIPTS, columns_with_values

HOSTILE = [
    "<script>alert(1)</script>", "</script><script>alert(2)</script>", "<!--<script>",
    "\"'><img src=x onerror=alert(3)>", "{{ 7 * 7 }}", "a\u202eb\u2066c", "\u2028\u2029", "x" * 10_000, "\\u003c",
    "&lt;b&gt;", "\ud800", "javascript:alert(4)",
]  # fmt: skip


class Seen(HTMLParser):
    """The elements of a page with their attributes, scripts and styles, and its policy."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[tuple[str, dict[str, str | None], str]] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append((tag, dict(attrs), ""))
        if dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style"):
            tag, attributes, text = self.inside[-1]
            self.inside[-1] = (tag, attributes, text + data)

    def handle_endtag(self, tag: str) -> None:
        self.tags.append((f"/{tag}", {}))


def seen(board: Board) -> Seen:
    return Seen(page.render(board).decode())


def data_in(board: Board) -> dict[str, Any]:
    (text,) = (text for _, attributes, text in seen(board).inside if attributes.get("id") == "data")
    return json.loads(text)


def unpacked(column: Any) -> list[Any]:
    if isinstance(column, dict) and "floats" in column:
        numbers = np.frombuffer(base64.b64decode(column["floats"]), "<f4").tolist()
        return [None if math.isnan(x) else x for x in numbers]
    return [column["of"][at] for at in column["at"]] if isinstance(column, dict) else column


def test_hostile_texts_are_texts_everywhere(board: Board) -> None:
    rows = [row(name, 0.5, budget=name, checks=name) for name in HOSTILE]
    more = {"notes": HOSTILE, "bibtex": HOSTILE, "suites": HOSTILE, "environments": {"abc": {x: x for x in HOSTILE}}}
    found = seen(board_of(rows, **more))
    plain = seen(board)
    for name in ("script", "style", "img", "iframe", "link", "a"):
        assert sum(tag == name for tag, _ in found.tags) == sum(tag == name for tag, _ in plain.tags)
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    strategies = unpacked(data_in(board_of(rows))["views"][0]["values"]["strategy"])
    assert strategies == [name.replace("\ud800", "?") for name in HOSTILE]


def test_the_data_end_where_they_end() -> None:
    text = page.render(board_of([row(name, 0.5) for name in HOSTILE])).decode()
    inside = text.split('id="data">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(inside)


def test_the_policy_allows_what_is_inlined_and_nothing_else(board: Board) -> None:
    found = seen(board)
    rules = dict(rule.split(" ", 1) for rule in found.policy.split("; "))
    assert rules.pop("default-src") == "'none'"
    assert (rules.pop("img-src"), rules.pop("base-uri"), rules.pop("form-action")) == ("data:", "'none'", "'none'")
    hashes = {
        tag: {
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for name, attributes, text in found.inside
            if name == tag and attributes.get("type") != "application/json"
        }
        for tag in ("script", "style")
    }
    assert set(rules.pop("script-src").split()) == hashes["script"] and len(hashes["script"]) == len(SCRIPTS)
    styles = set(rules.pop("style-src").split())
    assert hashes["style"] < styles and len(styles) == 2  # the other is what Plot writes
    assert not rules and "unsafe" not in found.policy


def test_nothing_is_asked_of_anybody(board: Board) -> None:
    found = seen(board)
    asking = {"src", "href", "srcset", "action", "data", "poster", "background", "ping", "style"}
    named = [attributes[name] or "" for _, attributes in found.tags for name in asking & set(attributes)]
    assert named and all(url.startswith(("data:image/png;base64,", "#")) for url in named)
    own = page.render(board).decode()
    for name in (name for name in SCRIPTS if name.startswith("vendor/")):
        own = own.replace(resources.files("sparsebench.page").joinpath(name).read_text("utf-8").strip(), "")
    assert not re.search(r"@import|url\(|sourceMappingURL|\beval\(|new Function|fetch\(|XMLHttpRequest|WebSocket", own)


def test_the_same_board_gives_the_same_bytes_anywhere(board: Board) -> None:
    code = (
        "import sys, locale; from math import inf\n"
        "from sparsebench import page; from sparsebench.board.board import Board\n"
        f"board = Board(rows={board.rows!r}, by_task={board.by_task!r}, notes={board.notes!r})\n"
        "sys.stdout.buffer.write(page.render(board))"
    )
    expected = page.render(Board(rows=board.rows, by_task=board.by_task, notes=board.notes))
    for zone, language, seed in (("Asia/Tokyo", "C", "1"), ("America/Lima", "de_DE.UTF-8", "2")):
        environment = os.environ | {"TZ": zone, "LC_ALL": language, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=300)
        assert done.stdout == expected, done.stderr.decode()


def test_numbers_are_shown_as_tables_show_them_and_values_are_whole(board: Board) -> None:
    view = data_in(board)["views"][0]
    for column in columns_with_values(board.rows):
        complete = [{key: r.get(key) for key in column.keys} for r in board.rows]
        if column.shown != "text":
            assert unpacked(view["texts"][column.key]) == [text_of(r, column) for r in complete]
        for key in column.keys:
            for value, whole in zip(unpacked(view["values"][key]), [r[key] for r in complete], strict=True):
                expected = "not reached" if whole == math.inf else whole
                assert value == (pytest.approx(whole, rel=1e-7) if isinstance(expected, float) else expected)


def test_a_column_appears_where_some_row_has_a_value(board: Board) -> None:
    keys = [column["key"] for column in data_in(board)["views"][0]["columns"]]
    assert "trained" in keys and "checks" not in keys and "spurious_gap" not in keys and "task" not in keys
    badged = replace(board, rows=[*board.rows[1:], board.rows[0] | {"checks": "passes", "spurious_gap": 0.0}])
    more = [column["key"] for column in data_in(badged)["views"][0]["columns"]]
    assert set(more) - set(keys) == {"checks", "spurious_gap"}
    assert [column["key"] for column in data_in(board)["views"][1]["columns"]] == ["task", "model", "n_train", *keys]


def test_who_runs_no_scripts_sees_the_rows(board: Board) -> None:
    text = page.render(board).decode()
    plain = re.sub(r"<[^>]*>", "|", text.split("<noscript>")[1].split("</noscript>")[0])
    assert "MACs / dense" in plain
    for wanted in ("mine", "0.812 [0.802, 0.823]", "not reached", "1,234"):
        assert wanted in plain


def test_two_thousand_rows_in_each_table_are_less_than_three_megabytes() -> None:
    draw = random.Random(0)

    def one(k: int) -> dict[str, Any]:
        numbers = {key: draw.uniform(-1, 1) for c in COLUMNS if c.shown not in ("text", "count") for key in c.keys}
        kind = draw.choice(["baseline", "deployable", "oracle"])
        return row(f"strategy_{k % 60}(power={k})", **numbers | {"kind": kind, "budget": f"macs 0.{k % 9} @0,1,2"})

    rows = [one(k) for k in range(2000)]
    by_task = [{"task": "composite", "model": "vit", "n_train": 600} | r for r in rows]
    assert set(keys_of(tuple(c for c in COLUMNS if c.shown != "text"))) <= set(rows[0])
    assert len(page.render(Board(rows=rows, by_task=by_task, notes=[]))) < 3_000_000


def test_a_board_without_rows_is_a_page() -> None:
    found = data_in(Board(rows=[], by_task=[], notes=["mine on theory: 3 cells failed: it broke"]))
    assert [view["length"] for view in found["views"]] == [0, 0]


def test_vendored_files_can_be_inlined_and_have_their_licences() -> None:
    vendor = resources.files("sparsebench.page").joinpath("vendor")
    said = vendor.joinpath("README.md").read_text("utf-8")
    for name in (name.removeprefix("vendor/") for name in SCRIPTS if name.startswith("vendor/")):
        text = vendor.joinpath(name).read_text("utf-8")
        assert "</script" not in text.lower() and "<!--" not in text and "\r" not in text
        licence = f"{name.split('.')[0]}.LICENSE"
        assert f"`{name}`" in said and licence in said and "Copyright" in vendor.joinpath(licence).read_text("utf-8")


def test_a_page_of_curves_has_one_script_more_and_hostile_names_are_texts(board: Board) -> None:
    rows = [{"rank": "1", "strategy": name, "kind": "deployable", "accuracy_at_0.5": 0.5} for name in HOSTILE]
    curves = [BudgetCurve(name, "deployable", (0.5,), (0.5,), (0.5,), (None,), (None,)) for name in HOSTILE]
    over = BudgetBoard(HOSTILE[0], HOSTILE[1], 600, "scratch", (0.5,), 0.5, rows, curves, HOSTILE)
    found, plain = seen(replace(board, budgets=[over])), seen(board)
    for name in ("script", "style", "img", "iframe", "link", "a"):
        there, before = (sum(tag == name for tag, _ in page.tags) for page in (found, plain))
        assert there == before + (name == "script")
    texts = [text for tag, attributes, text in found.inside if tag == "script" and "id" not in attributes]
    for text in texts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in found.policy
    assert len(texts) == len(SCRIPTS) + 1 and "budgets" not in data_in(board)
