from pathlib import Path

import pytest
from click.testing import CliRunner
from test_published import write_board

from sparsebench.board import documents
from sparsebench.board.board import BudgetBoard
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


def test_the_board_of_the_readme_is_the_baselines_and_the_best_seven(project: Path) -> None:
    kinds = {"dense": "baseline", "random_inside": "baseline", "random": "baseline", "oracle": "oracle"}
    names = ["dense", *"abcdef", "random_inside", *"ghi", "random", "oracle", "unranked"]
    ranks = {"dense": "not ranked", "oracle": "not ranked", "unranked": "not ranked"}
    rows = [
        {"strategy": name, "rank": ranks.get(name, str(at)), "kind": kinds.get(name, "deployable"), "how": "drop",
         "kept_accuracy": 0.9, "accuracy_at_0.7": 0.8, "accuracy_at_0.6": 0.7, "selection_auroc": 0.5}
        for at, name in enumerate(names)
    ]  # fmt: skip
    for row in rows:
        row |= dict.fromkeys(("kept_accuracy_low", "kept_accuracy_high", "accuracy_at_0.7_spent"))
    text = documents.short(BudgetBoard("t", "m", 1, "frozen", (0.7, 0.6), 0.6, rows, [], []))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert lines[0] == ["rank", "strategy", "how", "kept accuracy", "@.7"]
    assert [line[1] for line in lines[2:]] == ["dense", *"abcdef", "random_inside", "g", "oracle"]


def test_a_readme_has_the_short_board_where_there_are_several_budgets(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "README.md").write_text(PAGE)
    board = (project / "boards" / "one" / "leaderboard.md").read_text()
    assert documents.update(project / "boards")[0] == project / "README.md"
    assert board in (project / "README.md").read_text()  # a single budget: the whole table
    monkeypatch.setattr(documents, "short", lambda _: "short\n")
    monkeypatch.setattr(documents, "gather", lambda folder: type("B", (), {"over_budgets": folder}))
    assert documents.update(project / "boards") == [project / "README.md"]
    assert "short\n" in (project / "README.md").read_text()


def test_the_documents_of_the_repository_show_boards_that_it_has() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    marks = [found for page in pages for found in documents.MARKED.finditer(page.read_text(encoding="utf-8"))]
    assert len(marks) >= 8
    for _, name, kind, _ in (found.groups() for found in marks):
        assert (ROOT / "leaderboard" / name / ("leaderboard.md" if kind == "board" else "verdicts.md")).is_file()
