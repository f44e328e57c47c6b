"""Tables of boards: in each format, in the width of a terminal, and as a DataFrame."""

import csv
import html
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from published_boards import write_part

import sparsebench
from sparsebench.board import columns
from sparsebench.board.columns import Column, frame, keys_of
from sparsebench.board.tables import FORMATS, Choice, Report, Table, fit
from sparsebench.board.tables import render as write
from sparsebench.board.views import PAIRS
from sparsebench.cli import main
from sparsebench.errors import UserError

COLUMNS, BY_TASK = keys_of(columns.ALWAYS_SHOWN), keys_of(columns.BY_TASK)


def row(**more: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | more


ROWS = [
    row(
        rank="1-3", strategy="mine(a_b=1)", kind="deployable", budget="macs 0.5", macs_ratio=0.5012, accuracy=1 / 3,
        accuracy_low=0.25, accuracy_high=0.4, accuracy_delta=0.01, sample_complexity=12.3456, sample_complexity_low=8.0,
        sample_complexity_high=math.inf, sample_complexity_ratio=0.75, spurious_gap=0.25, aligned_gap=0.5,
        aligned_gap_low=0.375, aligned_gap_high=0.625, aligned_gap_reduction=-0.0625, aligned_gap_reduction_low=-0.1,
        aligned_gap_reduction_high=0.1, spurious_gap_reduction=0.01, versus_dense="better",
        worst_group_accuracy=0.5, selection_auroc=0.9, images_per_s=12345.6, n_seeds=5,
    ),
    row(
        rank="not ranked", strategy="oracle", kind="oracle", budget="macs 0.5", accuracy=0.75,
        sample_complexity=math.inf, sample_complexity_low=math.inf, sample_complexity_high=math.inf,
        sample_complexity_ratio=math.inf, n_seeds=1,
    ),
]  # fmt: skip
BY = [{"task": "theory", "model": "shallow", "n_train": 8} | r for r in ROWS]
NOTES = ["broken on theory: 2 cells failed: it broke"]


def render(rows: list[dict[str, Any]], form: str, notes: Sequence[str] = ()) -> str:
    """Return rows of a board in a format."""
    shown = (*(columns.BY_TASK if rows and "task" in rows[0] else ()), *columns.ALWAYS_SHOWN)
    table = Table(rows, shown, explained=True)
    return write(Report([table], table, notes), form)


def short(value: Any) -> Any:
    if value == math.inf:
        return "not reached"
    return float(f"{value:.10g}") if isinstance(value, float) else value


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_names_every_strategy_and_takes_an_empty_board(form: str) -> None:
    text = render(ROWS, form, NOTES)
    assert "mine" in text and "oracle" in text
    for made in (text, render([], form, NOTES)):
        assert made.endswith("\n") and not made.endswith("\n\n")


def test_markdown_joins_values_and_intervals() -> None:
    header, rule, mine, oracle, *_ = render(ROWS, "md").splitlines()
    shown = dict(zip(cells(header), cells(mine), strict=True))
    assert set(rule) <= set("|:- ")
    assert shown["rank"] == "1-3" and shown["strategy"] == "mine(a_b=1)" and shown["seeds"] == "5"
    assert shown["accuracy, %"] == "33.3 [25.0, 40.0]" and shown["MACs / dense"] == "0.501"
    assert shown["N50"] == "12.3 [8, not reached]"
    assert shown["gap reduction, points"] == "-6.3 [-10.0, +10.0]" and shown["images/s"] == "12,346"
    assert shown["gap, %"] == "50.0 [37.5, 62.5]" and shown["average - worst, %"] == "25.0"
    assert shown["vs dense"] == "better" and "its reduction" not in shown  # files have its column
    shown = dict(zip(cells(header), cells(oracle), strict=True))
    assert shown["rank"] == shown["gap, %"] == shown["MACs / dense"] == "-"
    assert shown["N50"] == "not reached" and shown["accuracy, %"] == "75.0"


def test_a_bar_in_a_label_does_not_break_a_markdown_table() -> None:
    *_, line = (
        render([row(strategy="mine(a=x|y)", kind="deployable", budget="macs 0.5")], "md").split("\n\n")[0].splitlines()
    )
    assert line.replace("\\|", "").count("|") == 4  # three columns have values


@pytest.mark.parametrize(
    "text",
    [
        "![a](https://b.example/c.png) [a][b] [a]: https://b.example",
        "**all** ~~none~~ *one* _one_ __two__ a_b",
        "&lt;b&gt; &#105;&#x69; a&b; AT&T",
        "<https://b.example> <b>x</b> </td>",
        "`code` \\| $x$ \\input{/etc/hostname}",
    ],
)
def test_markdown_shows_a_text_as_it_is(text: str) -> None:
    reader = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable(["table", "strikethrough"])
    shown = reader.render(render([row(strategy=text, kind="deployable", budget="macs 0.5")], "md"))
    assert f"<td>{html.escape(text)}</td>" in re.sub(' style="[^"]*"', "", shown)


def test_json_is_strict_and_has_every_column() -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = render(ROWS, "json", NOTES)
    rows = json.loads(text, parse_constant=refuse)
    assert rows == [{key: short(value) for key, value in r.items()} for r in ROWS]
    assert all(list(r) == list(COLUMNS) for r in rows)


def test_csv_gives_every_value_back() -> None:
    header, *lines = csv.reader(io.StringIO(render(ROWS, "csv", NOTES)))
    assert header == list(COLUMNS) and len(lines) == len(ROWS)
    rows = [ROWS[0] | {"rank": "1 to 3"}, *ROWS[1:]]  # 1-3 would be a date
    for expected, line in zip(rows, lines, strict=True):
        for value, text in zip(expected.values(), line, strict=True):
            assert text == "" if value is None else type(short(value))(text) == short(value)


def test_latex_is_a_booktabs_table() -> None:
    """LaTeX is a booktabs table with the legend as its caption and notes in comments."""
    text = render(ROWS, "latex", NOTES)
    for command in (r"\begin{tabular}", r"\toprule", r"\bottomrule", r"\end{tabular}", r"\begin{table*}", r"\caption{"):
        assert text.count(command) == 1
    assert r"mine(a\_b=1)" in text and text.count(r"\midrule") == 2  # below the head, and before oracles
    assert text.splitlines()[-1] == f"% {NOTES[0]}" and "not reached: the largest" in text


@pytest.mark.parametrize("form", ["html", "", "MD"])
def test_another_format_is_refused(form: str) -> None:
    with pytest.raises(UserError, match=r"--format; got .*; allowed: table, md, csv, json, latex"):
        render(ROWS, form)


NARROW = [
    Column("rank", "rank", "text", ""), Column("strategy", "strategy", "text", ""),
    Column("device", "device", "text", ""), Column("accuracy", "accuracy", "fraction", "", True),
    Column("last", "last", "fraction", "", True), Column("least", "least", "fraction", "", True),
]  # fmt: skip
LINE = {"rank": "1-2", "strategy": "mine", "device": "cpu"} | {
    f"{key}{end}": 0.5 for key in ("accuracy", "last", "least") for end in ("", "_low", "_high")
}


WHOLE, BARE = 6 + 10 + 8 + 3 * 20 + 5 * 2, 6 + 10 + 8 + 10 + 6 + 7 + 5 * 2


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (WHOLE, "rank strategy device accuracy* last* least*"),
        (WHOLE - 1, "rank strategy device accuracy* last* least"),
        (WHOLE - 27, "rank strategy device accuracy* last least"),
        (BARE, "rank strategy device accuracy last least"),
        (BARE - 1, "rank strategy device accuracy last"),
        (BARE - 10, "rank strategy device accuracy"),
        (1, "rank strategy accuracy"),  # these stay
    ],
)
def test_intervals_go_first_then_columns_in_their_order(width: int, shown: str) -> None:
    """A star stands for an interval."""
    assert " ".join(column.key + "*" * column.interval for column in fit([LINE], NARROW, width)[1]) == shown


