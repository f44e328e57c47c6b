"""NAME:param=value,value,param=value as users type it, and parameters checked against a class."""

from __future__ import annotations

import itertools
import json
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sparsebench.errors import UserError, one_line, unknown

B = TypeVar("B", bound=BaseModel)
_FORM = re.compile(r"(?P<name>.*?)(?::(?P<params>[A-Za-z_]\w*=.*))?", re.DOTALL)

_POINT = re.compile(r"\s*-?\.\d+\s*")
"""A number such as .5, which is no JSON."""
_VALUELESS = re.compile(r"[\w-]+:\w+")
"""NAME:param, and neither a file nor a value."""


def unused_parameters(thing: BaseModel) -> set[str]:
    """Return the parameters that older records do not have, its class's `added`, that are at their defaults."""
    fields, added = type(thing).model_fields, getattr(thing, "added", ())
    return {name for name in added if getattr(thing, name) == fields[name].default}


@dataclass(frozen=True)
class Spec:
    """What was asked for: a name or file, and for each parameter the values to sweep over."""

    name: str
    params: dict[str, list[Any]] = field(default_factory=dict)

    def combinations(self, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Return every combination of the parameters' values, but for the parameters named."""
        axes = {key: values for key, values in self.params.items() if key not in without}
        return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def parse(text: str, positional: str | None = None) -> Spec:
    """Return the specification of NAME[:param=value[,value...][,param=value...]].

    Values are JSON where they can be, else text. With `positional`, NAME:VALUE sets that parameter.

    >>> parse("attn_topk:disposal=drop,merge").params
    {'disposal': ['drop', 'merge']}
    """
    match = _FORM.fullmatch(text)
    assert match is not None
    name, tail = match["name"], match["params"]
    params: dict[str, list[Any]] = {}
    if tail is None and positional is not None and ":" in name:
        name, _, value = name.partition(":")
        params[positional] = [value]
    elif _VALUELESS.fullmatch(name):
        raise UserError("a parameter without a value", got=f"'{text}'", allowed="NAME:param=value,value")
    if not name:
        raise UserError("a name is missing", got=f"'{text}'", allowed="NAME or NAME:param=value,value")
    key = ""
    for piece in tail.split(",") if tail else ():
        head, equals, value = piece.partition("=")
        if equals:
            key = head.strip()
            if key in params:
                raise UserError(f"parameter '{key}' is given twice", got=f"'{text}'")
            params[key] = []
        params[key].append(_value(value if equals else head))
    return Spec(name, params)


def label(name: str, params: Mapping[str, Any]) -> str:
    """Return what tables call a strategy: its name, with the parameters that are not its defaults."""
    return name + (f"({', '.join(f'{key}={value}' for key, value in params.items())})" if params else "")


def words_of(params: Mapping[str, Any]) -> str:
    """Return parameters as users type them after a name, as in ":layers=3+6,power=2.0"; "" for none.

    Raises:
        UserError: a value cannot be typed.
    """
    words = []
    for name, value in params.items():
        text = "+".join(map(str, value)) if isinstance(value, list | tuple) else value
        text = text if isinstance(text, str) else json.dumps(text)
        if isinstance(value, dict) or any(mark in text for mark in ",="):
            raise UserError(f"parameter '{name}'", got=value, allowed="numbers, words and tuples")
        words.append(f"{name}={text}")
    return f":{','.join(words)}" if words else ""


_JSON = {"True": "true", "False": "false", "None": "null"}
_LABEL = re.compile(r"(?P<name>[^()]*)(?:\((?P<params>.*)\))?", re.DOTALL)


def parts_of(label: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters in a `label`, values as Python has them where they can be read."""
    match = _LABEL.fullmatch(label)
    pieces = re.split(r", (?=\w+=)", match["params"]) if match is not None and match["params"] else []
    params = {
        name: _value(_JSON.get(text, text)) for name, _, text in (piece.partition("=") for piece in pieces) if name
    }
    return (label if match is None else match["name"]), params


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return float(text) if _POINT.fullmatch(text) else text.strip()


def fill(cls: type[B], params: Mapping[str, Any], owner: str, others: Collection[str] = ()) -> B:
    """Return cls(**params), with a tuple written as a+b+c; `others` are words that a user may give beside parameters.

    Raises:
        UserError: a parameter that does not exist, or a value that it cannot have.
    """
    fields = {}
    for key, value in params.items():
        if key not in cls.model_fields:
            raise unknown(f"parameter of {owner}", key, {*cls.model_fields, *others})
        kinds = (cls.model_fields[key].annotation, *typing.get_args(cls.model_fields[key].annotation))
        is_tuple = any(typing.get_origin(kind) is tuple for kind in kinds)
        fields[key] = str(value).split("+") if is_tuple and isinstance(value, str | int | float) else value
    try:
        return cls(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its parameters"
        if first["type"] == "missing":
            raise UserError(
                f"{owner}: {place} has no default", next_step="give it one in its class: float = 1.0"
            ) from error
        raise UserError(
            f"{owner}: {place}: {first['msg'].removeprefix('Value error, ')}", got=first.get("input")
        ) from error
    except UserError:
        raise
    except Exception as error:  # a stranger's __init__
        raise UserError(
            f"{owner} cannot be made: {one_line(error)}",
            next_step="write its parameters as fields of the class, as in power: float = 2.0, and no __init__",
        ) from error
