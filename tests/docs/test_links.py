import importlib
import re
import tomllib

import pytest
from pages import FENCED, PAGES, ROOT, text_of

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def plain(page: str) -> str:
    """Return a page without its blocks of code and its code in lines."""
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
def test_the_files_that_are_named_are_there(page: str) -> None:
    names = re.findall(r"`([\w/]+\.py)`", text_of(page))
    assert [name for name in names if not (ROOT / "sparsebench" / name).is_file()] == []


def test_every_column_of_the_board_is_described() -> None:
    from sparsebench.board.columns import EVERY

    first = re.findall(r"^\| (`.*?) \|", text_of("docs/reference/columns.md"), re.MULTILINE)
    named = {name for cell in first for name in re.findall(r"`(\w+)`", cell)}
    assert {column.key for column in EVERY} <= named


def test_every_shipped_strategy_is_in_the_table() -> None:
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sparsebench"]
    text = text_of("docs/reference/strategies.md")
    assert [name for name, module in entries.items() if "plugins" in module and f"`{name}`" not in text] == []


def test_everything_whose_docstring_a_page_shows_is_there() -> None:
    names = re.findall(r"^::: (\S+)$", text_of("docs/reference/python.md"), re.MULTILINE)
    assert len(names) > 20
    for module, _, name in (each.rpartition(".") for each in names):
        assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
