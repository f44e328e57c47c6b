"""Python source as a syntax tree: its hash, what it imports, and which definitions a class needs."""

from __future__ import annotations

import ast
import builtins
import copy
import hashlib
import symtable
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from sparsebench.errors import UserError
from sparsebench.plugin.hooks import PROJECT

STAR = "*"
"""Stands for the names of `from module import *`, which are unknown."""


def code_of(content: bytes) -> str:
    """Return a hash of Python source that ignores comments, docstrings and layout; of anything else, of its bytes.

    The hash is that of a canonical form of the syntax tree, which is the same with every version of Python. Fields are
    ordered by name; empty fields are left out, because newer versions have more of them. Constants are written with
    their type, in ASCII. Pieces of an f-string are joined, because Python before 3.12 splits them in other places.
    """
    tree = parse(content)
    return hashlib.sha256(content if tree is None else canonical(tree).encode()).hexdigest()


def canonical(tree: ast.AST) -> str:
    """Return the canonical form of a syntax tree, see `code_of`."""
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
    return "\n".join(tokens)


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


def _text(node: ast.AST) -> str | None:
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


def parse(content: bytes) -> ast.Module | None:
    """Return the syntax tree of a source, or None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns when the file is executed
            return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def absolute(tree: ast.Module, package: str) -> ast.Module:
    """Write each relative import of a module in a package as an absolute one, in place; return the tree.

    An import that goes beyond the top of the package stays, so that Python reports it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
            if above:
                node.module = ".".join([*above, *([node.module] if node.module else [])])
                node.level = 0
    return tree


def imported(tree: ast.AST) -> set[str]:
    """Return the names of the modules that a tree imports anywhere, except for type checkers and relative to itself.

    Calls of `import_module` and `__import__` count if the name is written there.
    """
    names = set[str]()
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__") and node.args:
            names |= {name for name in (_text(node.args[0]),) if name and not name.startswith(".")}
    return names


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a tree without those that only type checkers read."""
    pending = [tree]
    while pending:
        node = pending.pop()
        yield node
        pending += getattr(node, "orelse", ()) if _is_for_type_checkers(node) else ast.iter_child_nodes(node)


def _name(node: ast.expr) -> str:
    """Return the name of a variable or an attribute, or "" for another expression."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"


def _is_for_scripts(node: ast.AST) -> bool:
    """Return whether a statement is `if __name__ == "__main__"`, without else."""
    test = node.test if isinstance(node, ast.If) and not node.orelse else None
    return isinstance(test, ast.Compare) and ast.unparse(test) == "__name__ == '__main__'"


def is_hook(node: ast.AST) -> bool:
    """Return whether a statement is the function of a hook, such as `sparsebench_strategies`."""
    return isinstance(node, ast.FunctionDef) and node.name.startswith(f"{PROJECT}_")


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module that can matter to its classes; each import has one name.

    Left out are texts such as docstrings, imports from `__future__`, and what only type checkers or scripts execute.
    """
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            if not (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
                for alias in node.names:
                    one = copy.copy(node)
                    one.names = [alias]
                    yield one
        elif _is_for_type_checkers(node):
            yield from statements(ast.Module(node.orelse, []))  # type: ignore[attr-defined]
        elif not (isinstance(node, ast.Pass) or _is_for_scripts(node) or _is_text(node)):
            yield node


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and _text(node.value) is not None


def bound(node: ast.stmt) -> set[str] | None:
    """Return the names that a statement defines, or None if it may do something else too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        leaves: list[ast.expr] = []
        for target in targets:
            leaves += target.elts if isinstance(target, ast.Tuple) else [target]
        return {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)} if _are_names(leaves) else None
    if isinstance(node, ast.Pass):
        return set()
    if isinstance(node, ast.If | ast.Try):  # such as an import of what may be missing
        handlers = [part for handler in getattr(node, "handlers", ()) for part in handler.body]
        parts = [bound(part) for part in (*node.body, *handlers, *node.orelse, *getattr(node, "finalbody", ()))]
        names = [part for part in parts if part is not None]
        return set[str]().union(*names) if len(names) == len(parts) else None
    return None


def _are_names(leaves: Iterable[ast.expr]) -> bool:
    return all(isinstance(leaf, ast.Name) for leaf in leaves)


