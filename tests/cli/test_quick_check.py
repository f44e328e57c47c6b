"""Which pictures a dry run reads again, and that a run reads all."""

import os
import re
from pathlib import Path

import pytest
from coded import write_noise, write_random_weights
from commands import call

from sparsebench.records import store

ARCH, NAMES = "test_vit", ("n01440764", "n01443537")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_picture: None) -> Path:
    """Return a folder with three pictures in each of two classes, weights beside it, and a new cache folder."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    write_random_weights(tmp_path / "own.safetensors", ARCH)
    return write_noise(tmp_path / "mine", NAMES, 3)


def run(folder: Path, *more: str) -> str:
    """Run the cells of the folder in an output folder beside it; return what the command prints."""
    result = call(
        "run", "--suite", "folder", "--task", "folder:canvas=32", "--model", f"timm:{ARCH}", "--images",
        f"folder:{folder}", "--weights", folder.parent / "own.safetensors", "--seeds", 1, "--jobs", 0,
        "--out", folder.parent / "out", *more,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    return result.stdout


def missing(folder: Path) -> int:
    """Return the number of cells that a dry run would run."""
    match = re.match(r"(\d+) of \d+ cells to run", run(folder, "--dry-run"))
    assert match is not None
    return int(match[1])


def overwrite(picture: Path, content: bytes, *, later: int = 0) -> None:
    """Overwrite a file, which keeps its size and inode. It is `later` nanoseconds younger than before."""
    before = picture.stat()
    picture.write_bytes(content.ljust(before.st_size, b"\0"))
    os.utime(picture, ns=(before.st_atime_ns, before.st_mtime_ns + later))


def edit(folder: Path, *, later: int = 0) -> None:
    """Replace a class's largest picture by its smallest."""
    pictures = sorted(folder.iterdir(), key=lambda path: path.stat().st_size)
    overwrite(pictures[-1], pictures[0].read_bytes(), later=later)


def test_a_dry_run_reads_changed_pictures_alone_and_a_run_reads_all(folder: Path) -> None:
    run(folder)
    cells = set(store.read(folder.parent / "out"))
    assert missing(folder) == 0
    edit(folder / NAMES[0])
    # The dry run does not open the picture, or it would see the edit.
    assert missing(folder) == 0
    run(folder)
    assert len(set(store.read(folder.parent / "out")) - cells) == len(cells)
    assert missing(folder) == 0

    edit(folder / NAMES[1], later=10**9)
    assert missing(folder) == len(cells)


def test_a_dry_run_remembers_what_a_dry_run_read(folder: Path) -> None:
    first = run(folder, "--dry-run")
    for picture in folder.rglob("*.png"):
        overwrite(picture, b"no picture")
    assert run(folder, "--dry-run").splitlines()[:2] == first.splitlines()[:2]
