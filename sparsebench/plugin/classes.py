"""Classes from modules, scripts and notebooks, written as plugin files with everything that they use."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from sparsebench.errors import UserError
from sparsebench.files import write_whole
from sparsebench.plugin.content import Content, Place, find_module, has_name_of_python, place_of
from sparsebench.plugin.source import STAR, absolute, bound, canonical, constant, is_constant, parse, statements, uses
from sparsebench.strategy.base import Strategy, complaint
from sparsebench.strategy.spec import words_of

FOLDER = "plugins"
"""The subfolder of a run's folder with the sources of strategies that were given as classes, by revision."""
PLAIN = (int, float, str, bool, bytes, type(None))
MODULES_OWN = {"__name__", "__file__", "__doc__", "__package__", "__spec__", "__loader__", "__builtins__"}
"""Names that each module has."""
TO_A_FILE = "write the strategy to a file, and pass its path"
RESTART = "restart Python and run again"
HOOK = """

from sparsebench import hookimpl as _hookimpl


@_hookimpl
def sparsebench_strategies():
    return [{name}]
"""


def write(strategy: Strategy | type[Strategy], out: Path) -> str:
    """Write a class, and everything that it uses, into a run's folder; return the value for --plugin.

    The class becomes a plugin file. It has the definitions that the class uses from its own module, script or notebook.
    Modules of its author that it imports are copied beside it. An instance stands for its class with its parameters. A
    strategy that comes with sparsebench needs no file.

    Raises:
        UserError: the class is not a strategy, its source is unknown, or it uses a value that cannot be stored.
    """
    cls = strategy if isinstance(strategy, type) else type(strategy)
    words = "" if isinstance(strategy, type) else words_of(strategy.model_dump(mode="json", exclude_defaults=True))
    if cls.__module__.startswith("sparsebench_plugins."):
        return f"{cls.name}{words}"
    if problem := complaint(cls):
        raise UserError(problem)
    parts: dict[str, str] = {}
    _add(cls, parts)
    text = "\n\n".join(["from __future__ import annotations", *parts.values()]) + HOOK.format(name=cls.__name__)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    beside = Path(file).resolve().parent if file else Path.cwd()
    content = Content.of_source(Path(f"{cls.name}.py"), text.encode(), _find, beside=beside)
    _check_values(content)
    folder = out / FOLDER / content.revision
    name = f"{cls.name}_.py" if f"{cls.name}.py" in content.files else f"{cls.name}.py"
    for known, value in {**content.contents, name: content.source}.items():
        path = folder / known
        if not path.is_file() or path.read_bytes() != value:
            write_whole(path, value)
    return f"{folder / name}{words}"


def _find(name: str) -> Place | None:
    """Return the place of a module of the author: of the one that this process has, if it was imported.

    Raises:
        UserError: its source is unknown or gone, or a module of Python has its name.
    """
    module = sys.modules.get(name)
    if module is None:
        return None if name in sys.stdlib_module_names else find_module(name)
    file = getattr(module, "__file__", None)
    folders = list(getattr(module, "__path__", ()))
    if file is None and not folders:
        if name in sys.stdlib_module_names:
            return None  # it is built into Python
        raise UserError(f"module '{name}' has no file, so it cannot be stored with the results", next_step=TO_A_FILE)
    spec = ModuleSpec(name, None, origin=file, is_package=bool(folders))
    spec.submodule_search_locations = folders or None
    spec.has_location = file is not None
    place = place_of(spec)
    if place is not None and name in sys.stdlib_module_names:
        raise has_name_of_python(name, str(file))
    for path in () if place is None else place.paths:
        if not path.exists():
            raise UserError(
                f"module '{name}' cannot be stored with the results: its file is gone",
                got=str(path),
                next_step="put it back, or remove the import",
            )
    return place


def _check_values(content: Content) -> None:
    """Raise UserError if a module of the author has other values in this process than in its file.

    The file may have been edited after the import, or the value changed. Workers import what is in the file. Values
    that the module itself changes, by `global`, may differ.
    """
    for known, value in content.contents.items():
        name = known.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        module = sys.modules.get(name)
        tree = parse(value) if known.endswith(".py") else None
        if module is None or tree is None:
            continue
        changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
        for key, node in _once(tree).items():
            actual = vars(module).get(key, node)
            if key in changed or actual is node:
                continue
            if not _is_value(node, actual):
                raise UserError(
                    f"'{name}.{key}' differs from {content.files[known]}: "
                    "the file was edited after the import, or the value was changed",
                    next_step=f"write it in the file; then {RESTART}",
                )


def _once(tree: ast.Module) -> dict[str, ast.stmt]:
    """Return the functions and variables that a module defines once, by name."""
    found: dict[str, ast.stmt] = {}
    several: set[str] = set()
    for node in statements(tree):
        for name in bound(node) or ():
            several |= {name} if name in found else set()
            found[name] = node
    kinds = (ast.FunctionDef, ast.Assign, ast.AnnAssign)
    return {name: node for name, node in found.items() if name not in several and isinstance(node, kinds)}


