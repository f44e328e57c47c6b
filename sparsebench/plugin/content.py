"""Plugin files: hashes of their code, their execution, and classes from a notebook written as plugin files."""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import linecache
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import FunctionType, ModuleType
from typing import Any

from sparsebench.errors import UserError
from sparsebench.files import with_lf, write_whole
from sparsebench.strategy.base import Strategy, complaint
from sparsebench.strategy.spec import words_of

_LIBRARIES = {"sparsebench", "sparsebench_plugins", "sparsebench_dask", "numpy", "torch", "torchvision", "timm"}
"""Modules, besides the standard library, that never belong to a plugin, whatever files its folder has."""


CODE = "code-"
"""The prefix of revisions that are hashes of code, which tells them from numbers."""


@dataclass(frozen=True)
class Content:
    """A plugin file, with everything that it imports from its folder or from the folder of its package.

    Attributes:
        path: the plugin file.
        source: the content of the plugin file.
        root: the folder of the plugin file, or of the package that contains it; names of files are relative to it.
        files: hashes of all these files, by path; for Python files the hash of their code, see `code_of`.
        imports: names of the imported modules and packages.
    """

    path: Path
    source: bytes
    root: Path
    files: dict[Path, str]
    imports: frozenset[str]

    @classmethod
    def of_file(cls, path: Path) -> Content:
        """Read a plugin file and the files that it imports.

        Raises:
            UserError: a file cannot be read.
        """
        path = path.resolve()
        root = path.parent
        while (root / "__init__.py").is_file() and root != root.parent:
            root = root.parent
        near = {name: file for name, file in (_modules(root) | _modules(path.parent)).items() if file != path}
        source, files, imports, pending = b"", dict[Path, str](), set[str](), [path]
        while pending:
            for file in _files(pending.pop()):
                if file in files:
                    continue
                try:
                    content = file.read_bytes()
                except OSError as error:
                    raise UserError(f"plugin file {file} cannot be read: {error.strerror}") from error
                source = content if file == path else source
                files[file] = code_of(content) if file.suffix == ".py" else hashlib.sha256(with_lf(content)).hexdigest()
                names = _imports(content, near) if file.suffix == ".py" else set[str]()
                imports |= names
                pending += [near[name] for name in names]
        return cls(path, source, root, files, frozenset(imports))

    @property
    def revision(self) -> str:
        """The hash of the code, the same with every version of Python."""
        lines = sorted(f"{_name(path, self.root)}\0{sha256}\n" for path, sha256 in self.files.items())
        about = lines[0].partition("\0")[2] if len(lines) == 1 else "".join(lines)
        return f"{CODE}{hashlib.sha256(about.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"

    def execute(self, module: ModuleType) -> None:
        """Execute the file, as it was read, in a module; its other files are imported from its folder.

        The file gets its own modules, also if it imports them later. Other modules with the same names are restored
        after each import.
        """
        code = compile(self.source, self.path, "exec")
        if not self.imports:
            exec(code, vars(module))
            return
        folders = list(dict.fromkeys((str(self.path.parent), str(self.root))))
        files, modules = set(map(str, self.files)), dict[str, ModuleType]()

        @contextmanager
        def local_imports() -> Iterator[None]:
            """Put its folders first on the path, and its modules into `sys.modules`."""
            writes, previous = sys.dont_write_bytecode, _take_modules(self.imports)
            others = {name: value for name, value in previous.items() if getattr(value, "__file__", "") not in files}
            sys.modules.update(modules)
            sys.path[:0], sys.dont_write_bytecode = folders, True
            try:
                yield
            finally:
                sys.dont_write_bytecode = writes
                for folder in folders:
                    sys.path.remove(folder)
                modules.update(_take_modules(self.imports))
                sys.modules.update(modules | others)

        def import_(name: str, *args: Any, **kwargs: Any) -> Any:
            with local_imports() if name.partition(".")[0] in self.imports else nullcontext():
                return builtins.__import__(name, *args, **kwargs)

        vars(module)["__builtins__"] = vars(builtins) | {"__import__": import_}
        with local_imports():
            exec(code, vars(module))
            for name in self.imports:  # now, because its own modules may import each other later, without `import_`
                with suppress(Exception):
                    import_module(name)


