"""Shared parts of commands: help in groups, shell completion, tables that fit the terminal, errors of the operating
system, and options made from the fields of a run's request.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
from click.shell_completion import CompletionItem
from pydantic.fields import FieldInfo

from sparsebench.api import OUT
from sparsebench.board.tables import WIDTH, Choice
from sparsebench.errors import UserError, shortage, text_of
from sparsebench.plan import suite as suites
from sparsebench.plan.request import OPTIONS, Execution, Files, Request, option_of
from sparsebench.plugin.registry import FIRST, Registry

PATH = click.Path(path_type=Path)
COMMANDS = {
    "Measure": {
        "run": "sparsebench run attn_topk evit:keep_rate=0.7 my.py --out results",
        "status": "sparsebench status results",
        "leaderboard": "sparsebench leaderboard results --view pairs",
        "compare": "sparsebench compare attn_topk evit --picture both.png",
        "show-tokens": "sparsebench show-tokens --plugin attn_topk",
        "reproduce": "sparsebench reproduce theory --figure 2",
        "claims": "sparsebench claims evit-deit-s-0.7",
        "schedules": "sparsebench schedules attn_topk --macs .5,.3",
        "speed": "sparsebench speed timm:deit_tiny_patch16_224 evit:keep_rate=0.7 --batch 1",
        "features": "sparsebench features timm:vit_small_patch14_dinov2 --images folder:my-pictures -o features.npz",
    },
    "Look up": {
        "list": "sparsebench list suites",
        "show": "sparsebench show attn_topk",
        "data": "sparsebench data --verify",
        "env": "sparsebench env",
    },
    "Write a strategy": {
        "new": "sparsebench new my_strategy",
        "check": "sparsebench check my_strategy.py evit",
    },
    "Publish and share": {
        "submit": "sparsebench submit results --strategy my_strategy",
        "verify": "sparsebench verify leaderboard/submissions",
        "withdraw": "sparsebench withdraw leaderboard/submissions/my_strategy/quick-3-1 --reason outdated",
        "merge": "sparsebench merge results-1 results-2 --out results",
        "export": "sparsebench export results --format csv -o records.csv",
        "observe": "sparsebench observe results tensorboard:dir=events",
    },
}
"""The groups of commands, with an example for each command."""
EXAMPLES = {name: example for group in COMMANDS.values() for name, example in group.items()}
GROUPS = {
    "Cells": OPTIONS[Request],
    "Pictures and weights": OPTIONS[Files],
    "Execution": (*OPTIONS[Execution], "out", "dry_run"),
}
"""The groups of a run's options. Other options of a command follow under "Options"."""


class Guided(click.Command):
    """A command with many options, which its help shows in groups."""

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in groups."""
        options = (option for option in self.get_params(context) if isinstance(option, click.Option))
        rows = {option.name: row for option in options if (row := option.get_help_record(context)) is not None}
        titles = {name: title for title, names in GROUPS.items() for name in names}
        for title in (*GROUPS, "Options"):
            if part := [row for name, row in rows.items() if titles.get(str(name), "Options") == title]:
                with formatter.section(title):
                    formatter.write_dl(part)


OBSERVERS = ("mlflow", "tensorboard")
NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "plugins": lambda: Registry().entries.keys() - {*FIRST, *OBSERVERS},  # names of entry points: imports no plugin
    "suite": suites.names,
    "tasks": lambda: [cls.name for cls in Registry().tasks()],
    "model": lambda: [cls.name for cls in Registry().models()],
    "observe": lambda: OBSERVERS,
}
"""Names for shell completion of options. Arguments for strategies are completed like `plugins`."""


def check_repeated(context: click.Context, command: click.Command, arguments: list[str]) -> None:
    """Raise UserError if an option that takes one value is given several times. click would use the last value."""
    inner = click.Context(command, info_name=command.name, parent=context, **command.context_settings)
    _, _, given = command.make_parser(inner).parse_args(list(arguments))
    counts = Counter(option for option in given if isinstance(option, click.Option))
    if any(option.is_eager for option in counts):  # --help
        return
    for option, n in counts.items():
        if n > 1 and not (option.multiple or option.is_flag):
            raise UserError(f"{option.opts[-1]} takes one value", got=f"{n} values", next_step="give it once")


def joined(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> str | None:
    """Return the lists of a repeated option as one list: names separated by commas; None without any."""
    return ",".join(texts) or None


def complete(_context: click.Context, parameter: click.Parameter, prefix: str) -> list[CompletionItem]:
    """Return the names with a prefix for shell completion; without any, file names are completed."""
    names = NAMES.get(str(parameter.name), NAMES["plugins"])()
    items = [CompletionItem(name) for name in sorted(names) if name.startswith(prefix)]
    return items or [CompletionItem(prefix, type="file")]


def table(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a table to a command, which gets them as one argument `choice`."""

    @click.option(
        "--wide",
        is_flag=True,
        help=f"All columns. [those that fit the terminal, or {WIDTH} characters; intervals are left out first]",
    )
    @click.option(
        "--columns",
        multiple=True,
        callback=joined,
        metavar="NAME[,NAME...]",
        help="Show only these columns; an unknown name lists all names.",
    )
    @wraps(command)
    def with_choice(*args: Any, wide: bool, columns: str | None, **options: Any) -> Any:
        names = tuple(name.strip() for name in columns.split(",")) if columns else ()
        return command(*args, choice=Choice(names, None if wide else width()), **options)

    return with_choice


