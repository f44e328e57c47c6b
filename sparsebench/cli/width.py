"""Options that say how wide a table is, and which columns it has."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from sparsebench.board.fit import WIDTH, Choice

wide: Callable[[Any], Any] = click.option(
    "--wide",
    is_flag=True,
    help=f"The whole table. [what fits the terminal, or {WIDTH} characters: intervals go first, then the rest]",
)
"""Gives a command the option that lets its table be as wide as it is."""
_columns = click.option("--columns", metavar="NAME[,NAME...]", help="Only these columns, by their names in CSV.")


def table(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a table, as one argument, `choice`."""

    @wraps(command)
    def with_choice(*args: Any, wide: bool, columns: str | None, **options: Any) -> Any:
        names = tuple(name.strip() for name in columns.split(",")) if columns else ()
        return command(*args, choice=Choice(names, None if wide else width()), **options)

    return wide(_columns(with_choice))


notes: Callable[[Any], Any] = click.option(
    "--notes", is_flag=True, help="Also what is technical: step limits, budgets that were missed. [in files only]"
)
"""Gives a command the option that shows all notes."""


def width() -> int:
    """Return how many characters a line of the terminal has; WIDTH where the output is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def show(text: str, form: str = "table") -> None:
    """Print a text; in a terminal, what is no file's format in lines that it has room for."""
    if form == "table" and sys.stdout.isatty():
        text = "".join(f"{_wrap(line)}\n" for line in text.splitlines())
    click.echo(text, nl=False)


def _wrap(line: str) -> str:
    if len(line) <= width():
        return line
    before = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line.strip(), width(), initial_indent=before, subsequent_indent=f"{before}  ")