def _is_value(node: ast.stmt, actual: Any) -> bool:
    """Return whether the actual value of a name can be that of the statement that defines it."""
    if isinstance(node, ast.FunctionDef):
        code = getattr(actual, "__code__", None)
        return bool(node.decorator_list) or (code is not None and code.co_name == node.name)
    several = isinstance(node, ast.Assign) and any(isinstance(target, ast.Tuple) for target in node.targets)
    value = getattr(node, "value", None)
    return several or not is_constant(value) or _same(constant(value), actual)


def _add(user: type | FunctionType, parts: dict[str, str]) -> None:
    """Add the source of a class or function to `parts`, after the source of everything that it uses."""
    source = _source_of(user)
    parts[user.__name__] = ""  # it may use its own name
    _add_names(source.text, source, user, parts)
    del parts[user.__name__]
    parts[user.__name__] = source.text


def _add_names(text: str, source: Source, user: type | FunctionType, parts: dict[str, str]) -> None:
    """Add the source of the global names that a text uses to `parts`."""
    used = set[str]().union(*map(uses, ast.parse(text).body))
    codes = [function.__code__ for function in _functions(user)]
    local = {name for code in codes if code.co_filename == source.file for name in code.co_freevars} - {"__class__"}
    if "<locals>" in user.__qualname__:
        local |= {name for name in used - source.names.keys() if not hasattr(builtins, name)} - {user.__name__}
    if local:
        raise UserError(
            f"'{user.__name__}' uses '{min(local)}', a variable of the function around it, which cannot be stored",
            next_step="define both at the top of the module",
        )
    for name in sorted(used - MODULES_OWN):
        if hasattr(builtins, name) and not any(source.definitions(name)):
            continue  # notebooks have an `open` of their own
        if name in source.names and name not in parts:
            parts[name] = ""  # it may use its own name
            line = _line(name, source, user, parts)
            parts.pop(name, None)
            parts[name] = line


def _line(name: str, source: Source, user: type | FunctionType, parts: dict[str, str]) -> str:
    """Return the source that gives a name its value in the file.

    It is the author's statement, if it gives the present value; otherwise the value is written in another way.
    """
    value = source.names[name]
    inner = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
    module = getattr(inner, "__module__", None)
    spelled = str(getattr(inner, "__name__", ""))
    is_code = isinstance(inner, type | FunctionType)

    # A class or function of the same module is copied, with what it uses.
    if is_code and module == source.names.get("__name__") and spelled != "<lambda>":
        if spelled == name:
            _add(inner, parts)
            return parts.pop(name)
        if spelled not in parts:
            _add(inner, parts)
        return f"{name} = {spelled}"
    for node, file in source.definitions(name):
        if _gives(node, file, name, value):
            text = ast.unparse(node)
            _add_names(text, source, user, parts)
            return text

    text = _written(name, value)
    if text:
        return text
    known = getattr(sys.modules.get(str(module)), spelled, None)
    if known is value and spelled:
        return f"from {module} import {spelled} as {name}"
    # A module was loaded again, and the author's name still has the class or function of before.
    again = isinstance(known, type | FunctionType) and isinstance(value, type | FunctionType)
    raise UserError(
        f"'{user.__name__}' uses '{name}', which cannot be stored with it",
        got=f"an earlier {module}.{spelled}" if again else type(value).__name__,
        next_step="import it again" if again else TO_A_FILE,
    )


def _written(name: str, value: Any) -> str:
    """Return a statement that gives a name a module or a plain value, or "" for any other value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if type(value) is float and not math.isfinite(value):
        return f"{name} = float('{value}')"
    is_plain = type(value) in PLAIN or (type(value) is tuple and all(type(item) in PLAIN for item in value))
    return f"{name} = {value!r}" if is_plain else ""


def _gives(node: ast.stmt, file: str, name: str, value: Any) -> bool:
    """Return whether a statement that defines a name gives it the present value."""
    if isinstance(node, ast.Import):
        (alias,) = node.names
        return sys.modules.get(alias.name if alias.asname else alias.name.partition(".")[0]) is value
    if isinstance(node, ast.ImportFrom):
        original = name if node.names[0].name == STAR else node.names[0].name
        module = sys.modules.get(str(node.module))
        return value in (getattr(module, original, module), sys.modules.get(f"{node.module}.{original}", module))
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return bool(node.decorator_list)
    if isinstance(node, ast.If | ast.Try):
        return True
    expression = getattr(node, "value", None)
    if isinstance(expression, ast.Lambda):
        code = getattr(value, "__code__", None)
        return code is not None and (code.co_filename, code.co_firstlineno) == (file, expression.lineno)
    return is_constant(expression) and _same(constant(expression), value)


@dataclass(frozen=True)
class Source:
    """The source of a class or function.

    Attributes:
        text: its text.
        names: the global names of its module.
        file: the file or the cell that has it.
    """

    text: str
    names: Mapping[str, Any]
    file: str

    def definitions(self, name: str) -> Iterator[tuple[ast.stmt, str]]:
        """Yield the statements of the module, or of the notebook's cells, that define a name; each with its file."""
        nodes = [(node, file) for file in _files_like(self.file) for node in _statements(file, self.names)]
        for wanted in (name, STAR):
            yield from ((node, file) for node, file in nodes if wanted in (bound(node) or ()))


