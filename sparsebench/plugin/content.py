"""The files of a plugin that does not come with sparsebench: read once, hashed, and executed from what was read.

Python would take the code that lies in `__pycache__` instead, if only its time and size fit the source.
"""

from __future__ import annotations

import ast
import builtins
import errno
import hashlib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from io import BufferedReader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from sparsebench.errors import UserError
from sparsebench.records.files import content_hash

MOST_BYTES, MOST_FILES = 2**31, 10_000
"""Of a plugin."""
_LIBRARIES = {"sparsebench", "sparsebench_plugins", "sparsebench_dask", "numpy", "torch", "torchvision", "timm"}
"""What a plugin imports and does not bring, whatever lies in its folder; the standard library likewise."""


CODE = "code-"
"""What a revision begins with that is a hash of code, so that it is no number."""


@dataclass(frozen=True)
class Content:
    """The files of a plugin.

    Attributes:
        root: the folder that their names begin from.
        hashes: their SHA-256, by path.
        sources: what those of them hold that are Python, by path.
        sha256: of the file where there is one; of the names and hashes of all where there are several.
        beside: the modules and packages of a plugin file's folder that are among them, by name.
    """

    root: Path
    hashes: dict[Path, str]
    sources: dict[Path, bytes]
    sha256: str
    beside: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path) -> Content:
        """Return a plugin file and what it imports that lies in its folder, or in that of the package it is in.

        Raises:
            UserError: a file cannot be read, or they are too many.
        """
        path = path.resolve()
        root = path.parent
        while (root / "__init__.py").is_file() and root != root.parent:
            root = root.parent
        beside = _modules(root) | _modules(path.parent)
        content = cls._read(path, root, beside)
        found = {name: one for name, one in beside.items() if {one, one / "__init__.py"} & content.hashes.keys()}
        return replace(content, beside={name: one for name, one in found.items() if one != path})

    @classmethod
    def of_entry(cls, entry: metadata.EntryPoint, origin: Path) -> Content:
        """Return the package of an installed plugin, and what of its distribution that imports from beside it.

        Args:
            entry: the entry point.
            origin: the file of its module.

        Raises:
            UserError: a file cannot be read, or they are too many.
        """
        origin = origin.resolve()
        top = origin.parent if origin.name == "__init__.py" or "." in entry.module else origin
        for _ in range(entry.module.count(".")):
            if (top.parent / "__init__.py").is_file():
                top = top.parent
        beside = _modules(top.parent)
        if any(top.parent.glob("*.dist-info")):  # where all distributions are
            listed = {Path(str(file.locate())).resolve() for file in (entry.dist and entry.dist.files) or ()}
            beside = {name: one for name, one in beside.items() if {one, one / "__init__.py"} & listed}
        return cls._read(top, top.parent, beside)

    @classmethod
    def _read(cls, first: Path, root: Path, beside: Mapping[str, Path]) -> Content:
        """Read a file or a package, and of the modules beside it those that are imported."""
        hashes: dict[Path, str] = {}
        sources: dict[Path, bytes] = {}
        left, size = [first], 0
        beside = {name: path for name, path in beside.items() if path != first}
        while left:
            for path in _files(left.pop()):
                if path in hashes:
                    continue
                with _open(path) as file:
                    if path.suffix == ".py":
                        sources[path] = file.read()
                        file.seek(0)
                        left += [beside[name] for name in _imports(sources[path], beside)]
                    hashes[path] = hashlib.file_digest(file, "sha256").hexdigest()
                    size += file.tell()
                if size > MOST_BYTES or len(hashes) > MOST_FILES:
                    raise UserError(
                        f"plugin {first.name} is too large", got=f"{len(hashes)} files, {size >> 20} MiB",
                        allowed=f"{MOST_FILES} files, {MOST_BYTES >> 20} MiB",
                        next_step="put its code into a package of its own",
                    )  # fmt: skip
        if list(hashes) == [first]:
            return cls(root, hashes, sources, hashes[first])
        lines = sorted(f"{_name(path, root)}\0{sha256}\n" for path, sha256 in hashes.items())
        whole = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
        return cls(root, hashes, sources, whole)

    @cached_property
    def revision(self) -> str:
        """What tells its code from other code, on every Python the same; see `code_of`."""
        lines = sorted(
            f"{_name(path, self.root)}\0{code_of(self.sources[path]) if path in self.sources else sha256}\n"
            for path, sha256 in self.hashes.items()
        )
        about = lines[0].partition("\0")[2] if len(lines) == 1 else "".join(lines)
        return f"{CODE}{hashlib.sha256(about.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"

    def names(self) -> dict[str, Path]:
        """Return the files by their names below the root, with slashes."""
        return {_name(path, self.root): path for path in self.hashes}

    def module(self, name: str, path: Path) -> ModuleType:
        """Return a new module of one of the files, which its loader executes.

        What it imports from beside it is its own: other plugins have other modules of these names, and what is
        installed is not hidden by them.
        """
        own = {name: one for name, one in self.beside.items() if not _is_installed(name, {self.root, path.parent})}
        own_modules = None
        if own:
            own_modules = _OwnModules(f"{name}_{self.sha256[:8]}", own)
            _FINDER.own[own_modules.prefix] = own_modules
        spec = spec_from_file_location(name, path, loader=_Loader(name, path, self.sources[path], own_modules))
        assert spec is not None
        return module_from_spec(spec)

    def admit(self) -> None:
        """Have modules of these files imported from what was read, from now on in this process."""
        _FINDER.admit(self)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a plugin file, with what it imports from beside it, or "" if that cannot be read."""
    try:
        return Content.of_file(path).sha256 if path.is_file() else ""
    except UserError:
        return ""


def texts_of(path: Path, revision: str) -> tuple[str, dict[str, str]]:
    """Return the name of a plugin file, and what it and the modules that it brings hold, by their names.

    Written to those names in another folder they are the same plugin; `__init__.py` of packages that the file lies in
    are among them. There is nothing where the revision is another one by now, or one of the files is no text.
    """
    path, content = path.resolve(), Content.of_file(path)
    above = [one / "__init__.py" for one in path.parents if one.is_relative_to(content.root)]
    paths = {_name(one, content.root): one for one in (*content.hashes, *above) if one.is_file()}
    try:
        texts = {name: paths[name].read_bytes().decode() for name in sorted(paths) if name.encode()}
    except (OSError, ValueError):
        texts = {}
    return (_name(path, content.root), texts) if texts and content.revision == revision else ("", {})


def file_revision(path: Path) -> str:
    """Return the revision of a plugin file, with what it imports from beside it, or "" if that cannot be read."""
    try:
        return Content.of_file(path).revision if path.is_file() else ""
    except UserError:
        return ""


def code_of(content: bytes) -> str:
    """Return a hash of a Python source without its comments, docstrings and layout; of what is no Python its bytes'.

    It is that of a form of its own of the syntax tree, which every Python writes alike: fields by their names, without
    those that hold nothing, as newer Pythons have more of them; constants by type and in ASCII; of an f-string its
    pieces joined, as Pythons before 3.12 cut them otherwise.
    """
    tree = _parsed(content)
    if tree is None:
        return hashlib.sha256(content).hexdigest()
    said: list[str] = []
    left: list[Any] = [tree]
    while left:  # no recursion, which long expressions exhaust
        thing = left.pop()
        if isinstance(thing, _End):
            said.append(thing)
        elif isinstance(thing, ast.Constant):
            said.append(f"{type(thing.value).__name__} {_constant(thing.value)}")
        elif isinstance(thing, ast.AST):
            said.append(f"({type(thing).__name__}")
            left.append(_End(")"))
            for name, value in sorted(_fields(thing), reverse=True, key=lambda field: field[0]):
                left += [value, _End(f".{name}")]
        elif isinstance(thing, list):
            said.append("[")
            left += [_End("]"), *reversed(thing)]
        else:  # a name, a level of an import, a conversion, or a hole in a list
            said.append(_constant(thing))
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


_UNSAID = {"ctx", "type_ignores", "type_comment", "kind"}


class _End(str):
    """A mark of the canonical form, in the midst of what is left to be said."""


def _fields(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a node that hold something, but for statements that are a text, as docstrings are."""
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(node, ast.JoinedStr):
            value = _joined(node.values)
        elif isinstance(value, list):
            value = [one for one in value if not (isinstance(one, ast.Expr) and _text(one.value) is not None)]
        elif name == "format_spec" and isinstance(value, ast.JoinedStr) and not _joined(value.values):
            continue
        if name not in _UNSAID and value is not None and value != []:
            yield name, value


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _joined(pieces: Iterable[ast.expr]) -> list[ast.expr]:
    """Return the pieces of an f-string, texts that follow each other as one, and without empty ones."""
    joined: list[ast.expr] = []
    for piece in pieces:
        if joined and (before := _text(joined[-1])) is not None and (text := _text(piece)) is not None:
            joined[-1] = ast.Constant(before + text)
        else:
            joined.append(piece)
    return [piece for piece in joined if _text(piece) != ""]


