"""What commands share: help in groups, names that a shell completes, tables that fit the terminal, the last run,
and what the system refuses.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from sparsebench.board.tables import WIDTH, Choice
from sparsebench.errors import UserError

COMMANDS = {
    "Measure": ("run", "status", "leaderboard", "compare", "show-tokens", "reproduce", "claims", "speed"),
    "Look up": ("list", "show", "data", "env"),
    "Write a strategy": ("new", "check"),
    "Publish and share": ("submit", "verify", "merge", "export", "observe"),
}
EXAMPLES = {
    "run": "sparsebench run attn_topk evit:keep_rate=0.7 my.py --out results",
    "status": "sparsebench status results",
    "leaderboard": "sparsebench leaderboard results --view pairs",
    "compare": "sparsebench compare attn_topk evit --picture both.png",
    "show-tokens": "sparsebench show-tokens --plugin attn_topk",
    "reproduce": "sparsebench reproduce theory --figure 2",
    "list": "sparsebench list suites",
    "show": "sparsebench show attn_topk",
    "data": "sparsebench data --verify",
    "env": "sparsebench env",
    "new": "sparsebench new my_strategy",
    "check": "sparsebench check my_strategy.py evit",
    "claims": "sparsebench claims evit-deit-s-0.7",
    "speed": "sparsebench speed timm:deit_tiny_patch16_224 evit:keep_rate=0.7 --batch 1",
    "submit": "sparsebench submit results --strategy my_strategy",
    "verify": "sparsebench verify leaderboard/submissions",
    "merge": "sparsebench merge results-1 results-2 --out results",
    "export": "sparsebench export results --format csv -o records.csv",
    "observe": "sparsebench observe results tensorboard:dir=events",
}
OPTIONS = {
    "Cells": ("plugins", "suite", "tasks", "model", "seeds", "keep", "macs", "n_train", "where"),
    "Pictures and weights": (
        "images", "backgrounds", "pretrain_images", "data_root", "download", "skip_bad", "pretrained", "weights",
        "weights_key", "networks",
    ),
    "Execution": ("out", "dry_run", "rerun", "jobs", "device", "checkpoint", "timeout", "memory_limit", "exclusive",
                      "observe"),
    "Several machines": ("shard", "dask"),
}  # fmt: skip


def group_commands(group: click.Group, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the commands of a group, by what they are for."""
    known = {name: command for name in group.list_commands(context) if (command := group.get_command(context, name))}
    rest = tuple(name for name in known if not any(name in names for names in COMMANDS.values()))
    width = max(map(len, known)) + 8
    for title, names in (COMMANDS | {"Others": rest}).items():
        rows = [(name, known[name].get_short_help_str(formatter.width - width)) for name in names if name in known]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


