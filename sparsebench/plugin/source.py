"""Strategies that are classes in a notebook, a script or a module, as plugin files that workers can load."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from sparsebench.errors import UserError
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.contract import complaint
from sparsebench.strategy.spec import words_of

FOLDER = "plugins"
"""Of a run's folder, with the sources of strategies that were given as classes."""
PLAIN = (int, float, str, bool, bytes, type(None))
HOOK = """

from sparsebench import hookimpl as _hookimpl


@_hookimpl
def sparsebench_strategies():
    return [{name}]
"""


def plugin_file(cls: type[Strategy]) -> str:
    """Return the source of a plugin file that brings a class, with all that it uses of its module.

    Raises:
        UserError: it is no strategy, its source is not known, or it uses what a file cannot hold.
    """
    if problem := complaint(cls):
        raise UserError(problem)
    parts: dict[str, str] = {}
    _add(cls, parts)
    return "\n\n".join(["from __future__ import annotations", *parts.values()]) + HOOK.format(name=cls.__name__)


def _add(thing: type | FunctionType, parts: dict[str, str]) -> None:
    """Add the source of a class or function after that of all that it uses."""
    text, names = _source(thing)
    parts[thing.__name__] = ""  # it may name itself
    for name in _names_in(text):
        if name in names and name not in parts:
            parts[name] = _line(name, names[name], thing, parts)
    del parts[thing.__name__]
    parts[thing.__name__] = text


def _line(name: str, value: Any, user: type | FunctionType, parts: dict[str, str]) -> str:
    """Return the line that gives a name its value in the file."""
    module = getattr(value, "__module__", None)
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, type | FunctionType) and module == user.__module__:
        _add(value, parts)
        return parts.pop(value.__name__) + (f"\n\n{name} = {value.__name__}" if name != value.__name__ else "")
    if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(one, PLAIN) for one in value)):
        return f"{name} = {value!r}"
    spelled = str(getattr(value, "__name__", ""))
    if module and spelled and getattr(inspect.getmodule(value), spelled, None) is value:
        return f"from {module} import {spelled} as {name}"
    if module in ("typing", "__future__") and getattr(value, "_name", None):
        return f"from typing import {value._name} as {name}"
    raise UserError(
        f"'{user.__name__}' uses '{name}', which cannot be stored with it", got=type(value).__name__,
        next_step="write the strategy to a file, and name that",
    )  # fmt: skip


def _source(thing: type | FunctionType) -> tuple[str, dict[str, Any]]:
    """Return the text of a class or function, and the global names where it was written."""
    for function in _functions(thing):
        lines = linecache.getlines(function.__code__.co_filename)
        for node in ast.walk(ast.parse("".join(lines))) if lines else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == thing.__name__:
                begin = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if begin <= function.__code__.co_firstlineno <= (node.end_lineno or 0):
                    text = "".join(lines[begin - 1 : node.end_lineno])
                    return inspect.cleandoc(f"\n{text}"), function.__globals__
    raise UserError(
        f"the source of '{thing.__name__}' is not known here", next_step="write the strategy to a file, and name that"
    )


def _functions(thing: type | FunctionType) -> Iterator[FunctionType]:
    things = [thing] if isinstance(thing, FunctionType) else list(vars(thing).values())
    for one in things:
        one = one.__func__ if isinstance(one, staticmethod | classmethod) else one
        one = one.fget if isinstance(one, property) else one
        if isinstance(one, FunctionType):
            yield one


def _names_in(text: str) -> list[str]:
    """Return the names that a text reads, those in annotations among them, in order."""
    names = (node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    return list(dict.fromkeys(names))


def write(strategy: Strategy | type[Strategy], out: Path) -> str:
    """Write the plugin file of a class or an instance into a run's folder; return how users name it."""
    from sparsebench.files import write_whole

    cls = strategy if isinstance(strategy, type) else type(strategy)
    words = "" if isinstance(strategy, type) else words_of(strategy.model_dump(mode="json", exclude_defaults=True))
    if cls.__module__.startswith("sparsebench_plugins."):
        return f"{cls.name}{words}"
    path = out / FOLDER / f"{getattr(cls, 'name', cls.__name__)}.py"
    content = plugin_file(cls).encode()
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)
    return f"{path}{words}"