def test_the_longest_texts_end_where_there_is_no_room() -> None:
    rows, columns = fit([LINE | {"strategy": "a" * 90}], NARROW, 60)
    assert rows[0]["strategy"].endswith("a\u2026") and len(rows[0]["strategy"]) == 60 - 6 - 10 - 2 * 2
    assert [column.key for column in columns] == ["rank", "strategy", "accuracy"]
    assert fit([LINE | {"strategy": "a" * 90}], NARROW, 1)[0][0]["strategy"] == "a" * 11 + "\u2026"


def test_many_authors_leave_room_for_other_columns() -> None:
    shown = (*NARROW[:2], Column("badge", "badge", "text", ""), Column("authors", "by", "text", ""), *NARROW[2:])
    line = LINE | {"badge": "replayed", "authors": "Ada Example of a Long Name, Bo Other and 3 more"}
    rows, columns = fit([line], shown, 6 + 10 + 8 + 24 + 8 + 10 + 6 + 6 * 2)
    keys = [column.key for column in columns]
    assert keys == ["rank", "strategy", "badge", "authors", "device", "accuracy", "last"]
    assert rows[0]["authors"].startswith("Ada Example")


@pytest.mark.parametrize(("rows", "pages"), [(45, [45]), (46, [45, 1])])
def test_a_page_of_latex_has_45_rows(rows: int, pages: list[int]) -> None:
    text = write(Table([LINE] * rows, NARROW), "latex")
    assert [part.count("mine") for part in text.split(r"\end{table*}")[:-1]] == pages