def _take_modules(names: Collection[str]) -> dict[str, ModuleType]:
    """Remove modules with these names, and their submodules, from `sys.modules`; return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}


def texts_of(path: Path, revision: str) -> tuple[str, dict[str, str]]:
    """Return the name of a plugin file, and the texts of it and of the files that it imports, by name.

    Written under these names to another folder, they are the same plugin. The texts include `__init__.py` of the
    packages that contain the file. Returns ("", {}) if the revision has changed, or a name or a file is not UTF-8.
    """
    content = Content.of_file(path)
    above = [place / "__init__.py" for place in content.path.parents if place.is_relative_to(content.root)]
    paths = {_name(place, content.root): place for place in (*content.files, *above) if place.is_file()}
    try:
        texts = {name.encode().decode(): path.read_bytes().decode() for name, path in sorted(paths.items())}
    except (OSError, ValueError):
        texts = {}
    return (_name(content.path, content.root), texts) if texts and content.revision == revision else ("", {})


def file_revision(path: Path) -> str:
    """Return the revision of a plugin file and the files that it imports, or "" if they cannot be read."""
    try:
        return Content.of_file(path).revision if path.is_file() else ""
    except UserError:
        return ""


def code_of(content: bytes) -> str:
    """Return a hash of Python source that ignores comments, docstrings and layout; of anything else, of its bytes.

    The hash is that of a canonical form of the syntax tree, which is the same with every version of Python. Fields are
    ordered by name; empty fields are left out, because newer versions have more of them. Constants are written with
    their type, in ASCII. Pieces of an f-string are joined, because Python before 3.12 splits them in other places.
    """
    tree = _parse(content)
    if tree is None:
        return hashlib.sha256(content).hexdigest()
    tokens: list[str] = []
    stack: list[Any] = [tree]
    while stack:  # recursion would fail on long expressions
        item = stack.pop()
        if isinstance(item, _End):
            tokens.append(item)
        elif isinstance(item, ast.Constant):
            tokens.append(f"{type(item.value).__name__} {_constant(item.value)}")
        elif isinstance(item, ast.AST):
            tokens.append(f"({type(item).__name__}")
            stack.append(_End(")"))
            for name, value in sorted(_fields(item), reverse=True, key=lambda field: field[0]):
                stack += [value, _End(f".{name}")]
        elif isinstance(item, list):
            tokens.append("[")
            stack += [_End("]"), *reversed(item)]
        else:  # a name, the level of an import, a conversion, or None in a list
            tokens.append(_constant(item))
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


_IGNORED = {"ctx", "type_ignores", "type_comment", "kind"}


class _End(str):
    """A token of the canonical form, on the stack among the nodes that are not yet written."""


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a node that are not empty, without statements that are a string, such as docstrings."""
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(node, ast.JoinedStr):
            value = _join(node.values)
        elif isinstance(value, list):
            value = [item for item in value if not (isinstance(item, ast.Expr) and _text(item.value) is not None)]
        elif name == "format_spec" and isinstance(value, ast.JoinedStr) and not _join(value.values):
            continue
        if name not in _IGNORED and value is not None and value != []:
            yield name, value


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _join(pieces: Iterable[ast.expr]) -> list[ast.expr]:
    """Return the pieces of an f-string; adjacent texts are joined, and empty texts are left out."""
    joined: list[ast.expr] = []
    for piece in pieces:
        if joined and (before := _text(joined[-1])) is not None and (text := _text(piece)) is not None:
            joined[-1] = ast.Constant(before + text)
        else:
            joined.append(piece)
    return [piece for piece in joined if _text(piece) != ""]


def _constant(value: Any) -> str:
    return hex(value) if type(value) is int else ascii(value)  # Python does not write long integers in decimal


