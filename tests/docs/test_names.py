"""Names are nouns of the field or the trade: variables are no pronouns, and functions no past participles."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRONOUNS = {"found", "own", "there", "mine", "told", "some"}
IRREGULAR = {
    "asked", "bound", "built", "chosen", "drawn", "foreseen", "found", "given", "grown", "held", "here", "hidden",
    "kept", "known", "left", "made", "mine", "others", "own", "said", "seen", "sent", "shown", "some", "taken", "there",
    "told", "written",
}  # fmt: skip
NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed"}
EXEMPT = {"sparsebench/view.py": {"there"}, "sparsebench/deploy/sparse_model.py": {"kept"}}
"""`TokenView.there` is part of the interface that strategies are written to, `SparseModel.kept` of users'."""
FILES = sorted((ROOT / "sparsebench").rglob("*.py"))
STRATEGIES = sorted((ROOT / "plugins").rglob("*.py"))
FORMER = {"a_vit": 3, "diffrate_search": 1, "dynamic_vit": 2, "k_medoids": 1, "mctf": 1}
"""Shipped strategies with such variables, and how many: published records hold the hashes of these files."""


def variables(tree: ast.AST) -> Iterator[str]:
    """Yield what is bound in a file: variables and parameters, fields of classes left out."""
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and node.simple}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id


def is_participle(name: str) -> bool:
    """Say whether a function is called by a past participle alone, or by a pronoun."""
    word = name.strip("_")
    return word in IRREGULAR or (word.endswith("ed") and "_" not in word and word not in NO_PARTICIPLES)


def refused(tree: ast.AST) -> list[str]:
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [name for name in variables(tree) if name in PRONOUNS] + [name for name in functions if is_participle(name)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_names_are_nouns_and_verbs(file):
    exempt = EXEMPT.get(str(file.relative_to(ROOT)), set())
    assert set(refused(ast.parse(file.read_text()))) <= exempt


def test_shipped_strategies_get_no_more_of_them():
    counts = {file.stem: len(set(refused(ast.parse(file.read_text())))) for file in STRATEGIES}
    assert {name: count for name, count in counts.items() if count > FORMER.get(name, 0)} == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("found = 1", ["found"]),
        ("def f(own): pass", ["own"]),
        ("def _counted(): pass", ["_counted"]),
        ("def kept(): pass", ["kept"]),
        ("[some for some in ()]", ["some"]),
        ("class A:\n    own: float = 0.0", []),
        ("def seed(): pass", []),
        ("def kept_accuracy(): pass\ndef read(): pass", []),
    ],
)
def test_the_rule(code, names):
    assert refused(ast.parse(code)) == names
