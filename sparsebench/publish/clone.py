"""The git commands that publish a submission from a clone: they know the clone's remotes, its fork among them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from sparsebench.errors import plain
from sparsebench.publish.submission import Verdict

ADDRESS = re.compile(
    r"(?:https?://|ssh://|git://)?(?:[^@/\s]+@)?(?P<host>[\w.-]+\.[a-z]+)(?::\d+)?[:/]"
    r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?:\.git)?/?"
)
"""The address of a repository as remotes have it. A user or token before the host is left out."""
THEN = "# then open a pull request, which runs the same checks"


class Repository(NamedTuple):
    """A repository on a server."""

    host: str
    owner: str
    name: str

    @property
    def path(self) -> str:
        """Host, owner and name, as `gh` reads them."""
        return f"{self.host}/{self.owner}/{self.name}"

    @property
    def page(self) -> str:
        """Its page."""
        return f"https://{self.path}"


def branch_of(verdict: Verdict) -> str:
    """Return the branch of a submission."""
    return f"submit-{verdict.strategy}-{verdict.version}"


def title_of(verdict: Verdict) -> str:
    """Return the title of a submission's commit and pull request."""
    suite = f" for suite {verdict.suite}" if verdict.suite else ""
    return f"Records of {verdict.strategy}{suite}"


def git_steps(verdict: Verdict) -> str:
    """Return the commands that publish a submission, and where the pull request is opened.

    Other lines are comments, so that all lines can be pasted into a shell. With remotes `upstream` and `origin`, origin
    is the fork. With origin alone nothing says whether it is a fork, so the commands for both are given.
    """
    folder, branch = Path(verdict.folder), branch_of(verdict)
    begin, place = _entry_of(folder, verdict)
    lines = [
        *begin,
        f"git switch -c {branch}",
        f"git add {shlex.quote(place)}",
        f"git commit -m {shlex.quote(title_of(verdict))}",
        f"git push -u origin {branch}",
    ]
    remotes = remotes_of(folder)
    origin, upstream = remotes.get("origin"), remotes.get("upstream")
    if origin and upstream:
        lines.append(f"{THEN}: {upstream.page}/compare/{origin.owner}:{branch}?expand=1")
    elif origin:
        lines.append(f"{THEN}: {origin.page}/pull/new/{branch}")
        lines.append(f"# if you may not push to {origin.page}, fork it there and push to your fork:")
        lines.append(f"# git remote add fork https://{origin.host}/YOUR-NAME/{origin.name}.git")
        lines.append(f"# git push -u fork {branch}")
        lines.append(f"{THEN}: {origin.page}/compare/YOUR-NAME:{branch}?expand=1")
    else:
        lines.append(f"{THEN}, on the page of your fork")
    return "\n".join(lines)


def _entry_of(folder: Path, verdict: Verdict) -> tuple[list[str], str]:
    """Return the lines that lead from the current folder to the clone of a submission, and the submission's place."""
    top = _git_output(folder, "rev-parse", "--show-toplevel").strip()
    if not top:
        place = f"leaderboard/submissions/{verdict.strategy}/{verdict.version}"
        return [f"# {plain(folder)} is in no clone: copy it to {place} of a clone of your fork, and there:"], place
    if Path.cwd().is_relative_to(top):
        return [], verdict.folder
    return [f"cd {shlex.quote(top)}"], os.path.relpath(folder.resolve(), top)


def remotes_of(folder: Path) -> dict[str, Repository]:
    """Return the remotes of the clone that has a folder, by name; {} outside a clone or without git.

    The folder itself may be missing.
    """
    remotes: dict[str, Repository] = {}
    for line in _git_output(folder, "remote", "--verbose").splitlines():
        name, _, rest = line.partition("\t")
        match = ADDRESS.fullmatch(rest.partition(" ")[0])
        if match is not None:
            remotes.setdefault(name, Repository(match["host"], match["owner"], match["name"]))
    return remotes


def _git_output(folder: Path, *words: str) -> str:
    """Return what git prints for a folder, which itself may be missing; "" outside a clone or without git."""
    command = ["git", "-C", str(nearest(folder)), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def nearest(folder: Path) -> Path:
    """Return a folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