class _Bare(ast.NodeTransformer):
    """Removes annotations, and collects the names in those of variables, which may declare a parameter."""

    def __init__(self) -> None:
        self.names = set[str]()

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: Any) -> Any:
        node.returns = None
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: Any) -> Any:
        return self.visit_FunctionDef(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        pending: list[ast.AST] = [node.annotation]
        while pending:
            part = pending.pop()
            if isinstance(part, ast.Name):
                self.names.add(part.id)
            text = _text(part)
            inner = None if text is None else parse(text.encode())  # an annotation in quotes
            pending += [*ast.iter_child_nodes(part), *([inner] if inner is not None else [])]
        return ast.Assign(
            [node.target], self.visit(node.value) if node.value else ast.Constant(None), lineno=node.lineno
        )


def uses(node: ast.stmt) -> set[str]:
    """Return the global names that a statement uses, except those that only annotations of functions have.

    Raises:
        ValueError, RecursionError: the statement is too long to be read.
    """
    bare = _Bare()
    text = ast.unparse(ast.fix_missing_locations(bare.visit(copy.deepcopy(node))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top = symtable.symtable(text, "source", "exec")
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    pending = top.get_children()
    while pending:
        table = pending.pop()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        pending += table.get_children()
    return names | bare.names


def needed(tree: ast.Module, modules: Collection[str]) -> list[ast.stmt] | None:
    """Return the statements that the classes of the hooks need, in any order.

    None if this cannot be told: a hook does more than return classes, a name has several definitions, or a statement
    that they do not need does more than define a name, and may thus change what they do.

    Args:
        tree: the syntax tree of a plugin file.
        modules: the modules that belong to the plugin. Their imports count in any case, because they execute them.
    """
    nodes = [node for node in statements(tree) if not is_hook(node)]
    classes = [_returned(node) for node in tree.body if is_hook(node)]
    definitions = _definitions(nodes)
    if definitions is None or None in classes:
        return None
    included = [node for node in nodes if _belongs(node, modules)]
    pending = [name for names in classes for name in names or ()]
    seen = set[str]()
    while pending:
        name = pending.pop()
        if name in seen or (name not in definitions and hasattr(builtins, name)):
            continue
        seen.add(name)
        for node in definitions.get(name) or definitions.get(STAR) or []:
            included.append(node)
            try:
                pending += uses(node)
            except (ValueError, RecursionError):
                return None
    others = [node for node in nodes if all(node is not one for one in included)]
    return None if any(map(_calls, others)) else included


def _definitions(nodes: Iterable[ast.stmt]) -> dict[str, list[ast.stmt]] | None:
    """Return statements by the names that they define; None if one does something else, or a name has several."""
    found = defaultdict[str, list[ast.stmt]](list)
    for node in nodes:
        names = bound(node)
        if names is None:
            return None
        for name in names:
            found[name].append(node)
    clear = all(len(several) == 1 or _stand_together(name, several) for name, several in found.items())
    return found if clear else None


def _calls(statement: ast.stmt) -> bool:
    """Return whether a statement that defines names calls something when it is executed."""
    pending: list[ast.AST | None] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call | ast.Await):
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.decorator_list:
            return True
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):  # its body is not executed
            pending += [*node.args.defaults, *node.args.kw_defaults]
        elif node is not None:
            pending += ast.iter_child_nodes(node)
    return False


def _belongs(node: ast.stmt, modules: Collection[str]) -> bool:
    """Return whether a statement imports one of the modules, or what is in it."""
    imports = isinstance(node, ast.Import | ast.ImportFrom)
    return imports and any(name.partition(".")[0] in modules for name in imported(node))


def _stand_together(name: str, several: Sequence[ast.stmt]) -> bool:
    """Return whether statements that define the same name do not replace each other: `import a.b` and `import a.c`."""
    plain = all(isinstance(node, ast.Import) and not node.names[0].asname for node in several)
    return plain or name == STAR


def _returned(hook: ast.stmt) -> list[str] | None:
    """Return the names of the classes that a hook returns, or None if it does anything else."""
    body = [node for node in getattr(hook, "body", ()) if not _is_text(node)]
    value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
    items = value.elts if isinstance(value, ast.List | ast.Tuple) else []
    return [item.id for item in items if isinstance(item, ast.Name)] if items and _are_names(items) else None


def code_of_classes(tree: ast.Module, modules: Collection[str]) -> str | None:
    """Return a hash of what the classes of a plugin file need from it, or None if it cannot be told, see `needed`.

    It is the same for the whole file and for the class alone, wherever it was written.
    """
    if (nodes := needed(tree, modules)) is None:
        return None
    return hashlib.sha256("\n".join(sorted({canonical(node) for node in nodes})).encode()).hexdigest()


def is_constant(node: ast.expr | None) -> bool:
    """Return whether an expression has only constants, such as `-1`, `2 / 3` or `[1, "a"]`."""
    allowed = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.Load)
    parts = [] if node is None else list(ast.walk(node))
    return bool(parts) and all(isinstance(part, allowed) for part in parts)


def constant(node: ast.expr | None) -> Any:
    """Return the value of an expression of constants; None if it has none."""
    assert node is not None and is_constant(node)
    with suppress(ArithmeticError, TypeError, ValueError, MemoryError):
        return eval(compile(ast.Expression(node), "constant", "eval"), {"__builtins__": {}})
    return None


READS = ("open", "read", "load", "imread", "glob", "iterdir", "listdir", "from_file", "fromfile", "genfromtxt")
"""Beginnings of names of functions that read files."""


def named_files(tree: ast.Module, folder: Path, name: str) -> dict[str, Path]:
    """Return the files beside a module, other than Python files, that are named in its source, by their names.

    Raises:
        UserError: it reads files beside it whose names are not in its source.
    """
    nodes = [part for node in statements(tree) if not is_hook(node) for part in _walk(node)]
    texts = {_text(node) or "" for node in nodes if isinstance(node, ast.expr)}
    places = ["", *(f"{text}/" for text in texts if _kind(folder, text) == "folder")]
    names = {f"{place}{text}" for place in places for text in texts if _kind(folder, f"{place}{text}") == "file"}
    files = {PurePosixPath(text).as_posix(): folder / text for text in sorted(names) if not text.endswith(".py")}
    reads = any(isinstance(node, ast.Call) and _name(node.func).startswith(READS) for node in nodes)
    if not files and reads and any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes):
        raise UserError(
            f"{name} reads a file beside it, by __file__, and its source does not have the name of the file",
            next_step="write the name there, or put the module and its data into a package; they are stored together",
        )
    return files


def _kind(folder: Path, text: str) -> str:
    """Return "file" or "folder" for the name of one in a folder, or ""."""
    if not text or text.startswith(("/", ".")) or ".." in text:
        return ""
    path = folder / text
    try:
        if path.is_file():
            return "file"
        return "folder" if path.is_dir() else ""
    except (OSError, ValueError):
        return ""