notes: Callable[[Any], Any] = click.option(
    "--notes",
    is_flag=True,
    help="Also show technical notes, such as step limits and detectable differences. [only in files]",
)
image_size: Callable[[Any], Any] = click.option(
    "--image-size",
    "side",
    type=click.IntRange(1),
    metavar="SIDE",
    help="Side of the images in pixels; position embeddings are resampled. [that of the weights, else the model's]",
)
output: Callable[[Any], Any] = click.option(
    "-o", "--output", metavar="FILE", type=PATH, help="File to write. [standard output]"
)


def width() -> int:
    """Return the number of characters of a line of the terminal, or WIDTH if the output is not a terminal."""
    return shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH


def write(text: str, form: str = "table") -> None:
    """Print a text. In a terminal, long lines of the form "table" are wrapped."""
    for line in text.splitlines(keepends=True):
        if form == "table" and sys.stdout.isatty() and len(line) > width():
            before = line[: len(line) - len(line.lstrip())]
            line = textwrap.fill(line.strip(), width(), initial_indent=before, subsequent_indent=f"{before}  ") + "\n"
        click.echo(line, nl=False)


folder_argument: Callable[[Any], Any] = click.argument("folder", metavar=f"[FOLDER={OUT}]", type=PATH, default=OUT)
"""Adds the folder of a run as an argument to a command."""


def refusal(error: BaseException) -> str | None:
    """Return an error of the operating system in one line, or None for any other error."""
    short = shortage(error)
    if isinstance(error, OSError):
        names = [repr(os.fsdecode(name))[:200] for name in (error.filename, error.filename2) if isinstance(name, str)]
        parts = [error.strerror or str(error), *names]
    elif short is not None:
        parts = [text_of(error)] if isinstance(error, MemoryError) and str(error) else []
    else:
        return None
    words = ", ".join(parts)
    return f"system error: {'; '.join(part for part in (words, short) if part)}"


C = TypeVar("C", bound=Callable[..., Any])
PICTURES = ("images", "backgrounds", "pretrain_images", "data_root", "download", "skip_bad")
WEIGHTS = ("weights", "weights_key", "text_features", "networks")
SETTING = ("suite", "model", "pretrained", "image_size", *WEIGHTS, *PICTURES, "device", "keep", "macs", "n_train")
RUN = ("out", "rerun", "checkpoint", "timeout", "memory_limit", "jobs")
REQUEST = ("plugins", *SETTING, "where", "precision", *RUN)
OF_PROBES = ("pooling", "keep_features")
PLACE = ("exclusive", "dask", "dry_run", "observe")


class Numbers(click.ParamType):
    """One number, or several separated by commas."""

    def __init__(self, kind: type):
        self.kind, self.name = kind, "NUMBER[,NUMBER...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Return the numbers of a text; see `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"got '{value}', allowed: numbers separated by commas", param, ctx)


def numbers(kind: type) -> dict[str, Any]:
    """Return the arguments of click.option for a list of numbers. A repeated option adds its numbers."""

    def together(_context: click.Context, _option: click.Parameter, lists: tuple[tuple[Any, ...], ...]) -> Any:
        return tuple(itertools.chain.from_iterable(lists))

    return {"multiple": True, "type": Numbers(kind), "callback": together}


KINDS: dict[type, Any] = {Path: PATH, str: str, int: int, float: float}
"""How click reads a value of each type. If a field has several types, the first one in this order is used."""


def _kind_of(field: FieldInfo) -> dict[str, Any]:
    """Return the arguments of click.option for the type of a field. The field itself validates the value."""
    types = get_args(field.annotation) or (field.annotation,)
    if field.annotation is bool:
        return {"is_flag": True}
    if get_origin(field.annotation) is Literal:
        return {"type": click.Choice(types)}
    kind = next((kind for type_, kind in KINDS.items() if type_ in types), int)
    if get_origin(field.annotation) is not tuple:
        return {"type": kind}
    return {"multiple": True, "type": kind} if kind in (PATH, str) else numbers(kind)


def _option(name: str, field: FieldInfo) -> Callable[[Any], Any]:
    """Return the decorator that adds the option of a field to a command."""
    more = _kind_of(field) | {"help": field.description, "metavar": field.title}
    if field.default not in (None, False, ()):
        more |= {"default": field.default, "show_default": True}
    if name in NAMES:
        more["shell_complete"] = complete
    return click.option(option_of(name), name, **more)


_OPTIONS = {name: _option(name, field) for fields in OPTIONS.values() for name, field in fields.items()} | {
    "out": click.option("--out", default=OUT, show_default=True, type=PATH, help="The run's folder."),
    "dry_run": click.option("--dry-run", is_flag=True, help="Show the cells and their expected time, but run nothing."),
}


def options(*names: str) -> Callable[[C], C]:
    """Return a decorator that adds these options to a command, in this order."""

    def decorate(command: C) -> C:
        for name in reversed(names):
            command = _OPTIONS[name](command)
        return command

    return decorate
