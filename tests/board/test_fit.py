import pytest
from click.testing import CliRunner, Result

from sparsebench.board.columns import Column
from sparsebench.board.tables import Choice, Table, fit, render
from sparsebench.cli import main
from sparsebench.errors import UserError

COLUMNS = [
    Column("rank", "rank", "text", ""), Column("strategy", "strategy", "text", ""),
    Column("device", "device", "text", ""), Column("accuracy", "accuracy", "fraction", "", True),
    Column("last", "last", "fraction", "", True), Column("least", "least", "fraction", "", True),
]  # fmt: skip
ROW = {"rank": "1-2", "strategy": "mine", "device": "cpu"} | {
    f"{key}{end}": 0.5 for key in ("accuracy", "last", "least") for end in ("", "_low", "_high")
}
BOARD = "leaderboard/quick"


def shown(width: int) -> list[str]:
    """Return the columns that fit, with a star if an interval is among them."""
    return [one.key + "*" * one.interval for one in fit([ROW], COLUMNS, width)[1]]


def test_intervals_go_first_then_columns_in_their_order() -> None:
    whole = 6 + 10 + 8 + 3 * 20 + 5 * 2
    assert shown(whole) == ["rank", "strategy", "device", "accuracy*", "last*", "least*"]
    assert shown(whole - 1) == ["rank", "strategy", "device", "accuracy*", "last*", "least"]
    assert shown(whole - 27) == ["rank", "strategy", "device", "accuracy*", "last", "least"]
    bare = 6 + 10 + 8 + 10 + 6 + 7 + 5 * 2
    assert shown(bare) == ["rank", "strategy", "device", "accuracy", "last", "least"]
    assert shown(bare - 1) == ["rank", "strategy", "accuracy", "last", "least"]
    assert shown(bare - 11) == ["rank", "strategy", "accuracy", "last"]
    assert shown(1) == ["rank", "strategy", "accuracy"]  # these stay


def test_the_longest_texts_end_where_there_is_no_room() -> None:
    rows, columns = fit([ROW | {"strategy": "a" * 90}], COLUMNS, 60)
    assert rows[0]["strategy"].endswith("a\u2026") and len(rows[0]["strategy"]) == 60 - 6 - 10 - 2 * 2
    assert [one.key for one in columns] == ["rank", "strategy", "accuracy"]


def test_a_choice_of_columns_is_in_its_own_order_and_checked() -> None:
    table = Table([ROW], COLUMNS)
    header, *_ = render(table, "csv", Choice(("last", "rank"))).splitlines()
    assert header == "last,last_low,last_high,rank"
    with pytest.raises(UserError, match="'none'; allowed: rank, strategy"):
        render(table, "md", Choice(("rank", "none")))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["leaderboard", BOARD, *arguments])


def lines_of(*arguments: str) -> list[str]:
    """Return the first table, without a title above it."""
    parts = (part.splitlines() for part in call(*arguments).stdout.split("\n\n"))
    return next(lines for lines in parts if len(lines) > 1)


@pytest.mark.parametrize("arguments", [(), ("--by", "task"), ("--view", "pairs"), ("--view", "matched")], ids=str)
def test_tables_fit_a_terminal_unless_all_is_asked_for(arguments: tuple[str, ...]) -> None:
    assert max(map(len, lines_of(*arguments))) <= 100 < max(map(len, lines_of(*arguments, "--wide")))
