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
from forge import put

from sparsebench.page import published
from sparsebench.records import store, table

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, WORKFLOW = ROOT / ".github" / "check-submissions", ROOT / ".github" / "workflows" / "submissions.yml"
PLACE = Path("leaderboard") / "submissions" / "norm" / "1"
GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main")


def git(folder: Path, *words: str) -> str:
    return subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", "change")
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def template(out: Path, sound: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return a repository with a board and a submission, and its commit."""
    folder = tmp_path_factory.mktemp("base") / "repository"
    shutil.copytree(out / "records", folder / "leaderboard" / "tiny" / "records")
    published.update(folder / "leaderboard" / "tiny")
    shutil.copytree(sound, folder / "leaderboard" / "submissions" / "norm" / "0")
    (folder / "README.md").write_text("A project.\n")
    git(folder, "init", "--quiet")
    return folder, commit(folder)


@pytest.fixture
def head(template: tuple[Path, str], tmp_path: Path) -> Path:
    git(tmp_path, "clone", "--quiet", str(template[0]), "head")
    return tmp_path / "head"


@pytest.fixture
def check(template: tuple[Path, str], head: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return a function that commits what was changed and runs the script on it."""
    tool = tmp_path / "bin" / "sparsebench"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sparsebench "$@"\n')
    tool.chmod(0o755)
    paths = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT / 'plugins'}"}

    def run(may: bool = False) -> tuple[int, str]:
        commit(head)
        words = ["bash", str(SCRIPT), "../head", template[1], str(may).lower()]
        ended = subprocess.run(words, cwd=tool.parent, env=os.environ | paths, capture_output=True, text=True)
        return ended.returncode, ended.stdout + ended.stderr

    return run


@pytest.mark.slow
def test_an_honest_submission_passes(check, head: Path, sound: Path) -> None:
    shutil.copytree(sound, head / PLACE.parent / sound.name)
    code, said = check()
    assert code == 0 and "reported" in said and "tiny: as it must be" in said


@pytest.mark.slow
def test_a_forged_accuracy_does_not(check, head: Path, tampered) -> None:
    forged = tampered(put(0.99, "metrics", "accuracy", "value"))
    shutil.copytree(forged, head / PLACE.parent / forged.name)
    code, said = check()
    assert code == 1 and "accuracy is 0.99" in said


@pytest.mark.parametrize("name", ["README.md", "leaderboard/tiny/notes.md", "a\nb"], ids=range(3))
@pytest.mark.slow
def test_what_is_outside_submissions_wants_a_label(check, head: Path, name: str) -> None:
    (head / name).parent.mkdir(parents=True, exist_ok=True)
    (head / name).write_text("other\n")
    code, said = check()
    assert code == 1 and 'the label "boards"' in said
    code, said = check(may=True)
    assert code == 0


@pytest.mark.slow
def test_a_board_with_an_accuracy_of_its_own_does_not_pass_with_the_label_either(check, head: Path) -> None:
    board = head / "leaderboard" / "tiny"
    path = next((board / "records").glob("*.parquet"))
    first, *others = store.read(board).values()
    better = first.metrics | {"accuracy": first.metrics["accuracy"].model_copy(update={"value": 0.95})}
    records = [first.model_copy(update={"metrics": better}), *others]
    table.write(path, table.table_of((record, 0) for record in records), table.beside(path))
    published.update(board)
    code, said = check(may=True)
    assert code == 1 and "contradict themselves" in said


@pytest.mark.slow
def test_another_picture_does_not_pass_with_the_label_either(check, head: Path) -> None:
    (head / "leaderboard" / "tiny" / "leaderboard.png").write_bytes(b"a secret")
    code, said = check(may=True)
    assert code == 1 and "leaderboard.png" in said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["--help", "line\nbreak $(touch done)"])
def test_odd_names_are_names(check, head: Path, tampered, name: str) -> None:
    shutil.copytree(tampered(lambda raw: raw["metrics"].clear()), head / PLACE.parent.parent / name / "1")
    code, said = check()
    assert code == 1 and "Usage:" not in said and "rejected" in said
    assert not list(head.parent.rglob("done"))


@pytest.mark.slow
def test_a_link_in_the_place_of_a_submission_is_rejected(check, head: Path) -> None:
    (head / PLACE).symlink_to("/etc")
    code, said = check()
    assert code == 1 and "rejected" in said


@pytest.mark.slow
def test_a_submission_that_is_taken_away_is_not_looked_for(check, head: Path) -> None:
    shutil.rmtree(head / "leaderboard" / "submissions")
    assert check()[0] == 0


@pytest.mark.slow
def test_more_files_than_anybody_submits_are_not_read(check, head: Path) -> None:
    (head / PLACE).mkdir(parents=True)
    for number in range(2001):
        (head / PLACE / str(number)).touch()
    code, said = check()
    assert code == 1 and "2001 files change" in said


def test_the_workflow_reads_and_no_more_and_its_actions_stay_what_they_are() -> None:
    text = WORKFLOW.read_text("utf-8")
    assert re.findall(r"^permissions:\n  (.*)\n(\S)", text, re.MULTILINE) == [("contents: read", "c")]
    assert "pull_request_target" not in text and "secrets" not in text.partition("\nname:")[2]
    assert "push:\n    branches: [main]" in text
    actions = re.findall(r"uses: (\S+)", text)
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert re.search(r"^/\.github/ @\S+", (ROOT / ".github" / "CODEOWNERS").read_text("utf-8"), re.MULTILINE)


def test_of_a_release_only_the_job_that_runs_no_code_may_write() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    actions = re.findall(r"uses: (\S+)", text)
    assert actions and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions)
    assert re.findall(r"^permissions:\n  (.*)\n(\S)", text, re.MULTILINE) == [("contents: read", "j")]
    build, _, attach = text.partition("\n  attach:\n")
    assert "write" not in build.partition("\nname:")[2] and attach.count("contents: write") == 1
    assert text.count("persist-credentials: false") == text.count("actions/checkout@")
    assert "checkout" not in attach and "pip" not in attach and "secrets" not in text
