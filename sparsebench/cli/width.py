"""Options that say how wide a table is, and which columns it has."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from sparsebench.board.fit import WIDTH, Choice

wide: Callable[[Any], Any] = click.option(
    "--wide",
    is_flag=True,
    help=f"The whole table. [what fits {WIDTH} characters: intervals go first, then what is least asked for]",
)
"""Gives a command the option that lets its table be as wide as it is."""
_columns = click.option("--columns", metavar="NAME[,NAME...]", help="Only these columns, by their names in CSV.")


def table(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a table, as one argument, `choice`."""

    @wraps(command)
    def with_choice(*args: Any, wide: bool, columns: str | None, **options: Any) -> Any:
        names = tuple(name.strip() for name in columns.split(",")) if columns else ()
        return command(*args, choice=Choice(names, None if wide else WIDTH), **options)

    return wide(_columns(with_choice))
