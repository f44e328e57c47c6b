"""The workflow that checks pull requests: its own steps, run on clones that a stranger could send."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from forge import changed, put, replayed

from sparsebench.records import store, table

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, WORKFLOWS = ROOT / ".github" / "check-submissions", ROOT / ".github" / "workflows"
PLACE = Path("leaderboard") / "submissions" / "norm" / "1"
GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")


def git(folder: Path, *words: str) -> str:
    return subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "change")
    return git(folder, "rev-parse", "HEAD")


def update(board: Path) -> None:
    """Write the files of a board by a process of its own, which draws the pictures that tests leave empty."""
    subprocess.run([sys.executable, "-m", "sparsebench", "leaderboard", str(board), "--update"], check=True)


@pytest.fixture(scope="module")
def template(out: Path, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a repository with a board and a submission, and its commit."""
    folder = tmp_path_factory.mktemp("base") / "repository"
    shutil.copytree(out / "records", folder / "leaderboard" / "tiny" / "records")
    update(folder / "leaderboard" / "tiny")
    shutil.copytree(sound, folder / "leaderboard" / "submissions" / "norm" / "0")
    (folder / "README.md").write_text("A project.\n")
    git(folder, "init", "--quiet")
    return folder, commit(folder)


def honest(head: Path, sound: Path) -> None:
    shutil.copytree(sound, head / PLACE.parent / sound.name)


def with_replay(head: Path, sound: Path) -> None:
    replayed(sound, head / PLACE.parents[1])


def forged_board(head: Path) -> None:
    board = head / "leaderboard" / "tiny"
    path = next((board / "records").glob("*.parquet"))
    first, *others = store.read(board).values()
    better = first.metrics | {"accuracy": first.metrics["accuracy"].model_copy(update={"value": 0.95})}
    records = [first.model_copy(update={"metrics": better}), *others]
    table.write(path, table.table_of((record, 0) for record in records), table.sidecars(path))
    update(board)


def many_files(head: Path) -> None:
    (head / PLACE).mkdir(parents=True)
    for number in range(2001):
        (head / PLACE / str(number)).touch()


def written(name: str) -> Callable[..., None]:
    def write(head: Path, sound: Path) -> None:
        (head / name).parent.mkdir(parents=True, exist_ok=True)
        (head / name).write_text("other\n")

    return write


def forged(name: str = "") -> Callable[..., None]:
    def write(head: Path, sound: Path) -> None:
        folder = changed(sound, head.parent / "forged", put(0.99, "metrics", "accuracy", "value"))
        shutil.move(folder, head / PLACE.parents[1] / (name or f"norm/{sound.name}"))

    return write


LABEL = 'the label "boards"'
CHANGES: dict[str, tuple[Callable[..., object], bool, int, list[str]]] = {
    "an honest submission": (honest, False, 0, ["reported", "tiny: matches its records"]),
    "a forged accuracy": (forged(), False, 1, ["accuracy is 0.99"]),
    "a replay by a stranger": (with_replay, False, 1, [LABEL, "replayed by Somebody"]),
    "a replay with the label": (with_replay, True, 0, ["replayed by Somebody"]),
    "the README": (written("README.md"), False, 1, [LABEL]),
    "a file of a board": (written("leaderboard/tiny/notes.md"), False, 1, [LABEL]),
    "a line break": (written("a\nb"), False, 1, [LABEL]),
    "a file of a board with the label": (written("leaderboard/tiny/notes.md"), True, 0, []),
    "a board of its own, with the label": (
        lambda head, sound: forged_board(head), True, 1, ["contradict themselves"]),
    "another picture, with the label": (written("leaderboard/tiny/leaderboard.png"), True, 1, ["leaderboard.png"]),
    "an option as name": (forged("--help/1"), False, 1, ["rejected"]),
    "a command as name": (forged("line\nbreak $(touch done)/1"), False, 1, ["rejected"]),
    "a link": (lambda head, sound: (head / PLACE).symlink_to("/etc"), False, 1, ["rejected"]),
    "submissions taken away": (
        lambda head, sound: shutil.rmtree(head / "leaderboard" / "submissions"), False, 0, []),
    "more files than anybody submits": (lambda head, sound: many_files(head), False, 1, ["2001 files change"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_pull_request_passes_or_is_told_why_not(
    template: tuple[Path, str], sound: Path, tmp_path: Path, name: str
) -> None:
    """What is changed in a clone is committed, and the script is run on it."""
    tool, head, (change, may, code, words) = tmp_path / "bin" / "sparsebench", tmp_path / "head", CHANGES[name]
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sparsebench "$@"\n')
    tool.chmod(0o755)
    paths = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}
    git(tmp_path, "clone", "--quiet", str(template[0]), "head")
    change(head, sound)
    commit(head)
    command = ["bash", str(SCRIPT), "../head", template[1], str(may).lower()]
    ended = subprocess.run(command, cwd=tool.parent, env=os.environ | paths, capture_output=True, text=True)
    said = ended.stdout + ended.stderr
    assert ended.returncode == code and all(word in said for word in words) and "Usage:" not in said, said
    assert not list(tmp_path.rglob("done"))


@pytest.mark.parametrize("name", ["submissions", "release"])
def test_workflows_only_read_and_pin_their_actions(name: str) -> None:
    """Workflows read and no more and their actions stay what they are."""
    text = (WORKFLOWS / f"{name}.yml").read_text("utf-8")
    actions = re.findall(r"uses: (\S+)", text)
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert re.search(r"^permissions:\n  contents: read\n\S", text, re.MULTILINE)
    if name == "release":  # only the job that runs no code may write
        build, _, attach = text.partition("\n  attach:\n")
        assert "write" not in build.partition("\nname:")[2] and attach.count("contents: write") == 1
        assert "checkout" not in attach and "pip" not in attach and "secrets" not in text
    else:
        assert "pull_request_target" not in text and "secrets" not in text.partition("\nname:")[2]
        assert "push:\n    branches: [main]" in text
        assert re.search(r"^/\.github/ @\S+", (ROOT / ".github" / "CODEOWNERS").read_text("utf-8"), re.MULTILINE)
