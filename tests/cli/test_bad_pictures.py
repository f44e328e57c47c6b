"""Unreadable pictures in users' folders. A command reads all pictures once, before its cells."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from coded import write_noise, write_random_weights
from running import execute

from sparsebench.cli import main
from sparsebench.plan.locate import pictures_of
from sparsebench.plan.plan import plan
from sparsebench.plan.request import Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.tasks.sources import cache

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ARCH, NAMES, EACH = "test_vit", ("n01440764", "n01443537"), 7


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new cache folder."""
    monkeypatch.setenv("SPARSEBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with seven pictures of noise in each of two ImageNet classes."""
    return write_noise(tmp_path / "mine", NAMES, EACH)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_weights(tmp_path_factory.mktemp("weights") / "own.safetensors", ARCH)


def spoil(root: Path) -> dict[str, str]:
    """Spoil four pictures in different ways; return their names, and the expected reason of each."""
    first, second = (root / name for name in NAMES)
    (first / "1.png").write_bytes((first / "1.png").read_bytes()[:900])
    (first / "2.png").write_text("no picture")
    (second / "0.png").write_bytes(b"")
    (second / "5.png").write_bytes(b"II*\x00\x08\x00\x00\x00\xff\xff")
    reasons = {f"{NAMES[0]}/1.png": "", f"{NAMES[0]}/2.png": "of no known format", f"{NAMES[1]}/0.png": "it is empty"}
    return reasons | {f"{NAMES[1]}/5.png": ""}


def options(root: Path, weights: Path) -> list[str]:
    return [
        "--suite", "folder", "--task", "folder:canvas=32", "--model", f"timm:{ARCH}", "--weights", str(weights),
        "--images", f"folder:{root}", "--seeds", "1", "--jobs", "0",
    ]  # fmt: skip


def run(root: Path, weights: Path, out: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["run", *options(root, weights), "--out", str(out), *more])


def error_of(result: Result) -> str:
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error")]
    return line


def test_bad_pictures_are_one_line_before_the_first_cell(root: Path, weights: Path, tmp_path: Path) -> None:
    """All bad pictures are one line before the first cell and nothing is lost."""
    assert run(root, weights, tmp_path / "out").exit_code == 0
    records = store.read(tmp_path / "out")
    bad = spoil(root)
    for _ in range(2):
        result = run(root, weights, tmp_path / "out")
        line = error_of(result)
        assert result.exit_code == 1 and "4 of 14 pictures cannot be read" in line and "--skip-bad" in line
        for name, reason in bad.items():
            assert f"{root / name} (" in line and reason in line
    assert store.read(tmp_path / "out") == records


def test_bad_pictures_that_can_be_opened_are_found_by_decoding_and_counted(
    root: Path, weights: Path, tmp_path: Path
) -> None:
    for i in (1, 4):
        (root / NAMES[0] / f"{i}.png").write_bytes(b"no picture")
    result = run(root, weights, tmp_path / "out")
    lines = result.stderr.splitlines()
    assert result.exit_code == 1 and store.read(tmp_path / "out") == {}
    assert lines[0] == f"14 pictures to decode, 0.00 GB in {cache.cache_folder()}" and lines[1].startswith("14/14")
    assert lines[2].startswith("Error: 2 of 14 pictures cannot be read: ") and len(lines) == 3


def test_every_board_says_how_many_pictures_are_left_out(root: Path, weights: Path, tmp_path: Path) -> None:
    """Left out pictures change the data and every board says how many there are."""
    bad, out = spoil(root), tmp_path / "out"
    first = run(root, weights, out, "--skip-bad", "--plugin", "attn_topk")
    assert first.exit_code == 0, first.stderr
    note = "left out: 4 of 14 pictures, which cannot be read: " + ", ".join(sorted(bad))
    assert note in first.stdout
    ids = set(store.read(out))
    assert {record.outcomes.n for record in store.read(out).values() if record.outcomes} == {10}
    merged = CliRunner().invoke(main, ["merge", str(out), "-o", str(tmp_path / "merged")])
    assert merged.exit_code == 0, merged.output
    done = CliRunner().invoke(main, ["submit", str(out), "--to", str(tmp_path / "to")])
    assert done.exit_code == 0, done.output
    (submission,) = (tmp_path / "to" / "attn_topk").iterdir()
    assert CliRunner().invoke(main, ["verify", str(submission)]).exit_code == 0
    for folder in (tmp_path / "merged", submission):
        assert note in CliRunner().invoke(main, ["leaderboard", str(folder)]).stdout
    for form in ("md", "html"):
        assert "4 of 14 pictures" in (out / f"leaderboard.{form}").read_text()

    again = run(root, weights, out, "--skip-bad", "--plugin", "attn_topk")
    assert "all 4 cells are in the store" in again.stderr and "pictures to check" not in again.stderr
    for name in bad:  # without the bad pictures, the same data need no --skip-bad
        path = root / name
        (path / "inside.png").unlink() if path.is_dir() else None
        path.rmdir() if path.is_dir() else path.unlink()
    clean = run(root, weights, tmp_path / "clean", "--plugin", "attn_topk")
    assert clean.exit_code == 0 and "decode" not in clean.stderr and set(store.read(tmp_path / "clean")) == ids


def test_a_class_of_bad_pictures_alone_is_not_left_out(root: Path, weights: Path, tmp_path: Path) -> None:
    for path in (root / NAMES[1]).iterdir():
        path.write_bytes(b"")
    result = run(root, weights, tmp_path / "out", "--skip-bad")
    assert result.exit_code == 2 and f"{NAMES[1]} holds no pictures" in error_of(result)


@pytest.mark.parametrize("more", [(), ("--skip-bad",)])
def test_a_dry_run_decodes_nothing_and_says_so(
    root: Path, weights: Path, tmp_path: Path, place: Path, more: tuple[str, ...]
) -> None:
    (root / NAMES[0] / "1.png").write_bytes(b"no picture")
    result = run(root, weights, tmp_path / "out", "--dry-run", *more)
    assert result.exit_code == 0, result.stderr
    left = 13 if more else 14
    assert re.search(rf"{left} pictures to decode first, [\d.]+ MB in {place}; nothing is decoded now", result.stdout)
    assert "unknown" not in result.stdout  # hours and memory are known, because one batch was timed
    assert not list(place.glob(f"*{cache.SUFFIX}")) and not (tmp_path / "out").exists()
    if more:
        run(root, weights, tmp_path / "out", *more)
        known = run(root, weights, tmp_path / "out", "--dry-run", *more)
        assert "0 of 3 cells to run" in known.stdout and "decode" not in known.stdout


def test_cells_take_the_decoded_pictures_and_do_not_look_at_the_folder(
    root: Path, weights: Path, tmp_path: Path
) -> None:
    files = Files((f"folder:{root}",), weights=(weights,))
    request = Request(suite="folder", tasks=("folder:canvas=32",), model=f"timm:{ARCH}", seeds=1)
    planned = plan(request, files, Registry(), tmp_path / "out", "missing")
    cache.decode(pictures_of(planned.todo, Registry(), planned.locations))
    for name in NAMES:
        (root / name).rename(tmp_path / name)
    records: list[Record] = []
    execute(planned, Registry(), tmp_path / "out", on_record=records.append)
    assert [(record.status, record.metrics["accuracy"].n) for record in records] == [("ok", 14)] * len(planned.todo)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root can read every file")
def test_a_picture_that_may_not_be_read_is_one_of_them(root: Path, weights: Path, tmp_path: Path) -> None:
    (root / NAMES[0] / "1.png").chmod(0)
    result = run(root, weights, tmp_path / "out")
    assert result.exit_code == 1 and "1.png (Permission denied)" in error_of(result)


@pytest.mark.slow
def test_two_commands_at_once_share_one_decoding(root: Path, weights: Path, tmp_path: Path, place: Path) -> None:
    line = [sys.executable, "-m", "sparsebench", "run", *options(root, weights)]
    started = [
        subprocess.Popen([*line, "--out", str(tmp_path / name)], stderr=subprocess.PIPE, text=True)
        for name in ("one", "other")
    ]
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert sum(" to decode" in text for text in errors) == 1
    assert len([path for path in place.iterdir() if cache.SUFFIX in path.name]) == 1
