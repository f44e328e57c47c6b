"""Print how heavy the code of sparsebench/ is: python .ci/readability.py [FOLDER].

The figures are for orientation. Nothing is enforced: a function with one subject is not cut for a figure.
"""

from __future__ import annotations

import ast
import statistics
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = 400
"""Syntax nodes above which a function is listed."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def weight(tree: ast.AST) -> int:
    """Return the number of syntax nodes."""
    return sum(1 for _ in ast.walk(tree))


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that belong to docstrings, also those of attributes."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def code_lines(path: Path, tree: ast.AST) -> int:
    """Return the number of lines with code: without blank lines, comments and docstrings."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in skipped:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(tree))


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield all functions and methods."""
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements, those inside others too."""
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.stmt))


def main(folder: Path) -> None:
    """Print the figures of a folder."""
    heavy: list[tuple[int, str]] = []
    of_functions: list[int] = []
    of_statements: list[int] = []
    nodes = lines = unformatted = 0
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        nodes += weight(tree)
        lines += code_lines(path, tree)
        unformatted += text.count("# fmt: skip") + text.count("# fmt: off")
        of_statements += [weight(statement) for statement in statements(tree)]
        for function in functions(tree):
            of_functions.append(weight(function))
            if of_functions[-1] > HEAVY:
                heavy.append((of_functions[-1], f"{path.relative_to(folder.parent)}:{function.lineno} {function.name}"))
    print(f"{lines:,} lines of code, {nodes / lines:.1f} nodes a line; formatter off in {unformatted} places")
    print(f"functions: mean {statistics.mean(of_functions):.0f} nodes, median {statistics.median(of_functions):.0f}")
    print(f"statements: median {statistics.median(of_statements):.0f} nodes")
    print(f"functions of over {HEAVY} nodes: {len(heavy)}")
    for size, place in sorted(heavy, reverse=True):
        print(f"  {size}  {place}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "sparsebench")
