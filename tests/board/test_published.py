import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from published_boards import PUBLISHED, write_board

from sparsebench.board import published
from sparsebench.board.board import gather
from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.records import store, table

pytestmark = pytest.mark.usefixtures("no_picture")


def differing(folder: Path) -> list[str]:
    return [path.name for path in published.differences(published.board_files(folder))]


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["leaderboard", *map(str, words)])
    return result.exit_code, result.output


def test_an_unchanged_board_is_not_written_again(board: Path) -> None:
    """A board that is what its records give passes and is not written again."""
    assert differing(board) == [] and published.write(published.board_files(board)) == []
    code, output = call(board.parent, "--check")
    assert code == 0 and "one: matches its records" in output


def test_files_that_were_changed_or_are_missing_are_named_and_mended(board: Path) -> None:
    contents = {name: (board / name).read_bytes() for name in ("leaderboard.csv", "leaderboard.md")}
    for name, content in contents.items():
        (board / name).write_bytes(content.replace(b"0", b"1", 1))
    code, output = call(board.parent, "--check")
    assert code == 1 and "one: files that differ from its records: " in output and "--update" in output
    assert all(name in output and (board / name).read_bytes() != content for name, content in contents.items())
    (board / "leaderboard.md").unlink()
    assert sorted(differing(board)) == [*contents]
    code, output = call(board.parent, "--update")
    assert code == 0 and {name: (board / name).read_bytes() for name in contents} == contents
    assert all(name in output.partition("written: ")[2] for name in contents)


def test_a_record_that_is_not_what_its_outcomes_come_to_is_named(board: Path) -> None:
    path = store.sealed_files(board)[0]
    first, *others = map(table.record_of, table.rows_of(table.read(path)))
    better = first.metrics | {"accuracy": first.metrics["accuracy"].model_copy(update={"value": 0.95})}
    records = [first.model_copy(update={"metrics": better}), *others]
    table.write(path, table.table_of((record, 0) for record in records), table.sidecars(path))
    published.write(published.board_files(board))
    code, output = call(board.parent, "--check")
    assert code == 1 and f"cell {first.cell_id}" in output and "accuracy is 0.95" in output


def test_a_folder_without_boards_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no board in .*--out"):
        published.boards(tmp_path)


def test_update_makes_a_board_where_there_was_none(tmp_path: Path) -> None:
    write_board(tmp_path)
    code, output = call(tmp_path, "--update")
    assert code == 0 and "leaderboard.png" in output and (tmp_path / "leaderboard.csv").exists()


def test_update_makes_boards_of_new_folders_beside_others(board: Path, tmp_path: Path) -> None:
    new, submission = board.parent / "deeper" / "new", board.parent / "submissions" / "a" / "quick-1"
    for folder in (new, submission):
        write_board(folder)
    (submission / "manifest.json").write_text("{}")
    code, output = call(board.parent, "--check")
    assert code == 0 and str(new) in output and str(submission) not in output
    code, output = call(board.parent, "--update")
    assert code == 0 and (new / "leaderboard.csv").exists() and not (submission / "leaderboard.csv").exists()
    code, output = call(board.parent, "--check")
    assert code == 0 and f"{new}: matches its records" in output


def test_a_folder_of_folders_with_records_names_one(tmp_path: Path) -> None:
    write_board(tmp_path / "submissions" / "tome" / "quick-1")
    for folder in (tmp_path, tmp_path / "submissions"):
        code, output = call(folder)
        assert code != 0 and str(tmp_path / "submissions" / "tome" / "quick-1") in output
    assert "sparsebench run" in call(tmp_path / "submissions" / "tome" / "quick-1" / "records")[1]


def test_bibtex_of_what_is_in_a_board(tmp_path: Path) -> None:
    rows = store.rows(PUBLISHED)[:1]
    (record,) = map(table.record_of, table.rows_of(rows))
    about = {"name": record.cell.strategy.name, "revision": record.origin.revision, "kind": "baseline", "site": "input",
             "trained": False, "adaptive": False, "citation": "", "bibtex": "@article{one}"}  # fmt: skip
    described = {f"strategies/{k}.json": json.dumps(entry) for k, entry in
                 enumerate((about, about | {"name": "not in it", "bibtex": "@article{other}"}))}  # fmt: skip
    table.write(tmp_path / "records" / "one.parquet", rows, described)
    code, text = call(tmp_path, "--format", "bibtex")
    assert code == 0 and text.endswith("\n\n@article{one}\n\n") and "{other}" not in text and "{sparsebench," in text


PAGE = "above\n<!-- one board -->\nold\n<!-- end of one board -->\nbetween\n<!-- paper verdicts -->\n" + (
    "<!-- end of paper verdicts -->\n<!-- other board -->\nof another folder\n<!-- end of other board -->\nbelow\n"
)


