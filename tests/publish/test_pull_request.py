"""Pull requests of submissions, with real git, bare repositories on this machine, and a stand-in for gh."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import call

from sparsebench.publish.submission import files_of

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_picture", "timed_once")]

SSH = """#!/bin/sh
# As `ssh host command`: git's command, in the folder of the server.
for last; do :; done
cd "$SERVER" && exec sh -c "$last"
"""
HOST = "git@host.example:"
HOSTILE = '<img src=x>|[x](https://bad.example)`$HOME`"; $(touch done)'


class Server:
    """Bare repositories, and the clone of a user, with ssh and gh that know them."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch):
        self.place, self.clone = place / "server", place / "clone"
        programs = place / "bin"
        ssh, self.gh = programs / "ssh-here", programs / "gh"
        git = shutil.which("git")
        assert git is not None
        patch.setenv("PATH", f"{programs}:{Path(git).parent}:/bin")
        patch.setenv("GIT_SSH_COMMAND", str(ssh))
        patch.setenv("SERVER", str(self.place))
        for role in ("AUTHOR", "COMMITTER"):
            patch.setenv(f"GIT_{role}_NAME", "Ada One")
            patch.setenv(f"GIT_{role}_EMAIL", "ada@a.example")

    def prepare(self) -> None:
        """Write the programs, and make the repository and its clone."""
        ssh = self.gh.with_name("ssh-here")
        self.gh.parent.mkdir(parents=True)
        self.place.mkdir()
        ssh.write_text(SSH)
        self.gh.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -IS "{Path(__file__).with_name("stand_in_gh.py")}" "$@"\n'
        )
        for path in (ssh, self.gh):
            path.chmod(0o755)
        bare = self.place / "group" / "bench.git"
        self.git("init", "--quiet", "--bare", "--initial-branch=main", str(bare), at=self.place)
        self.git("clone", "--quiet", f"{HOST}group/bench.git", str(self.clone), at=self.place)
        (self.clone / "README.md").write_text("the benchmark\n")
        self.git("switch", "--quiet", "-c", "main")
        self.git("add", ".")
        self.git("commit", "--quiet", "-m", "first")
        self.git("push", "--quiet", "origin", "main")
        self.permit("READ")

    def git(self, *words: str, at: Path | None = None) -> str:
        done = subprocess.run(["git", *words], cwd=at or self.clone, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def permit(self, permission: str, repository: str = "group bench", parent: Any = None) -> None:
        content = json.dumps({"parent": parent, "viewerPermission": permission})
        (self.place / f"host.example {repository}.json").write_text(content)

    def requests(self) -> list[dict[str, Any]]:
        path = self.place / "requests.json"
        return list(json.loads(path.read_text())) if path.exists() else []

    def changed(self, repository: str, branch: str) -> list[str]:
        """Return the files in which a branch differs from the newest commit of the group's repository."""
        place = self.place / f"{repository}.git"
        newest = self.git("rev-parse", "main", at=self.place / "group" / "bench.git")
        return self.git("diff", "--name-only", newest, branch, at=place).splitlines()

    def submit(self, out: Path, *words: str) -> Any:
        to = self.clone / "leaderboard" / "submissions"
        return call("submit", out, "--to", to, "--author", "Ada One", "--pull-request", *words)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the repository and its clone; do not write to it."""
    place = tmp_path_factory.mktemp("prepared") / "place"
    with pytest.MonkeyPatch.context() as patch:
        Server(place, patch).prepare()
    return place


@pytest.fixture
def server(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return a server with copies of the repository and its clone."""
    return Server(Path(shutil.copytree(prepared, tmp_path / "place")), monkeypatch)


def published(server: Server) -> tuple[Path, list[str]]:
    """Return the submission in the clone, and its files as git names them."""
    (folder,) = (server.clone / "leaderboard" / "submissions" / "norm").iterdir()
    return folder, [path.relative_to(server.clone).as_posix() for path in files_of(folder)]


def test_a_fork_is_made_and_the_request_has_the_submission_alone(server: Server, few_out: Path) -> None:
    (server.clone / "README.md").write_text("not yet finished\n")
    (server.clone / "staged.txt").write_text("mine")
    server.git("add", "staged.txt")
    before = server.git("status", "--short", "README.md", "staged.txt")
    made = server.submit(few_out, "--note", HOSTILE)
    assert made.exit_code == 0, made.output
    (request,) = server.requests()
    assert made.stdout == f"{request['url']}\n" and request["headRepositoryOwner"]["login"] == "me"
    _, files = published(server)
    assert server.changed("me/bench", request["branch"]) == files
    assert server.git("branch", "--show-current") == "main"
    assert server.git("status", "--short", "README.md", "staged.txt") == before
    assert "Ada One" in request["body"] and not (server.clone / "done").exists()


def test_a_second_call_adds_what_has_changed_and_asks_once(server: Server, few_out: Path) -> None:
    server.submit(few_out)
    folder, _ = published(server)
    assert server.submit(few_out).exit_code == 0
    (request,) = server.requests()
    branch = request["branch"]
    assert server.git("rev-list", "--count", f"main..{branch}") == "1"
    assert call("withdraw", folder, "--reason", "wrong seeds").exit_code == 0
    assert server.submit(few_out).stdout == f"{request['url']}\n"
    assert f"{folder.relative_to(server.clone).as_posix()}/withdrawn.json" in server.changed("me/bench", branch)
    server.git("clean", "--quiet", "-fd", "leaderboard")
    server.git("switch", "--quiet", branch)  # as after the commands that are printed
    (folder / "withdrawn.json").unlink()
    assert server.submit(few_out).exit_code == 0 and server.git("status", "--short") == ""
    assert server.changed("me/bench", branch) == published(server)[1] and len(server.requests()) == 1


def test_a_later_commit_has_what_has_changed_in_the_submission_alone(server: Server, few_out: Path) -> None:
    """Not what others have added to the repository meanwhile."""
    server.permit("WRITE")
    server.submit(few_out)
    (request,) = server.requests()
    (server.clone / "news.txt").write_text("by others\n")
    server.git("add", "news.txt")
    server.git("commit", "--quiet", "-m", "news")
    server.git("push", "--quiet", "origin", "main")
    folder, _ = published(server)
    call("withdraw", folder, "--reason", "wrong seeds")
    assert server.submit(few_out).exit_code == 0
    note = (folder / "withdrawn.json").relative_to(server.clone).as_posix()
    assert server.git("diff", "--name-only", f"{request['branch']}~1", request["branch"]) == note


@pytest.mark.parametrize("step", ["auth status", "repo view", "api POST", "pr list", "pr create", "push"])
def test_where_a_step_fails_the_same_command_goes_on(server: Server, few_out: Path, step: str) -> None:
    hook = server.place / "group" / "bench.git" / "hooks" / "pre-receive"
    if step == "push":
        server.permit("WRITE")
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(0o755)
    else:
        (server.place / "fails").write_text(step)
    broken = server.submit(few_out)
    assert "secretToken" not in broken.output and not server.requests()
    if step == "auth status":  # as without gh
        assert broken.exit_code == 0 and "git push" in broken.stdout
    else:
        assert broken.exit_code == 2 and broken.stderr.splitlines()[-1].startswith("Error: "), broken.output
    (server.place / "fails").unlink(missing_ok=True)
    hook.unlink(missing_ok=True)
    done = server.submit(few_out)
    assert done.exit_code == 0 and len(server.requests()) == 1, done.output


def test_remotes_say_where_branch_and_request_go(server: Server, few_out: Path) -> None:
    shutil.copytree(server.place / "group", server.place / "me")
    parent = {"owner": {"login": "group"}, "name": "bench"}
    server.permit("ADMIN", "me bench", parent)
    server.git("remote", "set-url", "origin", f"{HOST}me/bench.git")
    assert server.submit(few_out).exit_code == 0  # origin is a fork: upstream is added
    assert server.git("remote", "get-url", "upstream") == f"{HOST}group/bench.git"
    (request,) = server.requests()
    assert request["url"].startswith("https://host.example/group/bench/") and server.changed(
        "me/bench", request["branch"]
    )


def test_who_may_push_needs_no_fork(server: Server, out: Path) -> None:
    server.permit("WRITE")
    assert server.submit(out).exit_code == 0
    (request,) = server.requests()
    assert "suite tiny" in request["body"]
    assert server.changed("group/bench", request["branch"]) and not (server.place / "me").exists()


def test_what_is_merged_is_not_asked_for_again(server: Server, few_out: Path) -> None:
    server.permit("WRITE")
    server.submit(few_out)
    (request,) = server.requests()
    bare = server.place / "group" / "bench.git"
    server.git("update-ref", "refs/heads/main", request["branch"], at=bare)
    for clone in (bare, server.clone):
        server.git("branch", "--quiet", "-D", request["branch"], at=clone)
    (server.place / "requests.json").unlink()
    made = server.submit(few_out)
    assert made.exit_code == 2 and "published already" in made.stderr and not server.requests()


@pytest.mark.parametrize("why", ["gh is not installed", "not logged in", "no clone"])
def test_without_gh_the_commands_are_printed(server: Server, few_out: Path, tmp_path: Path, why: str) -> None:
    server.git("remote", "add", "upstream", f"{HOST}others/bench.git")
    to = server.clone / "leaderboard" / "submissions"
    if why == "gh is not installed":
        server.gh.unlink()
    elif why == "not logged in":
        (server.place / "logged-out").write_text("")
    else:
        to = tmp_path / "elsewhere"
    made = call("submit", few_out, "--to", to, "--author", "Ada One", "--pull-request")
    assert made.exit_code == 0 and "git push -u origin" in made.stdout, made.output
    if why != "no clone":
        assert why in made.stderr.replace("the program ", "") and "others/bench/compare/group:" in made.stdout


def test_a_dry_run_writes_and_sends_nothing(server: Server, few_out: Path) -> None:
    made = server.submit(few_out, "--dry-run")
    assert made.exit_code == 0, made.output
    assert "https://host.example/me/bench" in made.stdout and "https://host.example/group/bench" in made.stdout
    assert "manifest.json" in made.stdout and "Ada One" in made.stdout
    assert server.git("status", "--short") == "" and server.git("remote") == "origin"
    calls = (server.place / "calls.txt").read_text()
    assert "POST" not in calls and "create" not in calls and server.git("branch", "--list", "submit-*") == ""


def test_a_submission_with_other_files_is_committed_again(server: Server, few_out: Path) -> None:
    server.permit("WRITE")
    assert server.submit(few_out).exit_code == 0
    (request,) = server.requests()
    server.git("switch", "--quiet", "--force", request["branch"])
    server.git("switch", "--quiet", "-c", "mine")  # HEAD has the files, and the branch then differs from it
    folder, _ = published(server)
    note = folder / "withdrawn.json"
    for text in ("{}", '{"reason": "wrong seeds"}', '{"reason": "wrong data"}'):
        note.write_text(text)
        server.git("add", "--force", str(note))
        made = server.submit(few_out)
        assert made.exit_code == 0, made.output
    branch = server.git("show", f"{request['branch']}:{note.relative_to(server.clone).as_posix()}")
    assert branch == '{"reason": "wrong data"}' and len(server.requests()) == 1


def test_what_is_merged_as_one_commit_is_not_asked_for_again(server: Server, few_out: Path) -> None:
    server.permit("WRITE")
    server.submit(few_out)
    (request,) = server.requests()
    bare = server.place / "group" / "bench.git"
    squashed = server.git("commit-tree", f"{request['branch']}^{{tree}}", "-p", "main", "-m", "merged", at=bare)
    server.git("update-ref", "refs/heads/main", squashed, at=bare)
    (server.place / "requests.json").unlink()  # it is closed
    made = server.submit(few_out)  # the branch is still in the clone
    assert made.exit_code == 2 and "published already" in made.stderr and not server.requests()


@pytest.mark.parametrize("name", ["fork", "upstream"])
def test_a_remote_that_is_on_no_server_is_named(server: Server, few_out: Path, name: str) -> None:
    if name == "upstream":
        server.permit("READ", parent={"owner": {"login": "others"}, "name": "bench"})
    server.git("remote", "add", name, "../elsewhere")
    made = server.submit(few_out)
    assert made.exit_code == 2 and name in made.stderr and "../elsewhere" in made.stderr
    assert not server.requests() and not (server.place / "me").exists()
    server.git("remote", "rename", name, "mirror")
    (server.place / "others").symlink_to(server.place / "group")
    assert server.submit(few_out).exit_code == 0 and server.requests()


def test_git_gets_the_credentials_of_gh_wherever_it_speaks_to_a_server(
    server: Server, few_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.json"
    with monkeypatch.context() as patch:
        patch.setenv("GIT_TRACE2_EVENT", str(trace))
        assert server.submit(few_out).exit_code == 0
    starts = [json.loads(line) for line in trace.read_text().splitlines() if '"event":"start"' in line]
    calls = [
        start["argv"] for start in starts if {"origin", "fork"} & set(start["argv"]) and "--quiet" in start["argv"]
    ]
    assert {word for call_ in calls for word in call_} >= {"fetch", "push"}
    assert all("credential.https://host.example.helper=!gh auth git-credential" in call_ for call_ in calls)
