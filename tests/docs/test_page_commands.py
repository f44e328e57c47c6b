"""Every shell command of README.md and docs/ runs, in .ci/run or here, or is marked as `not run`."""

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from pages import ROOT, blocks, code, commands, text_of

from sparsebench.cli import main

PAPERS = ("theory", "overfitting", "spatial", "sparse-tokens", "images")


def begins(words: str) -> list[str]:
    """Return the commands of all pages that begin with these words."""
    return [line.code for line in commands() if line.code.startswith(words)]


CHECK = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
README_CALLS = re.findall(r'^ *readme "(.*)"', CHECK, re.MULTILINE)
WORDS = [
    words.replace("$paper", paper) for words in README_CALLS for paper in (PAPERS if "$paper" in words else PAPERS[:1])
]
IN_CI = {begins(words)[0] for words in WORDS if begins(words)}
HERE = [line for line in commands() if not line.why_not and line.code not in IN_CI]
FILES = {
    "mine.py": ("README.md", 0), "stripes.py": ("docs/write/task.md", 0), "measured.py": ("docs/write/task.md", 1),
    "deep_sets.py": ("docs/write/model.md", 0), "plain_vit.py": ("docs/write/model.md", 1),
    "mean_token.py": ("docs/write/model.md", 2),
}  # fmt: skip
"""Files that pages show: the page, and the index of the Python block."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder like a user's, with a run, boards, networks, and the files of the pages."""
    shutil.copytree(ROOT / "tests" / "golden" / "store", tmp_path / "sparsebench-out")
    (tmp_path / "leaderboard").symlink_to(ROOT / "leaderboard")
    (tmp_path / "my-networks").symlink_to(ROOT / "sparsebench" / "plan" / "suites" / "networks")
    for name, (page, number) in FILES.items():
        assert code(page)[number].startswith(f"# {name}\n") or not number
        (tmp_path / name).write_text(code(page)[number], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.theory
@pytest.mark.parametrize("page", sorted({line.page for line in HERE}))
def test_the_other_commands_of_a_page_run_one_after_the_other(page: str, folder: Path) -> None:
    """`sparsebench run` is only a dry run here."""
    for line in HERE:
        program, *words = shlex.split(line.code)
        if line.page == page:
            assert program == "sparsebench", f"{line.code}: run it in .ci/run, or say what it lacks"
            done = CliRunner().invoke(main, [*words, *(["--dry-run"] if words[0] == "run" else [])])
            assert done.exit_code == 0, f"{line.code}: {done.output}"


@pytest.mark.theory
def test_the_page_of_commands_is_what_they_say() -> None:
    names: dict = {"__name__": "reference", "__file__": str(ROOT / ".ci" / "cli_reference.py")}
    exec(Path(names["__file__"]).read_text(encoding="utf-8"), names)
    assert text_of("docs/reference/cli.md") == names["page"](), "python .ci/cli_reference.py writes it anew"
    assert all(f"## {name}" in text_of("docs/reference/cli.md") for name in main.commands)
    assert isinstance(main, click.Group) and not blocks("docs/reference/cli.md", "bash")
