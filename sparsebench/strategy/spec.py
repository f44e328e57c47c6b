"""Specifications NAME:param=value,value,param=value, as users type them, and the check of parameters by a class."""

from __future__ import annotations

import itertools
import json
import re
import typing
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from sparsebench.errors import UserError, one_line, unknown

B = TypeVar("B", bound=BaseModel)
_FORM = re.compile(r"(?P<name>.*?)(?::(?P<params>[A-Za-z_]\w*=.*))?", re.DOTALL)

_POINT = re.compile(r"\s*-?\.\d+\s*")
"""A number such as .5, which is not JSON."""
_AFTER_FILE = re.compile(r".*\.py[:,].*", re.DOTALL)
"""A plugin file with parameters in another form, such as FILE.py:param."""
_VALUELESS = re.compile(r"[\w-]+:\w+")
"""NAME:param without a value; paths do not match."""


def unused_parameters(instance: BaseModel) -> set[str]:
    """Return the parameters that older records lack, in `added` of the class and its bases, at their default values."""
    fields = type(instance).model_fields
    added: set[str] = set()
    for cls in type(instance).__mro__:
        added.update(vars(cls).get("added", ()))
    return {name for name in added & fields.keys() if getattr(instance, name) == fields[name].default}


@dataclass(frozen=True)
class Spec:
    """A name or file, and for each parameter the values to sweep over."""

    name: str
    params: dict[str, list[Any]] = field(default_factory=dict)

    def combinations(self, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        """Return every combination of the values of all parameters except those in `without`."""
        axes = {key: values for key, values in self.params.items() if key not in without}
        return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def parse(text: str, positional: str | None = None) -> Spec:
    """Return the specification of NAME[:param=value[,value...][,param=value...]].

    Values are JSON if possible, otherwise text. With `positional`, NAME:VALUE sets that parameter.

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
    elif _AFTER_FILE.fullmatch(name):
        allowed = "FILE.py:param=value,param=value; or param=value,value to run several values"
        raise UserError("the parameters of a plugin file", got=f"'{text}'", allowed=allowed)
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
    """Return the label of a strategy in tables: its name, with the parameters that are not at their defaults."""
    if not params:
        return name
    words = ", ".join(f"{key}={value}" for key, value in params.items())
    return f"{name}({words})"


def is_named(label: str, name: str, value: Any) -> bool:
    """Return whether a `label` has this parameter with this value: then the value is not the default."""
    text = f"{name}={value}"
    return any(f"{before}{text}{after}" in label for before in ("(", ", ") for after in (", ", ")"))


def words_of(params: Mapping[str, Any]) -> str:
    """Return parameters as users type them after a name, such as ":layers=3+6,power=2.0"; "" for none.

    Raises:
        UserError: a value cannot be typed.
    """
    words = []
    for name, value in params.items():
        text = "+".join(map(str, value)) if isinstance(value, list | tuple) else value
        text = text if isinstance(text, str) else json.dumps(text)
        if isinstance(value, dict) or any(mark in text for mark in ",="):
            raise UserError(f"parameter '{name}' cannot be text", got=value, allowed="numbers, words and tuples")
        words.append(f"{name}={text}")
    return f":{','.join(words)}" if words else ""


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return float(text) if _POINT.fullmatch(text) else text.strip()


def _kinds(annotation: Any) -> set[Any]:
    """Return the types of a union, or the type itself, without their parameters."""
    union = typing.get_origin(annotation) in (typing.Union, UnionType)
    return {typing.get_origin(kind) or kind for kind in (typing.get_args(annotation) if union else [annotation])}


def _is_several(annotation: Any) -> bool:
    return bool(_kinds(annotation) & {tuple, list, set, frozenset})


def _of_text(value: Any, annotation: Any) -> Any:
    """Return the value of a parameter that was typed as None or as a+b+c, for pydantic."""
    if value == "None" and NoneType in _kinds(annotation):
        return None
    if not _is_several(annotation) or not isinstance(value, str | int | float):
        return value
    return str(value).split("+") if value != "" else []


def fill(cls: type[B], params: Mapping[str, Any], owner: str, others: Collection[str] = ()) -> B:
    """Return cls(**params); errors name the `owner`, and list `others` as allowed too.

    As text, a tuple, list or set is a+b+c, and None is None.

    Raises:
        UserError: a parameter does not exist, or cannot have its value.
    """
    fields = {}
    for key, value in params.items():
        if key not in cls.model_fields:
            raise unknown(f"parameter of {owner}", key, {*cls.model_fields, *others})
        fields[key] = _of_text(value, cls.model_fields[key].annotation)
    try:
        return cls(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "its parameters"
        if first["type"] == "missing":
            raise UserError(
                f"{owner}: parameter '{place}' has no default",
                next_step=f"give it a value, {getattr(cls, 'name', 'NAME')}:{place}=VALUE, or a default in its class",
            ) from error
        got, step = first.get("input"), None
        if isinstance(got, str) and re.search(r":[A-Za-z_]\w*=", got):
            step = "separate parameters by commas"
        elif first["loc"] and _is_several(cls.model_fields[str(first["loc"][0])].annotation):
            step = f"separate several values by +, as in {first['loc'][0]}=1+2"
        raise UserError(
            f"{owner}: {place}: {first['msg'].removeprefix('Value error, ')}", got=got, next_step=step
        ) from error
    except UserError:
        raise
    except Exception as error:  # from a plugin's own __init__
        raise UserError(
            f"{owner} cannot be made: {one_line(error)}",
            next_step="write its parameters as fields of the class, as in power: float = 2.0, and no __init__",
        ) from error