@pytest.fixture
def project(board: Path, tmp_path: Path) -> Path:
    """Return a folder with a board, verdicts, and documents that show both."""
    (tmp_path / "boards" / "paper").mkdir()
    (tmp_path / "boards" / "paper" / "verdicts.md").write_text("| claim |\n")
    (tmp_path / "boards" / "paper" / "figure.png").write_bytes(b"new")
    (tmp_path / "docs" / "results" / "paper").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "paper" / "figure.png").write_bytes(b"old")
    (tmp_path / "docs" / "results" / "page.md").write_text(PAGE)
    (tmp_path / "README.md").write_bytes(b"nothing of ours,\r\nnor any \xff\n")
    return tmp_path


def test_update_writes_what_is_between_the_marks_and_nothing_else(project: Path) -> None:
    code, output = call(project / "boards", "--update")
    page = project / "docs" / "results" / "page.md"
    assert code == 0 and f"{page}: written" in output and "README.md" not in output
    board = (project / "boards" / "one" / "leaderboard.md").read_text()
    assert page.read_text() == PAGE.replace("old\n", board).replace("verdicts -->\n<", "verdicts -->\n| claim |\n<", 1)
    assert (project / "docs" / "results" / "paper" / "figure.png").read_bytes() == b"new"
    assert call(project / "boards", "--update")[1].count("written") == 0
    assert call(project / "boards", "--check") == (0, f"{project}/boards/one: matches its records\n")


def test_check_names_the_documents_in_which_one_figure_is_another(project: Path) -> None:
    published.write(published.documents(project / "boards"))
    names = {"docs/results/page.md": b"0.", "docs/results/paper/figure.png": b"new"}
    contents = {name: (project / name).read_bytes() for name in names}
    for name, content in contents.items():
        (project / name).write_bytes(content.replace(names[name], b"7", 1))
    code, output = call(project / "boards", "--check")
    assert code == 1 and "--update" in output
    for name, content in contents.items():
        assert f"{project / name}: does not show what is in" in output
        assert (project / name).read_bytes() != content  # compared, not repaired
    assert call(project / "boards", "--update")[0] == 0
    assert {name: (project / name).read_bytes() for name in names} == contents


def test_a_readme_has_what_a_board_tells_first(board: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("above\n<!-- one board -->\nold\n<!-- end of one board -->\nbelow\n")
    assert call(tmp_path / "boards", "--update")[0] == 0
    text = (tmp_path / "README.md").read_text()
    assert "most accurate" in text and "track frozen" in text.lower() and "old" not in text
    whole = (board / "leaderboard.md").read_text()
    assert "All strategies" in whole and "All strategies" not in text
    assert text.startswith("above\n") and text.endswith("below\n")
    assert call(tmp_path / "boards", "--check")[0] == 0


def with_crlf(folder: Path) -> None:
    """Check out the texts of a folder with CRLF, as Git does with core.autocrlf."""
    for path in folder.rglob("*"):
        if path.suffix in (".md", ".csv", ".svg"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def test_texts_with_other_line_endings_are_read_alike(project: Path) -> None:
    shutil.copy(project / "boards" / "one" / "leaderboard.csv", project / "boards" / "paper" / "table.csv")
    shutil.copy(project / "boards" / "one" / "leaderboard.csv", project / "docs" / "results" / "paper" / "table.csv")
    (project / "README.md").write_text("first\n<!-- one board -->\n<!-- end of one board -->\nlast\n")
    assert call(project / "boards", "--update")[0] == 0
    before = (project / "README.md").read_bytes()
    with_crlf(project)
    assert call(project / "boards", "--check")[0] == 0 and call(project / "boards", "--update")[1].count("written") == 0
    wrong = {"README.md": b"3 networks", "docs/results/page.md": b"3 networks",
             "docs/results/paper/table.csv": b"0.5", "boards/one/leaderboard.md": b"32 x 32"}  # fmt: skip
    contents = {name: (project / name).read_bytes() for name in wrong}
    for name, text in wrong.items():
        assert text in contents[name]
        (project / name).write_bytes(contents[name].replace(text, b"7", 1))
    code, output = call(project / "boards", "--check")
    assert code == 1 and all(Path(name).name in output for name in wrong)
    assert call(project / "boards", "--update")[0] == 0
    for name, content in contents.items():
        assert (project / name).read_bytes().replace(b"\r\n", b"\n") == content.replace(b"\r\n", b"\n")
    assert (project / "README.md").read_bytes() == before.replace(b"\n", b"\r\n")


def test_another_suite_removes_pictures_of_the_old_board(tmp_path: Path) -> None:
    """A folder that gets another suite keeps no picture of the old board."""
    for name in ("leaderboard-gap.png", "leaderboard-samples.png", "leaderboard-own.png"):
        (tmp_path / name).write_bytes(b"old")
    write_board(tmp_path)
    board = gather(tmp_path)
    published.publish(board, tmp_path)
    assert {path.name for path in tmp_path.glob("leaderboard*")} == {*published.files(board), "leaderboard-own.png"}
    assert "leaderboard-gap.png" not in published.files(board)
