import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from sparsebench.cli import main
from sparsebench.errors import UserError
from sparsebench.page import published

PUBLISHED = Path(__file__).resolve().parents[2] / "leaderboard" / "quick"
FOLDERS = ("environments", "strategies", "suites")


def write_records(folder: Path) -> None:
    """Write two segments of records of one task."""
    (folder / "records").mkdir(parents=True)
    lines = [
        line
        for path in sorted((PUBLISHED / "records").glob("*.jsonl"))
        for line in path.read_bytes().splitlines(keepends=True)
    ]
    cells = [json.loads(line)["cell"] for line in lines]
    lines = [
        line
        for line, cell in zip(lines, cells, strict=True)
        if cell["task"]["name"] == "composite" and cell["budget"]["macs"] == 0.5
    ]
    for name, part in (("first", lines[0:12]), ("second", lines[12:24])):
        (folder / "records" / f"{name}.jsonl").write_bytes(b"".join(part))


def write_board(folder: Path) -> None:
    """Write records and what describes them."""
    write_records(folder)
    for name in FOLDERS:
        shutil.copytree(PUBLISHED / name, folder / name)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """Return a published board, in a folder of several things."""
    write_board(tmp_path / "boards" / "one")
    (tmp_path / "boards" / "figures").mkdir()
    published.update(tmp_path / "boards" / "one")
    return tmp_path / "boards" / "one"


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["leaderboard", *map(str, words)])
    return result.exit_code, result.output


def test_a_board_that_is_what_its_records_give_passes_and_is_not_written_again(board: Path) -> None:
    assert published.differing(board) == [] and published.update(board) == []
    code, said = call(board.parent, "--check")
    assert code == 0 and "one: as it must be" in said


@pytest.mark.parametrize("name", ["leaderboard.md", "leaderboard.csv"])
def test_a_file_that_was_changed_or_is_missing_is_named_and_mended(board: Path, name: str) -> None:
    content = (board / name).read_bytes()
    (board / name).write_bytes(content.replace(b"0", b"1", 1))
    code, said = call(board.parent, "--check")
    assert code == 1 and f"one: not what the records give: {name}" in said and "--update" in said
    assert (board / name).read_bytes() != content  # it is looked at, not mended
    if name != published.NAME:
        (board / name).unlink()
        assert published.differing(board) == [name]
    code, said = call(board.parent, "--update")
    assert code == 0 and f"written: {name}" in said and (board / name).read_bytes() == content


def test_another_picture_is_named_and_one_of_another_drawer_is_not(board: Path) -> None:
    path = board / "leaderboard.png"
    with Image.open(path) as drawn:
        picture = drawn.convert("RGB")
    picture.save(path, pnginfo=None, compress_level=1)  # other bytes, the same pixels
    assert published.differing(board) == []
    for wrong in (picture.rotate(180), picture.resize((8, 8)), Image.new("RGB", picture.size)):
        wrong.save(path)
        assert published.differing(board) == ["leaderboard.png"]
    path.write_bytes(Path("/etc/hostname").read_bytes())
    code, said = call(board.parent, "--check")
    assert code == 1 and "leaderboard.png" in said


def test_a_record_that_is_not_what_its_outcomes_come_to_is_named(board: Path) -> None:
    path = max((board / "records").glob("*.jsonl"), key=lambda one: one.stat().st_size)
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    raw = next(one for one in lines if one["status"] == "ok")
    raw["metrics"]["accuracy"]["value"] = 0.95
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), "utf-8")
    published.update(board)
    code, said = call(board.parent, "--check")
    assert code == 1 and f"cell {raw['cell_id']}" in said and "accuracy is 0.95" in said


def test_records_less_are_another_board(board: Path) -> None:
    sorted((board / "records").glob("*.jsonl"))[0].unlink()
    assert published.differing(board)


def test_a_link_is_not_the_boards_file(board: Path) -> None:
    target = board.parent / "elsewhere.md"
    shutil.move(board / "leaderboard.md", target)
    (board / "leaderboard.md").symlink_to(target)
    assert published.differing(board) == ["leaderboard.md"]


def test_a_folder_without_boards_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no board in .*--out"):
        published.boards(tmp_path)


def test_update_makes_a_board_where_there_was_none(tmp_path: Path) -> None:
    write_records(tmp_path)
    code, said = call(tmp_path, "--update")
    assert code == 0 and "leaderboard.png" in said and (tmp_path / "leaderboard.csv").exists()


def test_bibtex_of_what_is_in_a_board(board: Path) -> None:
    from sparsebench.records import store

    shutil.rmtree(board / "strategies")
    sha = next(iter(store.read(board).values())).origin.revision
    name = next(record.cell.strategy.name for record in store.read(board).values() if record.origin.revision == sha)
    about = {"name": name, "revision": sha, "kind": "baseline", "site": "input", "trained": False, "adaptive": False,
             "citation": "", "bibtex": "@article{one}"}  # fmt: skip
    store.keep(board / "strategies", about)
    store.keep(board / "strategies", about | {"name": "not in it", "bibtex": "@article{other}"})
    assert call(board, "--format", "bibtex") == (0, "@article{one}\n\n")
