"""Which columns of a table are shown, so that a terminal has room for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sparsebench.board.board import Row
from sparsebench.board.columns import Column, text_of
from sparsebench.errors import UserError

WIDTH = 100
BETWEEN = 2
"""Characters between columns; as many are added to headings."""
STAY = ("task", "rank", "strategy", "budget", "accuracy", "kept_accuracy")
FIRST_TO_GO = (
    "device", "pareto_speed", "kind", "trained", "pareto", "spurious_gap", "images_per_s", "n_seeds", "accuracy_delta",
    "random_inside_delta", "badge", "sample_complexity_loss", "sample_complexity_ratio", "aligned_gap", "model",
    "macs_ratio",
)  # fmt: skip
ROOM = 12
"""Characters that are left of a text at least."""


@dataclass(frozen=True)
class Choice:
    """What is shown of tables.

    Attributes:
        names: keys of the main table's columns, in order; all unless given.
        width: characters of a line; None for any number.
    """

    names: tuple[str, ...] = ()
    width: int | None = None

    def check(self, columns: Collection[Column]) -> None:
        """Raise UserError unless all names are those of columns."""
        known = list(dict.fromkeys(column.key for column in columns))
        for name in self.names:
            if name not in known:
                raise UserError("--columns", got=f"'{name}'", allowed=known)

    def choose(self, columns: Sequence[Column]) -> list[Column]:
        """Return the named ones of columns, or all."""
        by_key = {column.key: column for column in columns}
        return [by_key[name] for name in self.names if name in by_key] if self.names else list(columns)

    def fit(self, rows: Sequence[Row], columns: Sequence[Column]) -> tuple[list[Row], list[Column]]:
        """Return rows and columns that have room; see `fit`."""
        return (list(rows), list(columns)) if self.width is None else fit(rows, columns, self.width)


ALL = Choice()


def fit(
    rows: Sequence[Row], columns: Sequence[Column], width: int, order: Sequence[str] | None = None
) -> tuple[list[Row], list[Column]]:
    """Return rows and columns of a table that is no wider than `width` characters.

    Intervals go first, from the right; then columns in `order`, which is FIRST_TO_GO, and others from the right but for
    STAY, unless given; then the ends of texts, of the longest first.
    """
    left = list(columns)
    for column in reversed(columns):
        if _width(rows, left) > width and column.interval:
            left[left.index(column)] = column._replace(interval=False)
    rest = [column.key for column in reversed(columns) if column.key not in (*STAY, *FIRST_TO_GO)]
    for key in (*FIRST_TO_GO, *rest) if order is None else order:
        if _width(rows, left) > width:
            left = [column for column in left if column.key != key]
    return _clip_longest(rows, left, width), left


def _widths(rows: Sequence[Row], columns: Sequence[Column]) -> list[int]:
    return [max([len(column.heading) + BETWEEN, *(len(text_of(row, column)) for row in rows)]) for column in columns]


def _width(rows: Sequence[Row], columns: Sequence[Column]) -> int:
    return sum(_widths(rows, columns)) + BETWEEN * (len(columns) - 1)


def _clip_longest(rows: Sequence[Row], columns: Sequence[Column], width: int) -> list[Row]:
    """Return rows whose longest texts end in an ellipsis where there is no room for them."""
    clipped, texts = list(rows), [column for column in columns if column.shown == "text"]
    while texts and (over := _width(clipped, columns) - width) > 0:
        longest = max(texts, key=lambda column: _widths(clipped, [column])[0])
        most = _widths(clipped, [longest])[0]
        if most <= ROOM:
            break
        room = max(ROOM, most - over)
        clipped = [row | {longest.key: _clip(row[longest.key], room)} for row in clipped]
        texts = texts if len(longest.heading) + BETWEEN < room else [one for one in texts if one is not longest]
    return clipped


def _clip(text: object, room: int) -> object:
    return text[: room - 1] + "\u2026" if isinstance(text, str) and len(text) > room else text
