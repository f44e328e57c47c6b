"""The commands that submit prints: they name the fork, the upstream repository, and no token."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sparsebench.publish.clone import git_steps
from sparsebench.publish.submission import Verdict

UPSTREAM, FORK = "https://host.example/group/bench", "https://host.example/me/bench"


def steps(place: Path, **remotes: str) -> str:
    """Return the commands for a submission in a new clone with these remotes."""
    folder = place / "leaderboard" / "submissions" / "mine" / "quick-3-1"
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(place)], check=True)
    for name, address in remotes.items():
        subprocess.run(["git", "-C", str(place), "remote", "add", name, address], check=True)
    return git_steps(Verdict(str(folder), strategy="mine", version="quick-3-1", suite="quick 3"))


SPELLINGS = (
    ("https://host.example/me/bench.git", "git@host.example:group/bench.git"),
    ("https://secret-token@host.example/me/bench", "https://name:secret-token@host.example/group/bench.git"),
    ("ssh://git@host.example:22/me/bench.git", "https://host.example/group/bench/"),
)


@pytest.mark.parametrize(("origin", "upstream"), SPELLINGS)
def test_a_clone_of_a_fork_pushes_to_it_and_asks_upstream(tmp_path: Path, origin: str, upstream: str) -> None:
    text = steps(tmp_path, origin=origin, upstream=upstream)
    assert "git push -u origin submit-mine-quick-3-1" in text and "secret-token" not in text
    assert f"{UPSTREAM}/compare/me:submit-mine-quick-3-1" in text


def test_a_clone_with_origin_alone_is_told_both_ways(tmp_path: Path) -> None:
    text = steps(tmp_path, origin="https://host.example/group/bench.git")
    assert f"{UPSTREAM}/pull/new/submit-mine-quick-3-1" in text
    assert "git remote add fork https://host.example/YOUR-NAME/bench.git" in text


@pytest.mark.parametrize("remotes", [{}, {"origin": "/srv/bench"}, {"origin": "$(touch done)"}], ids=str)
def test_other_remotes_are_not_named(tmp_path: Path, remotes: dict[str, str]) -> None:
    text = steps(tmp_path, **remotes)
    assert "page of your fork" in text and "done" not in text and FORK not in text


@pytest.mark.parametrize("remotes", [{}, {"origin": FORK}, {"origin": FORK, "upstream": UPSTREAM}], ids=str)
def test_a_shell_can_read_all_lines(tmp_path: Path, remotes: dict[str, str]) -> None:
    for line in steps(tmp_path, **remotes).splitlines():
        assert line.startswith(("git ", "cd ", "# ")), line


@pytest.mark.parametrize("inside", [True, False])
def test_the_commands_work_as_printed_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    clone, fork = tmp_path / "a clone", tmp_path / "fork.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(fork)], check=True)
    monkeypatch.chdir(tmp_path)
    steps(clone, origin=str(fork))
    file = clone / "leaderboard" / "submissions" / "mine" / "quick-3-1" / "manifest.json"
    file.write_text("{}")
    folder = file.parent
    if inside:
        monkeypatch.chdir(clone)
        folder = folder.relative_to(clone)
    who = [f"GIT_{role}_{field}=a@b.example" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")]
    commands = git_steps(Verdict(str(folder), strategy="mine", version="quick-3-1", suite="quick 3"))
    subprocess.run(["env", *who, "sh", "-euc", commands], check=True, capture_output=True)
    branch = "submit-mine-quick-3-1"
    listed = ["git", "-C", str(fork), "ls-tree", "-r", "--name-only", branch]
    published = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    assert published == ["leaderboard/submissions/mine/quick-3-1/manifest.json"]


def test_outside_a_clone_there_are_commands_too(tmp_path: Path) -> None:
    text = git_steps(Verdict(str(tmp_path / "none"), strategy="mine", version="1"))
    assert "in no clone" in text and "git add leaderboard/submissions/mine/1" in text and "git push" in text