def _parse(content: bytes) -> ast.Module | None:
    """Return the syntax tree of a source, or None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns when the file is executed
            return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _name(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


def _files(place: Path) -> Iterator[Path]:
    """Yield a file, or all files of a package except hidden files and compiled ones."""
    if not place.is_dir():
        yield place
        return
    for path in sorted(place.rglob("*")):
        parts = path.relative_to(place).parts
        if path.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in parts):
            yield path


def _modules(folder: Path) -> dict[str, Path]:
    """Return the modules and packages in a folder that can belong to a plugin, by name."""
    paths = {
        module.name: folder / (module.name if module.ispkg else f"{module.name}.py")
        for module in iter_modules([str(folder)])
    }
    taken = _LIBRARIES | sys.stdlib_module_names
    return {name: path for name, path in paths.items() if path.exists() and name not in taken}


def _imports(content: bytes, modules: Mapping[str, Path]) -> set[str]:
    """Return which of the modules a source imports; none if it is not Python."""
    names = set[str]()
    if not any(name.encode() in content for name in modules) or (tree := _parse(content)) is None:
        return names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names & modules.keys()


FOLDER = "plugins"
"""The subfolder of a run's folder with the sources of strategies that were given as classes."""
PLAIN = (int, float, str, bool, bytes, type(None))
HOOK = """

from sparsebench import hookimpl as _hookimpl


@_hookimpl
def sparsebench_strategies():
    return [{name}]
"""


def write(strategy: Strategy | type[Strategy], out: Path) -> str:
    """Write a class, and everything that it uses from its module, into a run's folder; return the value for --plugin.

    An instance stands for its class with its parameters. A strategy that comes with sparsebench needs no file.

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
    path, content = out / FOLDER / f"{cls.name}.py", text.encode()
    if not path.is_file() or path.read_bytes() != content:
        write_whole(path, content)
    return f"{path}{words}"


def _add(user: type | FunctionType, parts: dict[str, str]) -> None:
    """Add the source of a class or function to `parts`, after the source of everything that it uses."""
    text, names = _source(user)
    parts[user.__name__] = ""  # it may use its own name
    read = dict.fromkeys(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name))
    for name in read:  # including names in annotations
        if name in names and name not in parts:
            parts[name] = _line(name, names[name], user, parts)
    del parts[user.__name__]
    parts[user.__name__] = text


def _line(name: str, value: Any, user: type | FunctionType, parts: dict[str, str]) -> str:
    """Return the source that gives a name its value in the file."""
    module = getattr(value, "__module__", None)
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, type | FunctionType) and module == user.__module__:
        _add(value, parts)
        return parts.pop(value.__name__) + (f"\n\n{name} = {value.__name__}" if name != value.__name__ else "")
    if isinstance(value, PLAIN) or (isinstance(value, tuple) and all(isinstance(item, PLAIN) for item in value)):
        return f"{name} = {value!r}"
    spelled = str(getattr(value, "__name__", ""))
    if module and spelled and getattr(inspect.getmodule(value), spelled, None) is value:
        return f"from {module} import {spelled} as {name}"
    raise UserError(
        f"'{user.__name__}' uses '{name}', which cannot be stored with it", got=type(value).__name__,
        next_step="write the strategy to a file, and pass its path",
    )  # fmt: skip


def _source(user: type | FunctionType) -> tuple[str, dict[str, Any]]:
    """Return the source of a class or function, and the global names of its module."""
    for function in _functions(user):
        lines = linecache.getlines(function.__code__.co_filename)
        for node in ast.walk(ast.parse("".join(lines))) if lines else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == user.__name__:
                begin = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if begin <= function.__code__.co_firstlineno <= (node.end_lineno or 0):
                    text = "".join(lines[begin - 1 : node.end_lineno])
                    return inspect.cleandoc(f"\n{text}"), function.__globals__
    raise UserError(
        f"the source of '{user.__name__}' is unknown", next_step="write the strategy to a file, and pass its path"
    )


def _functions(user: type | FunctionType) -> Iterator[FunctionType]:
    for item in [user] if isinstance(user, FunctionType) else vars(user).values():
        item = getattr(item, "__func__", getattr(item, "fget", item))  # class methods, static methods, properties
        if isinstance(item, FunctionType):
            yield item