def _constant(value: Any) -> str:
    return hex(value) if type(value) is int else ascii(value)  # digits of a long number Python does not write


def _parsed(content: bytes) -> ast.Module | None:
    """Return the syntax tree of a source, or None of what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is odd in it Python says when it is run
            return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _name(path: Path, root: Path) -> str:
    return Path(os.path.relpath(path, root)).as_posix()


@contextmanager
def _open(path: Path) -> Iterator[BufferedReader]:
    try:
        if path.exists() and not (path.is_file() and path.stat().st_size <= MOST_BYTES):
            raise OSError(errno.EFBIG, f"it is no file of at most {MOST_BYTES >> 20} MiB")
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"plugin file {path} cannot be read: {error.strerror}") from error


def _files(place: Path) -> Iterator[Path]:
    """Yield a file, or all files of a package but hidden ones and what Python has compiled of others."""
    if not place.is_dir():
        yield place
        return
    seen = set()
    for folder, folders, names in os.walk(place, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        paths = (Path(folder, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _modules(folder: Path) -> dict[str, Path]:
    """Return the modules and packages in a folder that a plugin may bring, by name."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    packages = {name: folder / name for name in names if (folder / name / "__init__.py").is_file()}
    files = {name[:-3]: folder / name for name in names if name.endswith(".py") and (folder / name).is_file()}
    return {name: path for name, path in (files | packages).items() if name not in _LIBRARIES | sys.stdlib_module_names}


