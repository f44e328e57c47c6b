"""Untrusted text is only text for terminals, spreadsheets and Markdown readers."""

import csv
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebench.board.tables import cell, markdown
from sparsebench.errors import UserError, plain

ODD = ["=", "+", "-", "@", "\t", "\r", "\n", ";", "|", "\\", "[", "]", "(", ")", "<", ">", "`", "!", ":", "//", "a",
       " ", "http", "www.", "\x1b[31m", "\x9b", "\u202e", "\uff1d", "\ud800", "b>", "x@y.org", "~~~",
       "*", "_", "&lt;", "$"]  # fmt: skip
texts = st.lists(st.sampled_from(ODD) | st.characters(), max_size=12).map("".join)


@given(texts, st.integers(4, 40))
def test_a_plain_text_is_one_printable_line_of_limited_length(text: str, most: int) -> None:
    assert plain(text, most).isprintable() and len(plain(text, most)) <= most
    if text.isprintable() and len(text) <= most:
        assert plain(text, most) == text


@given(texts)
def test_no_cell_of_csv_is_a_formula(text: str) -> None:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow([cell(plain(text)), "x"])
    for delimiter in ",;":  # spreadsheets of many countries split at semicolons
        (row,) = csv.reader(io.StringIO(written.getvalue(), newline=""), delimiter=delimiter)
        for field in row:
            bare = field.strip()
            assert bare[:1] not in ("=", "+", "@", "\uff1d") and (bare[:1] != "-" or bare in ("-", "-,x"))


@pytest.mark.parametrize("value", [-0.5, -3, None, "-", "+0.184", "evit(rate=0.7)", "macs 0.5 @3,6,9", "a-2"])
def test_numbers_and_text_that_is_not_a_formula_stay_as_they_are(value: object) -> None:
    assert cell(value) == (f"'{value}" if value == "+0.184" else value)


@given(texts)
def test_markdown_has_no_link_image_html_or_code(text: str) -> None:
    parser = pytest.importorskip("markdown_it").MarkdownIt("commonmark")
    allowed = {"text", "text_special", "softbreak"}
    for line in (f"- {markdown(plain(text))}", f"a {markdown(plain(text))} b\n\n[x]: /y"):
        for token in parser.parse(line):
            assert token.type not in ("html_block", "fence") or "~~~" in text
            assert {child.type for child in token.children or []} <= allowed


@pytest.mark.parametrize("text", ["http://evil.org", "https://evil.org/x", "www.evil.org", "me@evil.org", "ftp://x.y"])
def test_addresses_do_not_become_links(text: str) -> None:
    assert not re.search(r"\w://|\bwww\.\w|\w@\w", markdown(text))


def test_honest_notes_stay_as_they_are() -> None:
    for text in (
        "dense: accuracy 0.960 [0.950, 0.969] on composite",
        "random_inside, @.5 <= 0.4",
        "a_b 2 * c (d) & e: f",
    ):
        assert markdown(text) == text


def test_errors_are_plain() -> None:
    assert str(UserError("a\x1b[31m", got="b\rc\u202e")) == "a\ufffd[31m; got b c\ufffd"