def test_a_choice_of_columns_is_in_its_own_order_and_checked() -> None:
    table = Table([LINE], NARROW)
    header, *_ = write(table, "csv", Choice(("last", "rank"))).splitlines()
    assert header == "last,last_low,last_high,rank"
    with pytest.raises(UserError, match="'none'; allowed: rank, strategy"):
        write(table, "md", Choice(("rank", "none")))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the records of a few strategies; do not write to it."""
    return write_part(tmp_path_factory.mktemp("few"), ("dense", "tome", "attn_topk"))


@pytest.mark.parametrize("arguments", [("--by", "task"), ("--view", "pairs")], ids=str)
def test_tables_fit_a_terminal_unless_all_is_asked_for(few: Path, arguments: tuple[str, ...]) -> None:
    def width(*more: str) -> int:
        """Return the width of the first table, without its title."""
        text = CliRunner().invoke(main, ["leaderboard", str(few), *arguments, *more]).stdout
        return next(max(map(len, lines)) for part in text.split("\n\n") if len(lines := part.splitlines()) > 1)

    assert width() <= 100 < width("--wide")


LABELS = [
    {"rank": "1-3", "rank_low": 1, "rank_high": 3, "strategy": "far(power=1.0, on=True)",
     "strategy_params": '{"power": 1.0, "on": true}', "budget": "macs 0.5", "budget_amount": "macs",
     "budget_value": "0.5", "trained": "no", "pareto": "yes", "pareto_speed": "yes", "sample_complexity": math.inf},
    {"rank": "2", "rank_low": 2, "rank_high": 2, "strategy": "far", "strategy_params": "{}",
     "budget": "keep 0.7 power-floor @0,1", "budget_amount": "keep_rate", "budget_value": "0.7", "trained": "yes",
     "sample_complexity": 8},
    {"rank": "not ranked", "strategy": "dense", "strategy_params": "{}", "budget": "macs 1", "budget_amount": "macs",
     "budget_value": "1", "trained": "no", "sample_complexity": None},
]  # fmt: skip


def test_a_frame_has_infinity_where_nothing_is_reached() -> None:
    """A frame has infinity where nothing is reached and columns of parameters budgets and ranks."""
    labels = [column for column in columns.ALWAYS_SHOWN if column.key in LABELS[0]]
    table = frame(pd.DataFrame(LABELS), [column._replace(interval=False) for column in labels])
    numbers = table["sample_complexity"]
    assert numbers.dtype == float and numbers[0] == math.inf and math.isnan(numbers[2])
    assert table.sort_values("sample_complexity")["strategy"].iloc[0] == "far"
    assert table["strategy.power"].dtype == float and table["strategy.power"][0] == 1.0
    assert table["strategy.on"][0] is True
    assert table["budget.macs"].dropna().tolist() == [0.5, 1.0] and table["budget.keep_rate"][1] == 0.7
    assert table["rank_low"].dropna().tolist() == [1, 2] and table["rank_high"].dropna().tolist() == [3, 2]


def test_every_column_of_a_published_board_is_described(tmp_path: Path) -> None:
    """Every column of a published board says what it is and no number is text."""
    some = ("dense", "attn_topk", "tome", "noise", "oracle", "random", "random_inside")
    table = sparsebench.leaderboard(write_part(tmp_path / "board", some, ("composite", "spurious", "theory")))
    assert set(table.columns) == set(table.attrs) and all(table.attrs.values())
    assert table["macs_at_2"].dtype == float and table.select_dtypes("number").shape[1] > 30
    lowest = table[table["macs_at_2_at_most"]]
    assert set(lowest["strategy"]) == {"attn_topk", "oracle"} and set(lowest["macs_at_2"].round(3)) == {0.299, 0.302}
    nothing = frame(pd.DataFrame([dict.fromkeys(COLUMNS)]), columns.ALWAYS_SHOWN)
    numbers = [key for column in columns.ALWAYS_SHOWN if column.shown != "text" for key in column.keys]
    assert all(pd.api.types.is_numeric_dtype(nothing[key]) for key in numbers)
    assert not table.isin(["yes", "no", "not reached"]).any(axis=None)


def test_entries_of_one_strategy_in_latex_have_the_parameters_in_which_they_differ() -> None:
    """The legend has those that they have in common."""
    names = ["m(a=1,b=(2,3),c=x)", "m(a=4,b=(2,3),c=x)", "other(a=1)", "dense"]
    rows = [{"strategy": name, "accuracy": 0.5} for name in names]
    table = Table(rows, [columns.BY_KEY["strategy"], columns.BY_KEY["accuracy"]])
    text = write(table, "latex")
    assert "m(a=1) &" in text and "m(a=4) &" in text and "other(a=1) &" in text
    assert text.count("b=(2,3)") == 1 and text.count("c=x") == 1
    assert names[0] in write(table, "csv")


@pytest.mark.parametrize("form", ["latex", "table"])
def test_both_strategies_of_a_pair_have_names_that_mean_one_of_them(form: str) -> None:
    """A strategy of one column may have its other entries in the other column."""
    more = "schedule=published,merge=mean"
    pairs = [("m", f"m({more},a=1)"), (f"m({more},a=2)", "m"), (f"n(b=1,{more})", f"n(b=2,{more})")]
    rows = [{"strategy": one, "other": other, "told": "yes", "difference": 0.1} for one, other in pairs]
    text = write(Table(rows, [column for column in PAIRS if column.key in rows[0]]), form, Choice(width=45))
    lines = [re.split(r" & |  +", line) for line in text.splitlines() if "yes" in line]
    short = {}
    for names, (one, other, *_) in zip(pairs, lines, strict=True):
        short |= {names[0]: one, names[1]: other}
    assert len(set(short.values())) == 5
    assert [line[:2] for line in lines] == [[short[one], short[other]] for one, other in pairs]
    if form == "latex":
        assert lines[2][:2] == ["n(b=1)", "n(b=2)"]


def test_a_strategy_has_one_name_in_a_narrow_table_of_pairs() -> None:
    long = [f"dynamic_vit_with_long_name_{number}" for number in ("one", "two")]
    rows = [{"strategy": long[k], "other": long[1 - k], "told": "yes", "difference": 0.1} for k in (0, 1)]
    text = write(Table(rows, [column for column in PAIRS if column.key in rows[0]]), "table", Choice(width=44))
    first, second = (line.split()[:2] for line in text.splitlines() if "dyn" in line)
    assert first == second[::-1] and len(set(first)) == 2


def test_a_range_of_ranks_is_no_date_for_a_spreadsheet() -> None:
    rows = [{"rank": rank, "strategy": name} for rank, name in (("1-7", "a"), ("12", "b"), ("2-3", "1-2"))]
    shown = [columns.BY_KEY["rank"], columns.BY_KEY["strategy"]]
    lines = list(csv.reader(io.StringIO(write(Table(rows, shown), "csv"))))
    assert lines[1:] == [["1 to 7", "a"], ["12", "b"], ["2 to 3", "1 to 2"]]
