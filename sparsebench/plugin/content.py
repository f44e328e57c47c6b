"""The content of a plugin: its file and the modules of its author that it imports, their hash, and their execution."""

from __future__ import annotations

import ast
import base64
import builtins
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module, invalidate_caches
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from sparsebench.errors import UserError
from sparsebench.files import with_lf
from sparsebench.plugin.source import absolute, code_of, code_of_classes, imported, named_files, parse

LIBRARIES = frozenset(
    {
        "sparsebench",
        "sparsebench_plugins",
        "sparsebench_theory",
        "sparsebench_dask",
        "numpy",
        "torch",
        "torchvision",
        "timm",
    }
)
"""Modules that never belong to a plugin, whatever files its folder has. Those of the standard library do not either."""
CODE = "code-"
"""The prefix of revisions that are hashes of code, which tells them from numbers."""
MOST = 10 * 2**20
"""The largest number of bytes of all files of a plugin; they are stored with its results."""


@dataclass(frozen=True)
class Place:
    """Where a module or package of the author is.

    Attributes:
        paths: the file of the module, or the folder of the package; several folders for a namespace package.
        whole: whether the package has `__init__.py`. It then counts with all files in its folder, data too; without,
            it counts with its Python files.
    """

    paths: tuple[Path, ...]
    whole: bool = True


Find = Callable[[str], Place | None]
"""Returns the place of a module of the author, by its name without dots; None for all other modules."""


