import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from test_published import write_board

from sparsebench.board import documents
from sparsebench.cli import main
from sparsebench.page import published

ROOT = Path(__file__).resolve().parents[2]
PAGE = "above\n<!-- one board -->\nold\n<!-- end of one board -->\nbetween\n<!-- paper verdicts -->\n" + (
    "<!-- end of paper verdicts -->\n<!-- other board -->\nof another folder\n<!-- end of other board -->\nbelow\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder of a board, of verdicts, and of documents that show them."""
    write_board(tmp_path / "boards" / "one")
    published.update(tmp_path / "boards" / "one")
    (tmp_path / "boards" / "paper").mkdir()
    (tmp_path / "boards" / "paper" / "verdicts.md").write_text("| claim |\n")
    (tmp_path / "boards" / "paper" / "figure.png").write_bytes(b"new")
    (tmp_path / "docs" / "results" / "paper").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "paper" / "figure.png").write_bytes(b"old")
    (tmp_path / "docs" / "results" / "page.md").write_text(PAGE)
    (tmp_path / "README.md").write_bytes(b"nothing of ours,\r\nnor any \xff\n")
    return tmp_path


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["leaderboard", *map(str, words)])
    return result.exit_code, result.output


def test_update_writes_what_is_between_the_marks_and_nothing_else(project: Path) -> None:
    code, said = call(project / "boards", "--update")
    page = project / "docs" / "results" / "page.md"
    assert code == 0 and f"{page}: written" in said and "README.md" not in said
    board = (project / "boards" / "one" / "leaderboard.md").read_text()
    assert page.read_text() == PAGE.replace("old\n", board).replace("verdicts -->\n<", "verdicts -->\n| claim |\n<", 1)
    assert (project / "docs" / "results" / "paper" / "figure.png").read_bytes() == b"new"
    assert call(project / "boards", "--update")[1].count("written") == 0
    assert call(project / "boards", "--check") == (0, f"{project}/boards/one: as it must be\n")


@pytest.mark.parametrize("name", ["docs/results/page.md", "docs/results/paper/figure.png"])
def test_check_names_the_document_in_which_one_figure_is_another(project: Path, name: str) -> None:
    documents.update(project / "boards")
    content = (project / name).read_bytes()
    at = content.index(b"0." if name.endswith(".md") else b"new")
    (project / name).write_bytes(content[:at] + b"7" + content[at + 1 :])
    code, said = call(project / "boards", "--check")
    assert code == 1 and f"{project / name}: does not show what is in" in said and "--update" in said
    assert (project / name).read_bytes() != content  # it is looked at, not mended
    assert call(project / "boards", "--update")[0] == 0 and (project / name).read_bytes() == content


def test_a_readme_has_what_a_board_tells_first(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "leaderboard" / "tuned", tmp_path / "boards" / "one")
    (tmp_path / "README.md").write_text("above\n<!-- one board -->\nold\n<!-- end of one board -->\nbelow\n")
    assert call(tmp_path / "boards", "--update")[0] == 0
    text = (tmp_path / "README.md").read_text()
    assert "best strategies" in text and "track tuned" in text.lower() and "old" not in text
    assert "kept accuracy" not in text and text.startswith("above\n") and text.endswith("below\n")
    assert call(tmp_path / "boards", "--check")[0] == 0


def test_the_documents_of_the_repository_show_boards_that_it_has() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marks = [found for page in pages for found in documents.MARKED.finditer(page.read_text(encoding="utf-8"))]
    assert len(marks) >= 8
    for _, name, kind, _ in (found.groups() for found in marks):
        assert (ROOT / "leaderboard" / name / ("leaderboard.md" if kind == "board" else "verdicts.md")).is_file()
