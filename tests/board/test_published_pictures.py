"""The pictures of a published board are compared by how they look."""

from pathlib import Path

from commands import call
from PIL import Image

from sparsebench.board import published


def test_another_picture_is_named_and_one_of_another_drawer_is_not(board: Path) -> None:
    contents_of_board = published.board_files(board)
    published.write(contents_of_board)
    path = board / "leaderboard.png"
    with Image.open(path) as image:
        picture = image.convert("RGB")
    picture.save(path, pnginfo=None, compress_level=1)  # other bytes, the same pixels
    assert published.differences(contents_of_board) == []
    for wrong in (picture.rotate(180), picture.resize((8, 8)), Image.new("RGB", picture.size)):
        wrong.save(path)
        assert published.differences(contents_of_board) == [path]
    path.write_bytes(Path("/etc/hostname").read_bytes())
    result = call("leaderboard", board.parent, "--check")
    assert result.exit_code == 1 and "leaderboard.png" in result.output