def _source_of(user: type | FunctionType) -> Source:
    """Return the source of a class or function.

    Raises:
        UserError: it is unknown, or differs from what this process has.
    """
    for function in _functions(user):
        if function.__code__.co_qualname not in (user.__qualname__, f"{user.__qualname__}.{function.__name__}"):
            continue  # it was put into the class later, or is made by a decorator
        file = function.__code__.co_filename
        for node in ast.walk(_tree(file)):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name != user.__name__:
                continue
            if _first(node) <= function.__code__.co_firstlineno <= (node.end_lineno or 0):
                return _checked(user, node, file, function.__globals__)
        if Path(file).is_file():
            raise _edited(user, file)
    module = sys.modules.get(user.__module__)  # for a class without methods
    first = getattr(module, "__file__", None) or next(_cells(), "")
    nodes = [(node, file) for file in _files_like(first) for node in _tree(file).body]
    found = [(node, file) for node, file in nodes if isinstance(node, ast.ClassDef) and node.name == user.__name__]
    if module is not None and isinstance(user, type) and len({canonical(node) for node, _ in found}) == 1:
        return _checked(user, *found[0], vars(module))
    raise UserError(f"the source of '{user.__name__}' is unknown", next_step=TO_A_FILE)


def _checked(
    user: type | FunctionType, node: ast.ClassDef | ast.FunctionDef, file: str, names: Mapping[str, Any]
) -> Source:
    """Return the source of a class or function at a node, with absolute imports."""
    _check_attributes(user, node, file)
    if any(isinstance(part, ast.ImportFrom) and part.level for part in ast.walk(node)):
        return Source(ast.unparse(absolute(ast.Module([node], []), _package(names))), names, file)
    lines = linecache.getlines(file)[_first(node) - 1 : node.end_lineno]
    return Source(textwrap.dedent("".join(lines)).rstrip(), names, file)


def _first(node: ast.ClassDef | ast.FunctionDef) -> int:
    """Return the first line of a definition, with its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _edited(user: type | FunctionType, file: str) -> UserError:
    return UserError(f"{file} was edited after '{user.__name__}' was imported from it", next_step=RESTART)


def _check_attributes(user: type | FunctionType, node: ast.ClassDef | ast.FunctionDef, file: str) -> None:
    """Raise UserError if attributes of a strategy were set after its definition, or its file was edited."""
    if not (isinstance(user, type) and issubclass(user, Strategy) and isinstance(node, ast.ClassDef)):
        return  # metaclasses of other classes may change values
    if node.decorator_list:
        return
    stored = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    stored |= {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.ClassDef)}
    given = {name: part for part in node.body for name in bound(part) or ()}
    for name, value in vars(user).items():
        if name.startswith(("_", "model_")):
            continue
        part = given.get(name)
        changed = name not in stored and part is None
        if isinstance(part, ast.FunctionDef) and not part.decorator_list:
            code = getattr(value, "__code__", None)
            changed = code is None or code.co_qualname != f"{user.__qualname__}.{name}"
            if code is not None and not changed and code.co_firstlineno != part.lineno:
                raise _edited(user, file)
        elif isinstance(part, ast.Assign | ast.AnnAssign) and is_constant(part.value):
            changed = not _same(constant(part.value), value)
        if changed:
            raise UserError(
                f"'{user.__name__}.{name}' was set after the class was defined, so its source lacks it",
                next_step=f"write {name} in the class",
            )


def _functions(user: type | FunctionType) -> Iterator[FunctionType]:
    for item in [user] if isinstance(user, FunctionType) else vars(user).values():
        item = getattr(item, "__func__", getattr(item, "fget", item))  # class methods, static methods, properties
        if isinstance(item, FunctionType):
            yield inspect.unwrap(item)


def _package(names: Mapping[str, Any]) -> str:
    return str(names.get("__package__") or "")


def _tree(file: str) -> ast.Module:
    """Return the syntax tree of a file or of a notebook's cell; that of an empty one if it is unknown."""
    if Path(file).is_file():
        linecache.checkcache(file)
    return parse("".join(linecache.getlines(file)).encode()) or ast.Module([], [])


def _statements(file: str, names: Mapping[str, Any]) -> Iterator[ast.stmt]:
    return statements(absolute(_tree(file), _package(names)))


def _files_like(file: str) -> list[str]:
    """Return a file, or for a notebook's cell this cell and then all others, the last first."""
    return [file] if not file or Path(file).is_file() else list(dict.fromkeys([file, *_cells()]))


def _cells() -> Iterator[str]:
    """Yield the names of the sources that are no files, such as the cells of a notebook, the last first."""
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) > 1 and entry[1] is None:  # it has no time of change
            yield name


def _same(expected: Any, actual: Any) -> bool:
    return type(actual) is type(expected) and repr(actual) == repr(expected)