@dataclass(frozen=True)
class Content:
    """A plugin file, with everything of its author that it imports, directly or indirectly.

    Attributes:
        path: the plugin file.
        source: its content.
        package: the package that the file is in, if it imports from this package; else "".
        files: the other files, by the names under which they can be imported or read from one folder.
        contents: their contents, by the same names.
        imports: names of the modules and packages of the author, without dots.
        folders: the folder of the plugin file, and that of the package that contains it.
    """

    path: Path
    source: bytes
    package: str
    files: dict[str, Path]
    contents: dict[str, bytes]
    imports: frozenset[str]
    folders: tuple[Path, ...]

    @classmethod
    def of_file(cls, path: Path, *, alone: bool = False) -> Content:
        """Read a plugin file and the files of its author that it imports.

        Args:
            path: the file.
            alone: whether all these files are in its folder, as in a submission.

        Raises:
            UserError: a file cannot be read, or cannot be stored with the results.
        """
        path = path.resolve()
        root = path.parent
        while (root / "__init__.py").is_file() and root != root.parent:
            root = root.parent
        folders = tuple(dict.fromkeys((path.parent, root)))

        def find(name: str) -> Place | None:
            if name in sys.stdlib_module_names:
                return None
            place = place_of(_spec(name, folders), folders)
            beside = place is not None and all(_is_in(part, folders) for part in place.paths)
            return place if beside or not alone else None

        invalidate_caches()
        package = ".".join(path.parent.relative_to(root).parts)
        return cls.of_source(path, _read(path), find, package=package, folders=folders)

    @classmethod
    def of_source(
        cls,
        path: Path,
        source: bytes,
        find: Find,
        *,
        package: str = "",
        folders: tuple[Path, ...] = (),
        beside: Path | None = None,
    ) -> Content:
        """Read the files of the author that a source imports, where `find` says that they are.

        Args:
            path: the plugin file, which need not exist.
            source: its content.
            find: finds modules.
            package: the package that the file is in.
            folders: see `Content`.
            beside: the folder of the data files that the source names; that of `path` if None.

        Raises:
            UserError: a file cannot be read, or cannot be stored with the results.
        """
        tree = parse(source)
        pending = set[str]() if tree is None else _tops(absolute(tree, package))
        files: dict[str, Path] = {}
        imports: set[str] = set()
        done: set[str] = set()
        if tree is not None and package.partition(".")[0] not in pending:
            files = named_files(tree, beside or path.parent, path.name)
        while pending:
            name = pending.pop()
            done.add(name)
            place = None if name in LIBRARIES else find(name)
            if place is None:
                continue
            imports.add(name)
            for known, file in _files(place):
                files[known] = file
                module = parse(_read(file)) if file.suffix == ".py" else None
                if module is not None:
                    pending |= _tops(module) - done
                    if "/" not in known:  # a package has all its files anyway
                        files |= named_files(module, file.parent, file.name)
        _check_size(files, path.name)
        contents = {name: _read(file) for name, file in files.items()}
        package = package if package.partition(".")[0] in imports else ""
        return cls(path, source, package, files, contents, frozenset(imports), folders)

    @cached_property
    def tree(self) -> ast.Module | None:
        """The syntax tree of the plugin file, with absolute imports; None if it is not Python."""
        tree = parse(self.source)
        return None if tree is None else absolute(tree, self.package)

    @property
    def paths(self) -> set[Path]:
        """All files."""
        return {self.path, *self.files.values()}

    @property
    def name(self) -> str:
        """The name of the plugin file; with its package, if it imports from this package."""
        return "/".join([*filter(None, self.package.split(".")), self.path.name])

    @property
    def revision(self) -> str:
        """The hash of the code, the same with every version of Python, and for a file and for its class alone."""
        code = None if self.tree is None else code_of_classes(self.tree, self.imports)
        code = code or code_of(self.source)
        lines = sorted(f"{name}\0{_hash(name, content)}\n" for name, content in self.contents.items())
        about = "".join([f"\0{code}\n", *lines]) if lines else code
        return f"{CODE}{hashlib.sha256(about.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"

    def execute(self, module: ModuleType) -> None:
        """Execute the file, as it was read, in a module; its other files are imported from its folder.

        The file gets its own modules, also if it imports them later. Other modules with the same names are restored
        after each import.

        Raises:
            UserError: it imports a module of its author that its source does not show, so that its hash lacks it.
        """
        code = compile(self.tree or self.source, self.path, "exec")
        before = set(sys.modules)
        if not self.imports:
            exec(code, vars(module))
            self._check_modules(before)
            return
        folders = [str(folder) for folder in self.folders]
        files = set(map(str, self.paths))
        modules: dict[str, ModuleType] = {}

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
        self._check_modules(before)

    def _check_modules(self, before: Collection[str]) -> None:
        """Raise UserError if a module of the author was imported that is not in `files`."""
        known = {*LIBRARIES, *self.imports, "__mp_main__"}
        for name, module in list(sys.modules.items()):
            if name in before:
                continue
            file = getattr(module, "__dict__", {}).get("__file__")  # getattr would import modules that are lazy
            top = name.partition(".")[0]
            if file is None or top in known:
                continue
            if not Path(file).is_file() or is_installed(Path(file)) or Path(file) in self.paths:
                continue
            if top in sys.stdlib_module_names:
                raise has_name_of_python(top, file)
            raise UserError(
                f"it imports module '{name}' in a way that its source does not show, so its revision lacks it",
                got=file,
                next_step=f"move it beside the file, and write import {name}",
            )


def has_name_of_python(name: str, file: str) -> UserError:
    """Return the error for a module of the author that has the name of one of the standard library."""
    return UserError(f"module '{name}' has the name of a module of Python", got=file, next_step="rename it")


def _take_modules(names: Collection[str]) -> dict[str, ModuleType]:
    """Remove modules with these names, and their submodules, from `sys.modules`; return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}


def texts_of(path: Path, revision: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the name of a plugin file; by name, the texts of it and of its other files; and those in base64 that are
    no text.

    Written under these names to another folder, they are the same plugin. Returns ("", {}, {}) if the revision has
    changed, or a name is not UTF-8.
    """
    content = Content.of_file(path)
    files = {content.name: content.source, **content.contents}
    if content.revision != revision or not all(_is_utf8(name.encode(errors="surrogateescape")) for name in files):
        return "", {}, {}
    texts = {name: value.decode() for name, value in sorted(files.items()) if _is_utf8(value)}
    data = {name: base64.b64encode(value).decode() for name, value in sorted(files.items()) if not _is_utf8(value)}
    return content.name, texts, data


def file_revision(path: Path, *, alone: bool = False) -> str:
    """Return the revision of a plugin file, see `Content.of_file`, or "" if its files cannot be read."""
    try:
        return Content.of_file(path, alone=alone).revision if path.is_file() else ""
    except UserError:
        return ""