def group_options(command: click.Command, context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command, by what they are for where it has many."""
    options = (one for one in command.get_params(context) if isinstance(one, click.Option))
    rows = {one.name: row for one in options if (row := one.get_help_record(context)) is not None}
    titles = {name: title for title, names in OPTIONS.items() for name in names} if len(rows) > 12 else {}
    for title in (*OPTIONS, "Options"):
        part = [row for name, row in rows.items() if titles.get(str(name), "Options") == title]
        if part:
            with formatter.section(title):
                formatter.write_dl(part)


class Guided(click.Command):
    """A command whose help has its options in groups and ends with an example."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options; see `group_options`."""
        group_options(self, context, formatter)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        if self.name in EXAMPLES:
            with formatter.section("Example"):
                formatter.write_text(EXAMPLES[self.name])


NAMES = {
    "plugins": "strategy", "named": "strategy", "suite": "suite", "tasks": "task", "task": "task", "model": "model",
    "observe": "observer",
}  # fmt: skip
"""What the parameters of commands name."""
OBSERVERS = ("mlflow", "tensorboard")


def _names(kind: str) -> Iterable[str]:
    """Return the names there are; of strategies, observers and suites nothing is imported."""
    from sparsebench.plan import suite
    from sparsebench.plugin.registry import FIRST, Registry

    if kind == "observer":
        return OBSERVERS
    if kind == "suite":
        return suite.names()
    registry = Registry()
    if kind == "strategy":
        return [name for name in registry.entries if name not in (*FIRST, *OBSERVERS)]
    return [cls.name for cls in (registry.tasks() if kind == "task" else registry.models())]


def complete(_context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the names that a shell offers for what is begun; files where a strategy's may be."""
    names = sorted(_names(NAMES[str(parameter.name)]))
    offered = [CompletionItem(name) for name in names if name.startswith(begun)]
    return offered or [CompletionItem(begun, type="file")]


wide: Callable[[Any], Any] = click.option(
    "--wide",
    is_flag=True,
    help=f"All columns. [those that fit the terminal, or {WIDTH} characters; intervals are left out first]",
)
"""Gives a command the option that lets its table be as wide as it is."""
_columns = click.option("--columns", metavar="NAME[,NAME...]", help="Show only these columns (names as in CSV).")


def table(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a table, as one argument, `choice`."""

    @wraps(command)
    def with_choice(*args: Any, wide: bool, columns: str | None, **options: Any) -> Any:
        names = tuple(name.strip() for name in columns.split(",")) if columns else ()
        return command(*args, choice=Choice(names, None if wide else width()), **options)

    return wide(_columns(with_choice))


notes: Callable[[Any], Any] = click.option(
    "--notes",
    is_flag=True,
    help="Also show technical notes, such as step limits and detectable differences. [only in files]",
)
"""Gives a command the option that shows all notes."""


def width() -> int:
    """Return how many characters a line of the terminal has; WIDTH where the output is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def write(text: str, form: str = "table") -> None:
    """Print a text; in a terminal, what is no file's format in lines that it has room for."""
    if form == "table" and sys.stdout.isatty():
        text = "".join(f"{_wrap(line)}\n" for line in text.splitlines())
    click.echo(text, nl=False)


def _wrap(line: str) -> str:
    if len(line) <= width():
        return line
    before = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(line.strip(), width(), initial_indent=before, subsequent_indent=f"{before}  ")


def newest_folder(here: Path) -> Path:
    """Return the run's folder in `here` whose records were written last.

    Raises:
        UserError: there is none.
    """
    folders: dict[Path, float] = {}
    for path in sorted((*here.glob("*/records/*.jsonl"), *here.glob("*/records/*.parquet"))):
        folder = path.parents[1]
        folders[folder] = max(folders.get(folder, 0.0), path.stat().st_mtime)
    if not folders:
        raise UserError("FOLDER is missing, and no run has written one here", next_step="name it, or sparsebench run")
    return max(folders, key=lambda path: folders[path])


def named_or_last(given: Path | str | None) -> Path:
    """Return the folder that is given, or else the one written last here, and say which it is; see `newest_folder`."""
    if given is not None:
        return Path(given)
    folder = newest_folder(Path())
    click.echo(f"folder: {folder}", err=True)
    return folder


folder_argument: Callable[[Any], Any] = click.argument(
    "folder",
    metavar="[FOLDER]",
    type=click.Path(path_type=Path),
    required=False,
    callback=lambda _context, _parameter, given: named_or_last(given),
)
"""Gives a command the argument `folder`."""


def open_streams() -> None:
    """Let no output fail of names that its encoding cannot hold."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> str | None:
    """Write out what standard output holds; return why that is not possible, and drop it then."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return refusal(error)
    return None


def refusal(error: BaseException) -> str | None:
    """Return what the system refused, in a line; None if an error is none of that."""
    if isinstance(error, OSError):
        names = [repr(os.fsdecode(name))[:200] for name in (error.filename, error.filename2) if isinstance(name, str)]
        hint = "; raise `ulimit -u`" if error.errno == errno.EAGAIN else ""
        return f"the system refuses: {', '.join([error.strerror or str(error), *names])}{hint}"
    if isinstance(error, MemoryError):
        return "the system refuses: not enough memory"
    return "the system refuses: no more threads; raise `ulimit -u`" if "start new thread" in str(error) else None