def _imports(content: bytes, known: Mapping[str, Path]) -> list[str]:
    """Return which of the known modules a source imports; none of what is no Python."""
    if not any(name.encode() in content for name in known):
        return []
    if (tree := _parsed(content)) is None:
        return []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return sorted(names & known.keys())


def _is_installed(name: str, folders: set[Path]) -> bool:
    """Say whether there is a module of a name that lies neither in these folders nor in the working directory."""
    here = {os.path.realpath(folder) for folder in (*folders, Path.cwd())}
    places = [place for place in sys.path if place and os.path.realpath(place) not in here]
    if PathFinder.find_spec(name, places) is not None:
        return True
    for finder in sys.meta_path:  # of libraries that are installed as links, there are others
        spec = None if finder in (PathFinder, _FINDER) else finder.find_spec(name, None)
        if spec is not None and spec.origin:
            file = Path(spec.origin)
            folder = file.parent.parent if spec.submodule_search_locations else file.parent
            if os.path.realpath(folder) not in here:
                return True
    return False


class _OwnModules:
    """The modules that a plugin file imports from beside it, under private names that begin with a prefix."""

    def __init__(self, prefix: str, places: Mapping[str, Path]):
        self.prefix, self.places = prefix, places
        self.builtins = {**vars(builtins), "__import__": self._import}

    def _import(
        self, name: str, globals: Any = None, locals: Any = None, fromlist: Sequence[str] | None = (), level: int = 0
    ) -> Any:
        """Do what `import` does in these modules; see `builtins.__import__`."""
        first = name.partition(".")[0]
        if level or first not in self.places:
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        if self.prefix not in sys.modules:
            parent = ModuleType(self.prefix)
            parent.__path__ = []
            sys.modules[self.prefix] = parent
        full = f"{self.prefix}.{name}"
        import_module(full)
        return builtins.__import__(full, None, None, fromlist) if fromlist else sys.modules[f"{self.prefix}.{first}"]

    def file_of(self, name: str) -> tuple[Path, bool]:
        """Return where a module lies, by its name below the prefix, and whether it is a package."""
        first, *rest = name.split(".")
        place = self.places[first].joinpath(*rest)
        if place.is_dir():
            return place / "__init__.py", True
        return (place.with_name(f"{place.name}.py") if rest else place), False


class _Loader(SourceFileLoader):
    """Compiles what was read; neither reads nor writes compiled code."""

    def __init__(self, name: str, path: Path, content: bytes, own: _OwnModules | None = None):
        super().__init__(name, os.fspath(path))
        self.content, self.own = content, own

    def exec_module(self, module: ModuleType) -> None:
        """Execute what was read; where it has modules of its own, with an `import` that finds them."""
        if self.own is not None:
            vars(module)["__builtins__"] = self.own.builtins
        super().exec_module(module)

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of what was read."""
        return self.source_to_code(self.content, self.path)

    def get_data(self, path: str | bytes) -> bytes:
        """Return what was read, or another file of the package."""
        return self.content if path == self.path else super().get_data(os.fsdecode(path))


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do, and has those of plugins executed from what was read."""

    def __init__(self) -> None:
        self.hashes: dict[Path, str] = {}
        self.sources: dict[Path, bytes] = {}
        self.loaded: dict[str, Path] = {}
        self.own: dict[str, _OwnModules] = {}

    def admit(self, content: Content) -> None:
        """Take the files of a plugin; modules that were loaded from other contents of them are forgotten."""
        if any(self.hashes.get(path, sha256) != sha256 for path, sha256 in content.hashes.items()):
            for name in [name for name, path in self.loaded.items() if path in content.hashes]:
                del self.loaded[name]
                sys.modules.pop(name, None)
        self.hashes |= content.hashes
        self.sources |= content.sources
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what another finder finds, with a loader that executes what was read."""
        prefix, _, rest = fullname.partition(".")
        if rest and prefix in self.own:
            file, is_package = self.own[prefix].file_of(rest)
            if file not in self.sources:
                return None
            loader = _Loader(fullname, file, self.sources[file], self.own[prefix])
            places = [os.fspath(file.parent)] if is_package else None
            return spec_from_file_location(fullname, file, loader=loader, submodule_search_locations=places)
        finders = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or not spec.has_location or not spec.origin:
            return spec
        origin = Path(os.path.realpath(os.path.dirname(spec.origin)), os.path.basename(spec.origin))
        if origin in self.sources and isinstance(spec.loader, SourceFileLoader):
            spec.loader, spec.cached = _Loader(fullname, origin, self.sources[origin]), None
            self.loaded[fullname] = origin
        elif self.hashes.get(origin, "") not in ("", content_hash(origin)):  # a library, whose bytes the system reads
            raise ImportError(f"{origin.name} changed since it was hashed", name=fullname)
        return spec


_FINDER = _Finder()