def find_module(name: str) -> Place | None:
    """Return the place of a module of the author on Python's path, see `place_of`."""
    return place_of(_spec(name))


def _spec(name: str, folders: Collection[Path] = ()) -> ModuleSpec | None:
    """Find a module, without importing it, in folders and then on Python's path."""
    with _first_on_path(folders), suppress(ImportError, ValueError):
        specs = (finder.find_spec(name, None) for finder in sys.meta_path)
        return next((spec for spec in specs if spec is not None), None)
    return None


@contextmanager
def _first_on_path(folders: Collection[Path]) -> Iterator[None]:
    """Put folders first on Python's path."""
    names = [str(folder) for folder in folders]
    sys.path[:0] = names
    try:
        yield
    finally:
        for name in names:
            sys.path.remove(name)


def place_of(spec: ModuleSpec | None, folders: Collection[Path] = ()) -> Place | None:
    """Return the place of a module of the author; None if there is none, or it is installed.

    Args:
        spec: what Python's finders say about the module.
        folders: the author's, even if they hold installed distributions too.

    Raises:
        UserError: it has no source.
    """
    parts = [] if spec is None else [Path(part) for part in spec.submodule_search_locations or ()]
    origin = Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None
    paths = [origin] if origin is not None else parts
    paths = [path for path in paths if not is_installed(path, folders)]
    if spec is None or not paths:
        return None
    if origin is not None and origin.suffix != ".py":
        raise _no_source(spec.name, origin)
    return Place(tuple(parts[:1] if origin is not None and parts else paths), whole=origin is not None)


def _no_source(name: str, path: Path) -> UserError:
    return UserError(
        f"module '{name}' cannot be stored with the results: it is compiled, and its source is unknown",
        got=str(path),
        next_step="install it as a package",
    )


def is_installed(path: Path, folders: Collection[Path] = ()) -> bool:
    """Return whether a module belongs to the standard library or to an installed distribution.

    Args:
        path: its file, or the folder of its package.
        folders: the author's, even if they hold installed distributions too.
    """
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return True
    if any(path.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")):
        return True
    above = path.parent.parent if path.name == "__init__.py" else path.parent
    return not _is_in(path, folders) and any(above.glob("*.dist-info"))


def _is_in(path: Path, folders: Collection[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def _tops(tree: ast.AST) -> set[str]:
    """Return the names of the modules that a tree imports, without what follows a dot."""
    return {name.partition(".")[0] for name in imported(tree)}


def _files(place: Place) -> Iterator[tuple[str, Path]]:
    """Yield the files of a module or package, with their names, without hidden files and compiled Python.

    Raises:
        UserError: a module of the package has no source.
    """
    pending = [(path.name, path) for path in place.paths]
    while pending:
        name, path = pending.pop()
        if path.is_dir():
            inside = [part for part in sorted(path.iterdir()) if part.name[0] != "." and part.name != "__pycache__"]
            pending += [(f"{name}/{part.name}", part) for part in inside]
        elif path.name.endswith(tuple(EXTENSION_SUFFIXES)):
            raise _no_source(name, path)
        elif path.is_file() and (place.whole or path.suffix == ".py"):
            yield name, path


def _check_size(files: dict[str, Path], name: str) -> None:
    """Raise UserError if the files of a plugin are too large to be stored with each of its revisions."""
    try:
        sizes = {path: path.stat().st_size for path in files.values()}
    except OSError as error:
        raise UserError(f"plugin file {name}: {error.filename} cannot be read: {error.strerror}") from error
    if sum(sizes.values()) > MOST:
        raise UserError(
            f"the files that {name} imports or names are too large to be stored with its results",
            got=f"{sum(sizes.values()) / 2**20:.0f} MiB, the largest is {max(sizes, key=sizes.__getitem__)}",
            allowed=f"{MOST // 2**20} MiB",
            next_step="pass the path of large data as a parameter",
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"plugin file {path} cannot be read: {error.strerror}") from error


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except ValueError:
        return False
    return True


def _hash(name: str, content: bytes) -> str:
    return code_of(content) if name.endswith(".py") else hashlib.sha256(with_lf(content)).hexdigest()
