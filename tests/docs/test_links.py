"""Links, tables and examples of README.md, docs/ and docstrings, and that benchmarks can be imported."""

import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
import sys
import tomllib

import pytest
from pages import FENCED, PAGES, ROOT, text_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def plain(page: str) -> str:
    """Return a page without code blocks and inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCED.sub("", text_of(page)))


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_resolves(page: str) -> None:
    for link in LINK.findall(plain(page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.is_file(), link
        target = target.resolve().relative_to(ROOT)
        if page != "README.md":
            assert target.parts[0] == "docs", f"{link} leaves the site"
        if anchor:
            assert anchor in anchors(str(target)), link


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == sorted(p[len("docs/") :] for p in PAGES[1:])


def test_the_readme_is_a_page() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1500


def test_the_rooms_are_those_of_the_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    layers = [[name.strip().removeprefix("sparsebench.") for name in layer.split("|")] for layer in contract["layers"]]
    rows = re.findall(r"^\| (`.*?) \|", text_of("docs/inside/rooms.md"), re.MULTILINE)
    assert [re.findall(r"`(\w+)`", row) for row in rows] == layers


@pytest.mark.parametrize("page", ["docs/inside/walks.md", "docs/inside/rooms.md"])
def test_named_files_exist(page: str) -> None:
    names = re.findall(r"`([\w/]+\.py)`", text_of(page))
    assert [name for name in names if not (ROOT / "sparsebench" / name).is_file()] == []


def test_every_column_of_the_board_is_described() -> None:
    from sparsebench.board.columns import ALL_COLUMNS

    first = re.findall(r"^\| (`.*?) \|", text_of("docs/reference/columns.md"), re.MULTILINE)
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert {column.key for column in ALL_COLUMNS} <= named


def test_every_shipped_strategy_is_in_the_table() -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sparsebench"]
    text = text_of("docs/reference/strategies.md")
    assert [name for name, module in entries.items() if "plugins" in module and f"`{name}`" not in text] == []


def test_every_documented_object_exists_and_is_listed() -> None:
    """Every object whose docstring a page shows exists and is listed with its first line."""
    names = re.findall(r"^::: (\S+)$", text_of("docs/reference/python.md"), re.MULTILINE)
    assert len(names) > 20
    rows = dict(re.findall(r"^\| `(\S+)` \| (.+) \|$", text_of("docs/reference/python.md"), re.MULTILINE))
    places = {name: ":".join(name.rsplit(".", 1)) for name in names}
    found = {name: pkgutil.resolve_name(place) for name, place in places.items()}
    assert rows == {name: (inspect.getdoc(value) or "").partition("\n")[0] for name, value in found.items()}


BENCHMARKS = ROOT / "benchmarks"


@pytest.mark.parametrize("program", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_imported(program, monkeypatch):
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(program), run_name="benchmark")
    siblings = {path.stem for path in BENCHMARKS.glob("*.py")}
    for name in (set(sys.modules) - modules) & siblings:
        del sys.modules[name]


MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "sparsebench").rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_a_module(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module))
    assert tried and not failed
