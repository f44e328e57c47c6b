"""The pull request of a submission: its branch, commit and request, by git and the program `gh`.

The commit follows the newest one of the repository that gets the request, and has the submission alone. It is made in
an index of its own: the branch of the clone, its staged files and its other files stay as they are. A second call
finishes what an earlier one began, or adds to the branch what has changed since.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sparsebench.board.tables import markdown
from sparsebench.errors import UserError, few, plain
from sparsebench.publish.about import About
from sparsebench.publish.clone import ADDRESS, Repository, branch_of, nearest, remotes_of, title_of
from sparsebench.publish.submission import Verdict, files_of

MAY_PUSH = ("ADMIN", "MAINTAIN", "WRITE")
UPSTREAM, FORK, ORIGIN = "upstream", "fork", "origin"
MOST_SECONDS = 600
AGAIN = "mend the cause; the same command then goes on from here"
NOT_ASKED = {"GIT_TERMINAL_PROMPT": "0", "GH_PROMPT_DISABLED": "1", "GH_NO_UPDATE_NOTIFIER": "1"}
SECRET = re.compile(r"(?<=//)[^/@\s]+@|\b(?:gh[a-z]_|github_pat_)\w+")
"""What programs may repeat of a token: a user before the host of an address, and the beginnings of GitHub's tokens."""


class Places(NamedTuple):
    """Where a branch is pushed, and where its request is opened.

    Attributes:
        target: the repository that gets the request.
        base: its remote.
        head: the repository that gets the branch.
        remote: its remote.
    """

    target: Repository
    base: str
    head: Repository
    remote: str


def obstacle(folder: Path) -> str:
    """Return why no pull request can be made from here, or ""."""
    if shutil.which("gh") is None:
        return "the program gh is not installed"
    origin = remotes_of(folder).get(ORIGIN)
    if origin is None:
        return f"{folder} is in no clone with a remote `{ORIGIN}` on a server"
    if _run(["gh", "auth", "status", "--hostname", origin.host], folder).returncode:
        return f"gh is not logged in to {origin.host} (`gh auth login`)"
    return ""


def places_of(folder: Path, *, prepare: bool) -> Places:
    """Return where the branch and the request of a submission go.

    With a remote `upstream`, origin is the fork. Otherwise origin is a fork if its page says so, or the repository
    itself, with the fork as remote `fork`, unless the user may push to it.

    Args:
        folder: the submission, in a clone.
        prepare: whether a missing fork is made, and missing remotes are added.

    Raises:
        UserError: git or gh fails, or a remote that is to be added is there with another kind of address.
    """
    remotes = remotes_of(folder)
    origin = remotes[ORIGIN]
    if UPSTREAM in remotes:
        return Places(remotes[UPSTREAM], UPSTREAM, origin, ORIGIN)
    if FORK in remotes:
        return Places(origin, ORIGIN, remotes[FORK], FORK)

    about = json.loads(_gh(folder, "repo", "view", origin.path, "--json", "parent,viewerPermission"))
    if about["parent"]:
        target = Repository(origin.host, about["parent"]["owner"]["login"], about["parent"]["name"])
        _check_name(folder, UPSTREAM)
        if prepare:
            _add_remote(folder, UPSTREAM, target)
        return Places(target, UPSTREAM, origin, ORIGIN)
    if about["viewerPermission"] in MAY_PUSH:
        return Places(origin, ORIGIN, origin, ORIGIN)
    _check_name(folder, FORK)
    return Places(origin, ORIGIN, _fork_of(folder, origin, prepare), FORK)


def _check_name(folder: Path, name: str) -> None:
    """Raise UserError if there is a remote of this name. Remotes with addresses on a server are known before."""
    if name not in _git(folder, "remote").splitlines():
        return
    address = _git(folder, "remote", "get-url", name, fails="no address")
    raise UserError(
        f"the address of the remote `{name}` is no repository on a server",
        got=plain(SECRET.sub("", address), 100),
        next_step=f"rename it with `git remote rename {name} NAME`, or change it with `git remote set-url`",
    )


def _fork_of(folder: Path, origin: Repository, prepare: bool) -> Repository:
    """Return the user's fork of a repository. With `prepare` it is made, if there is none, and added as a remote."""
    if not prepare:
        return origin._replace(owner=_gh(folder, "api", "--hostname", origin.host, "user", "--jq", ".login"))
    # This call returns the fork if there is one already.
    call = ["--hostname", origin.host, "--method", "POST", f"repos/{origin.owner}/{origin.name}/forks"]
    owner, _, name = _gh(folder, "api", *call, "--jq", ".full_name").partition("/")
    fork = Repository(origin.host, owner, name)
    _add_remote(folder, FORK, fork)
    return fork


def _add_remote(folder: Path, name: str, repository: Repository) -> None:
    """Add a remote, by ssh or https like origin, without the user or token in origin's address."""
    address = _git(folder, "remote", "get-url", ORIGIN)
    match = ADDRESS.fullmatch(address)
    if match is None or address.startswith("http"):
        address = f"{repository.page}.git"
    else:
        address = f"{address[: match.start('owner')]}{repository.owner}/{repository.name}.git"
    _git(folder, "remote", "add", name, address)


