"""The functions of libraries and of sparsebench, as they are now: whether one was replaced since."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

_ROOTS = (
    "builtins", "gc", "math", "random", "sys", "time", "torch", "torch.Tensor", "torch.autograd", "torch.fft",
    "torch.linalg", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.optim", "torch.random", "torch.special",
    "numpy", "numpy.linalg", "numpy.random", "zlib",
)  # fmt: skip
"""Modules and classes whose functions, and classes with their methods, are watched."""
_WHOLE = "timm", "torchvision", "sparsebench", "sparsebench_plugins"
"""Packages of which every module that is imported is watched."""
_FIRST = "timm.models.vision_transformer", "torchvision.transforms"
"""What is imported before all is noted: what is imported later is not known as it was."""
_CLASSES = ("torch.nn.", "torch.optim.", "torch.utils.data.", "timm.", "torchvision.", "sparsebench.")
"""Where classes are defined whose methods are watched, besides those of the modules that are watched."""
_CHANGING = ("torch.optim.", "torch.nn.modules.")
"""Where torch puts other functions of its own, as optimisers and torch.compile are used; elsewhere it wraps some."""
_SET = "sys.displayhook", "sys.excepthook", "sys.stdout", "sys.stderr", "sys.stdin", "sys.unraisablehook"
"""What libraries, and this process, set as a matter of course."""


class Space(NamedTuple):
    """A module or a class.

    Attributes:
        name, owner: what it is called, and itself.
        things: what is watched in it, by name.
        size: how many names it has.
        code: of each function of Python among it also what it runs, and its defaults.
    """

    name: str
    owner: Any
    size: int
    things: tuple[tuple[str, Any], ...]
    code: tuple[tuple[str, FunctionType, Any, Any, Any], ...]


Table = tuple[Space, ...]


def table() -> Table:
    """Return every function that is watched, of the modules that are imported by now."""
    for name in _FIRST:
        importlib.import_module(name)
    spaces: dict[int, Space] = {}
    seen: set[int] = set()
    watched = [name for name in list(sys.modules) if name.partition(".")[0] in _WHOLE]
    for root in (*_ROOTS, *sorted(watched)):
        owner = _at(root)
        if owner is None or id(owner) in spaces:
            continue
        spaces[id(owner)] = space = _space(root, owner, seen)
        for _, thing in space.things:
            if isinstance(thing, type) and id(thing) not in spaces and _is_watched(thing, root):
                spaces[id(thing)] = _space(f"{thing.__module__}.{thing.__qualname__}", thing, seen)
    return tuple(spaces.values())


def changes(before: Table) -> list[str]:
    """Return the names of the functions that are others than they were, or that are gone."""
    return [name for space in before for name in _changes_in(space)]


def _changes_in(space: Space) -> Iterator[str]:
    if isinstance(space.owner, ModuleType) and sys.modules.get(space.name, space.owner) is not space.owner:
        yield space.name
        return
    now = vars(space.owner).get
    for name, thing in [(name, thing) for name, thing in space.things if now(name) is not thing]:
        whole = f"{space.name}.{name}"
        if not (_of_torch(now(name)) and (whole.startswith(_CHANGING) or _wraps(now(name), thing))):
            yield whole
    if isinstance(space.owner, type) and len(vars(space.owner)) != space.size:
        yield from _overriding(space)
    for name, function, code, defaults, named in space.code:
        if function.__code__ is not code or function.__defaults__ is not defaults or function.__kwdefaults__ != named:
            yield f"{space.name}.{name}"


def _overriding(space: Space) -> Iterator[str]:
    """Yield the methods that a class has by now and had from another."""
    known = {name for name, _ in space.things}
    for name, thing in list(vars(space.owner).items()):
        inherited = any(name in vars(base) for base in space.owner.__mro__[1:])
        if _is_function(thing) and name not in known and inherited and not _of_torch(thing):
            yield f"{space.name}.{name}"


def _at(path: str) -> Any:
    """Return the module or class of that name; None if it is not imported."""
    if path in sys.modules:
        return sys.modules[path]
    parent, _, name = path.rpartition(".")
    return getattr(sys.modules.get(parent), name, None)


def _space(name: str, owner: Any, seen: set[int]) -> Space:
    """Return what is watched in a module or a class; what functions run is noted of each once, in `seen`."""
    things = tuple(
        (key, value)
        for key, value in list(vars(owner).items())
        if _is_function(value) and key != "__class__" and f"{name}.{key}" not in _SET
    )
    code = tuple(
        (key, value, value.__code__, value.__defaults__, value.__kwdefaults__)
        for key, value in things
        if isinstance(value, FunctionType) and id(value) not in seen
    )
    seen.update(id(value) for _, value, *_ in code)
    return Space(name, owner, len(vars(owner)), things, code)


def _is_function(value: Any) -> bool:
    return callable(value) or isinstance(value, classmethod | staticmethod | property)


def _is_watched(cls: type, root: str) -> bool:
    return f"{cls.__module__}.".startswith((*_CLASSES, f"{root}."))


def _of_torch(function: Any) -> bool:
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("torch.")


def _wraps(function: Any, other: Any) -> bool:
    """Say whether a function is another one's wrapper, and says so."""
    while function is not None and function is not other:
        function = getattr(function, "__wrapped__", None)
    return function is other
