"""Rooms, modules, functions and signatures stay small enough to be read in one sitting."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sparsebench"
MODULES = sorted(PACKAGE.rglob("*.py"))
ROOM, MODULE, FUNCTION, SIGNATURE = 2800, 400, 60, 12
"""The most lines of a room, of a module and of a function, and the most parameters of a function."""


def test_rooms_are_small() -> None:
    lines = Counter[str]()
    for path in MODULES:
        lines[path.relative_to(PACKAGE).parts[0]] += len(path.read_text("utf-8").splitlines())
    assert {room: n for room, n in lines.items() if n > ROOM} == {}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_modules_and_functions_are_small(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= MODULE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            assert (node.end_lineno or 0) - node.lineno < FUNCTION, node.name
            assert len([one for one in arguments if one.arg not in ("self", "cls")]) <= SIGNATURE, node.name