def request(verdict: Verdict, about: About, places: Places) -> str:
    """Commit a submission to its branch, push it, and return the address of its pull request, which may exist already.

    Raises:
        UserError: git or gh fails, or the repository has this submission already.
    """
    folder, branch = Path(verdict.folder), branch_of(verdict)
    _fetch(folder, places)
    _commit(folder, branch, places.base, title_of(verdict))
    _push(folder, branch, places)
    target = places.target.path
    listed = _gh(folder, "pr", "list", "--repo", target, "--head", branch, "--json", "url,headRepositoryOwner")
    for entry in json.loads(listed):
        if entry["headRepositoryOwner"]["login"].lower() == places.head.owner.lower():
            return str(entry["url"])
    head = branch if places.head == places.target else f"{places.head.owner}:{branch}"
    words = ["pr", "create", "--repo", target, "--head", head, "--title", title_of(verdict), "--body-file", "-"]
    return _gh(folder, *words, text=body_of(verdict, about)).splitlines()[-1]


def body_of(verdict: Verdict, about: About) -> str:
    """Return the text of a pull request: what is submitted, by whom, and how it is checked."""
    suite = f"suite {verdict.suite}" if verdict.suite else "cells without a suite"
    lines = [
        f"{verdict.strategy} {verdict.version}, {suite}, {verdict.records} records",
        f"by {few(about.authors, 10, 100)}" if about.authors else "",
        f"{verdict.badge}: {verdict.meaning}",
    ]
    texts = [markdown(plain(line, 500)) for line in lines if line]
    texts += [f"{name}: <{value}>" for name, value in (("paper", about.paper), ("code", about.code)) if value]
    return "".join(f"- {text}\n" for text in texts)


def _commit(folder: Path, branch: str, base: str, message: str) -> None:
    """Commit a submission to its branch, which begins at the newest commit of a remote, as it was just fetched."""
    newest = _git(folder, "rev-parse", "FETCH_HEAD")
    tree = _tree_with(folder, newest)
    if tree == _tree(folder, newest):
        raise UserError(f"{folder} is published already: the newest commit of `{base}` has the same files")
    name = f"refs/heads/{branch}"
    before = _run(["git", "rev-parse", "--quiet", "--verify", name], folder).stdout.strip()
    if before:
        tree = _tree_with(folder, before)
        if tree == _tree(folder, before):
            return
    commit = _git(folder, "commit-tree", tree, "-p", before or newest, "-m", message)
    _git(folder, "update-ref", name, commit)
    if _git(folder, "symbolic-ref", "--quiet", "HEAD", fails="") == name:
        _git(folder, "reset", "--quiet", "--", ".")  # the index of the clone is then behind its branch


def _tree(folder: Path, commit: str) -> str:
    return _git(folder, "rev-parse", f"{commit}^{{tree}}")


def _tree_with(folder: Path, commit: str) -> str:
    """Return the tree of a commit in which the submission's files are those of the folder."""
    files = [str(path.absolute()) for path in files_of(folder)]
    with tempfile.TemporaryDirectory() as place:
        index = {"GIT_INDEX_FILE": str(Path(place, "index"))}
        _git(folder, "read-tree", commit, more=index)
        # Without --force, git refuses files that differ from both this index and HEAD.
        _git(folder, "rm", "-r", "--cached", "--force", "--quiet", "--ignore-unmatch", "--", ".", more=index)
        _git(folder, "add", "--force", "--", *files, more=index)
        return _git(folder, "write-tree", more=index)


def _fetch(folder: Path, places: Places) -> None:
    """Fetch the newest commit of the repository that gets the request."""
    _git(folder, *_login(places.target.host), "fetch", "--quiet", places.base, "HEAD")


def _push(folder: Path, branch: str, places: Places) -> None:
    """Push a branch to the repository that gets it."""
    ref = f"refs/heads/{branch}"
    _git(folder, *_login(places.head.host), "push", "--quiet", places.remote, f"{ref}:{ref}")


def _login(host: str) -> Sequence[str]:
    """Return the options of git that take the credentials of gh over https."""
    key = f"credential.https://{host}.helper"
    return "-c", f"{key}=", "-c", f"{key}=!gh auth git-credential"


def _gh(folder: Path, *words: str, text: str = "") -> str:
    return _output(["gh", *words], folder, text=text)


def _git(folder: Path, *words: str, more: Mapping[str, str] = {}, fails: str | None = None) -> str:
    return _output(["git", *words], folder, more=more, fails=fails)


def _output(
    command: Sequence[str], folder: Path, *, text: str = "", more: Mapping[str, str] = {}, fails: str | None = None
) -> str:
    """Return what a program prints, or `fails` if it is given and the program fails. Raise UserError if it fails."""
    done = _run(command, folder, text=text, more=more)
    if done.returncode and fails is None:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons = [line for line in lines if line.startswith(("fatal:", "error:"))] or lines[-1:] or ["no reason"]
        words = " ".join(word for word in command[1:4] if not word.startswith("-"))
        raise UserError(f"`{command[0]} {words}` failed: {plain(SECRET.sub('', reasons[0]), 300)}", next_step=AGAIN)
    return (fails or "") if done.returncode else done.stdout.strip()


def _run(
    command: Sequence[str], folder: Path, *, text: str = "", more: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder, without questions. Raise UserError if it cannot start or takes too long."""
    env = {**os.environ, **NOT_ASKED, **more}
    try:
        return subprocess.run(
            command,
            cwd=nearest(folder),
            env=env,
            input=text,
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"`{command[0]}` failed: {type(error).__name__}", next_step=AGAIN) from error
