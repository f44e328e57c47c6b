"""Options that several commands have, made from the fields of what they ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import click

from sparsebench.api import OUT
from sparsebench.cli.terminal import NAMES, complete
from sparsebench.plan.request import OPTIONS, Option

C = TypeVar("C", bound=Callable[..., Any])
PICTURES = ("images", "backgrounds", "pretrain_images", "data_root", "download", "skip_bad")
WEIGHTS = ("weights", "weights_key", "networks")
SETTING = ("suite", "model", "pretrained", *WEIGHTS, *PICTURES, "device", "keep", "macs", "n_train")
RUN = ("out", "rerun", "checkpoint", "timeout", "memory_limit", "jobs")
REQUEST = ("plugins", *SETTING, "where", "precision", *RUN)
PLACE = ("exclusive", "dask", "dry_run", "observe")


class Numbers(click.ParamType):
    """One number, or several with commas between."""

    def __init__(self, kind: type):
        self.kind, self.name = kind, "NUMBER[,NUMBER...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        """Return the numbers of a text; see `click.ParamType.convert`."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"got '{value}', allowed: numbers with commas between", param, ctx)


def _kind_of(one: Option) -> dict[str, Any]:
    """Return how click reads a field's value."""
    types = get_args(one.type) or (one.type,)
    if one.type is bool:
        return {"is_flag": True}
    if get_origin(one.type) is tuple:
        if Path in types:
            return {"multiple": True, "type": click.Path(path_type=Path)}
        return {"multiple": True} if str in types else {"type": Numbers(types[0]), "default": ()}
    if get_origin(one.type) is Literal:
        return {"type": click.Choice(types)}
    if "least" in one.words:
        return {"type": (click.FloatRange if float in types else click.IntRange)(min=one.words["least"])}
    return {"type": click.Path(path_type=Path) if Path in types else int if int in types else str}


def _option(one: Option) -> Callable[[Any], Any]:
    """Return what gives a command the option of a field."""
    name = one.words.get("name", one.name.replace("_", "-"))
    more = _kind_of(one) | {key: one.words[key] for key in ("help", "metavar") if key in one.words}
    if one.default not in (None, False, ()):
        more |= {"default": one.default, "show_default": True}
    if one.name in NAMES:
        more["shell_complete"] = complete
    return click.option(f"--{name}", one.name, **more)


_OPTIONS = {name: _option(one) for fields in OPTIONS.values() for name, one in fields.items()} | {
    "out": click.option(
        "--out", default=OUT, show_default=True, type=click.Path(path_type=Path), help="The run's folder."
    ),
    "dry_run": click.option("--dry-run", is_flag=True, help="Show the cells and their expected time, but run nothing."),
}


def options(*names: str) -> Callable[[C], C]:
    """Give a command these options, in this order; one that is there has them after its own."""

    def decorate(command: C) -> C:
        for name in names if isinstance(command, click.Command) else reversed(names):
            _OPTIONS[name](command)
        return command

    return decorate
