"""The notebooks of docs/ run from top to bottom, and show the described tables and pictures."""

import ast
from pathlib import Path
from typing import Any

import matplotlib.figure
import pandas as pd
import pytest
from pages import ROOT, code, text_of

NOTEBOOKS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs" / "notebooks").glob("*.md"))


def cells(page: str, names: dict[str, Any]) -> list[Any]:
    """Run the blocks of a page as cells of a notebook; return for each the value of its last expression, or None."""
    values = []
    for block in code(page):
        *statements, last = ast.parse(block).body
        is_value = isinstance(last, ast.Expr)
        exec(compile(ast.Module([*statements, *([] if is_value else [last])], []), page, "exec"), names)
        values.append(eval(compile(ast.Expression(last.value), page, "eval"), names) if is_value else None)
    return values


MARKED = [pytest.param(page, marks=[pytest.mark.theory] * ("theory:" in text_of(page))) for page in NOTEBOOKS]
"""The notebooks; those that run a theory task are marked."""


@pytest.mark.slow
@pytest.mark.parametrize("page", MARKED)
def test_a_notebook_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = cells(page, {})
    tables = [value for value in values if isinstance(value, pd.DataFrame)]
    assert tables and all("<table" in table._repr_html_() for table in tables)
    strategy = {"first-run": "attn_topk", "own-strategy": "outlying", "records": "attn_topk"}[Path(page).stem]
    assert any(strategy in table._repr_html_() for table in tables)
    if Path(page).stem == "records":
        assert any(isinstance(value, matplotlib.figure.Figure) for value in values)
        assert Path("curves.png").stat().st_size > 5_000
    if Path(page).stem == "own-strategy":
        (picture,) = (value._repr_png_() for value in values if hasattr(value, "_repr_png_"))
        assert picture.startswith(b"\x89PNG") and len(picture) > 5_000
        assert "outlying" in next(value for value in values if isinstance(value, list))


def test_the_site_names_every_notebook() -> None:
    site = text_of("mkdocs.yml")
    assert NOTEBOOKS and all(page.removeprefix("docs/") in site for page in NOTEBOOKS)
