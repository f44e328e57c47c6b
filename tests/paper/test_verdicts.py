from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebench.paper import Verdict, as_csv, interval, judge, markdown

INFINITY, NAN = float("inf"), float("nan")
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20)


@pytest.mark.parametrize(
    ("holds", "against", "word"),
    [
        ([True, True], [False], "reproduced"),
        ([True, True], [True], "reproduced"),
        ([True, False], [False], "partly"),
        ([True, False], [True], "partly"),
        ([False, False], [False, True], "not reproduced"),
        ([False], [False], "undecided"),
        ([False], [], "undecided"),
        ([], [], "undecided"),
        ([], [True], "not reproduced"),
    ],
)
def test_the_word_for_the_parts_of_a_claim(holds: list[bool], against: list[bool], word: str) -> None:
    assert judge(holds, against) == word


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1.23456, 1, 2), "1.23 [1, 2]"),
        ((1.23456, None, None), "1.23"),
        ((1.23456, NAN, NAN), "1.23"),
        ((1.23456, None, 2), "1.23"),
        ((INFINITY, 3, INFINITY), "not reached [3, not reached]"),
        ((INFINITY, None, None), "not reached"),
        ((3, 2, INFINITY), "3 [2, not reached]"),
        ((NAN, None, None), "no number"),
        ((0.0, -1.5, 0.25), "0 [-1.5, 0.25]"),
        ((1.23456, 1.0, 1.45678, 4), "1.235 [1, 1.457]"),
    ],
)
def test_an_interval_in_words(value: tuple[Any, ...], text: str) -> None:
    assert interval(*value) == text


@given(st.lists(PLAIN, min_size=6, max_size=6), PLAIN)
def test_any_text_makes_one_row_of_the_table(texts: list[str], note: str) -> None:
    claim, published, measured, fits, rule, figure = texts
    made = markdown([Verdict(figure, claim, published, measured, fits, "undecided", rule)], [note])
    header, _, row, *rest = made.split("\n")
    cells = row.replace("\\\\", "").replace("\\|", "")
    assert cells.count("|") == header.count("|") and len(rest) == 4


def test_csv_has_nothing_where_there_is_no_number() -> None:
    assert as_csv([{"a": NAN, "b": None, "c": 0.0, "d": INFINITY}]) == "a,b,c,d\n,,0.0,inf\n"
    assert as_csv([]) == "" and "- all is lost" in markdown([], ["all is lost"])
