"""The board of all submissions in a folder: one table for each suite and version, beside the maintainers' rows.

The maintainers' rows are those of the boards beside the folder of submissions, as leaderboard/quick is beside
leaderboard/submissions. Submissions that are rejected, withdrawn or replaced have no rows; notes name them.
"""

from __future__ import annotations

import datetime
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import Field, ValidationError

from sparsebench import files
from sparsebench.board.board import Board
from sparsebench.board.published import NAME
from sparsebench.board.shared import MAINTAINERS, Part, Shared, one_board, report, shared
from sparsebench.board.tables import Report
from sparsebench.errors import UserError, few, plain, reason_of
from sparsebench.plan import suite as suites
from sparsebench.publish.about import LONGEST
from sparsebench.publish.submission import Manifest, Verdict, manifest_of, share_author, submissions_in, verify
from sparsebench.records import manifests
from sparsebench.records.manifests import MANIFEST, OWN, SuiteEntry
from sparsebench.records.record import Value, canonical

TITLE = "Submissions to the token sparsification leaderboard"
"""Title of the page of all submissions."""
WITHDRAWN = "withdrawn.json"
MOST_BYTES = 10_000
"""Largest size of the file WITHDRAWN."""
MOST_AUTHORS = 2
"""Largest number of authors that a row names."""
Cells = tuple[str, int, tuple[str, ...]]
"""A suite's name, version and settings: submissions with equal ones have the same cells."""


class Withdrawal(Value):
    """Why and when a submission was withdrawn."""

    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    reason: str = Field(max_length=LONGEST["note"])


class Submission(NamedTuple):
    """A submission below a folder. Without a valid manifest, it is only rejected."""

    folder: Path
    verdict: Verdict
    manifest: Manifest | None
    suite: SuiteEntry | None


def is_collection(folder: Path) -> bool:
    """Return whether a folder has submissions and is no submission and no run's folder itself."""
    is_one = (folder / MANIFEST).is_file() or (folder / "records").is_dir()
    return not is_one and any(folder.glob(f"*/*/{MANIFEST}"))


def withdraw(folder: Path, reason: str) -> Path:
    """Write that a submission is withdrawn, and return the file. Its other files stay.

    Raises:
        UserError: the folder is no submission, or the reason is not one line of printable characters.
    """
    manifest_of(folder)
    reason = reason.strip()
    if not reason or not reason.isprintable() or len(reason) > LONGEST["note"]:
        raise UserError(
            "--reason", got=f"'{plain(reason, 80)}'", allowed=f"one line of 1 to {LONGEST['note']} characters"
        )
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    content = Withdrawal(date=today, reason=reason).model_dump(mode="json")
    files.write_whole(folder / WITHDRAWN, (canonical(content) + "\n").encode())
    return folder / WITHDRAWN


def withdrawal_of(folder: Path) -> str:
    """Return when and why a submission was withdrawn, in one line; "" if it was not."""
    path = folder / WITHDRAWN
    if not os.path.lexists(path):
        return ""
    try:
        withdrawal = Withdrawal.model_validate_json(files.own_content(path, MOST_BYTES))
    except (OSError, UserError, ValidationError) as error:
        return f"{WITHDRAWN} cannot be read: {reason_of(error)}"
    return f"withdrawn on {withdrawal.date}: {plain(withdrawal.reason, LONGEST['note'])}"


class Collection(NamedTuple):
    """The boards of all submissions in a folder.

    Attributes:
        boards: one or more for each suite and version.
        notes: lines on submissions without rows.
    """

    boards: Sequence[Shared]
    notes: Sequence[str]

    def report(self, *, by_task: bool = False) -> Report:
        """Return the tables of all boards."""
        return report(self.boards, self.notes, by_task)

    def board(self) -> Board:
        """Return all boards as one, for the page."""
        return one_board(self.boards, self.notes)


def collect(folder: Path) -> Collection:
    """Return the boards of the submissions in a folder, and of the maintainers' boards of the same suites beside it."""
    every = [_read(path) for path in submissions_in(folder)]
    notes: list[str] = []
    groups: dict[Cells, list[Part]] = defaultdict(list)
    for one in sorted(every, key=lambda one: (one.manifest.date if one.manifest else "", str(one.folder))):
        reason = _absence(one, every)
        if reason:
            notes.append(f"{_name(one)}: {reason}")
        elif one.manifest is not None and one.suite is not None:
            groups[_cells(one.suite)].append(_part(one, one.manifest))

    of_maintainers = list(_maintained(folder))
    boards: list[Shared] = []
    for cells, parts in sorted(groups.items()):
        beside = [
            Part(path, values={"authors": MAINTAINERS}) for path, suite in of_maintainers if _cells(suite) == cells
        ]
        boards += shared(_title(cells, list(groups)), [*beside, *parts])
    return Collection(boards, notes)


def _read(path: Path) -> Submission:
    verdict, manifest, suite = verify(path, placed=True), None, None
    with suppress(UserError, OSError, ValueError):
        manifest = manifest_of(path)
        (suite,) = manifests.suites(path)
    return Submission(path, verdict, manifest, suite)


def _name(one: Submission) -> str:
    """Return the name of a submission in notes: strategy, version and authors."""
    about = one.manifest.about if one.manifest else None
    by = f", by {few(about.authors, MOST_AUTHORS, 60)}" if about and about.authors else ""
    return f"{plain(one.folder.parent.name, 60)}/{plain(one.folder.name, 100)}{by}"


def _absence(one: Submission, every: Iterable[Submission]) -> str:
    """Return why a submission has no rows, or ""."""
    if one.verdict.badge == "rejected" or one.manifest is None or one.suite is None:
        return f"rejected: {few(one.verdict.why, 1) or 'it cannot be read'}"
    withdrawal = withdrawal_of(one.folder)
    if withdrawal:
        return withdrawal
    for other in every:
        if other.verdict.badge == "rejected" or other.manifest is None or other.folder == one.folder:
            continue
        same = other.manifest.strategy == one.manifest.strategy and other.manifest.replaces == one.folder.name
        if same and share_author(other.manifest.about, one.manifest.about):
            return f"replaced by {plain(other.folder.name, 100)}"
    return ""


def _part(one: Submission, manifest: Manifest) -> Part:
    about, revision = manifest.about, manifest.plugin.identity
    authors = few(about.authors, MOST_AUTHORS, 100) if about.authors else "not named"
    values = {
        "authors": authors,
        "replayed": "; ".join(one.verdict.replays),
        "date": manifest.date,
        "paper": about.paper,
        "code": about.code,
        "licence": about.licence,
        "affiliation": about.affiliation,
        "note": about.note,
    }
    origins = [*about.authors[:1], revision]
    return Part(one.folder, manifest.strategy, origins, one.verdict.badge, values)


def _cells(suite: SuiteEntry) -> Cells:
    return suite.name, suite.version, suite.settings


def _maintained(folder: Path) -> Iterable[tuple[Path, SuiteEntry]]:
    """Yield the boards beside a folder, with each suite that they have."""
    for path in sorted(folder.resolve().parent.glob("*")):
        if (path / NAME).is_file() and (path / "records").is_dir():
            for suite in manifests.suites(path):
                if suite.name != OWN:
                    yield path, suite


def _title(cells: Cells, every: Sequence[Cells]) -> str:
    """Return the title of a table: suite, version and state; also the number of cells if others have other cells."""
    name, version, settings = cells
    same_version = [other for other in every if other[:2] == cells[:2]]
    place = sorted(same_version).index(cells) + 1
    which = f", data or networks {place} of {len(same_version)}" if len(same_version) > 1 else ""
    if name == OWN:
        return f"without a suite, {len(settings)} settings{which}"
    state = ""
    if not suites.exists(name):
        state = " (this version of sparsebench has no such suite)"
    elif (current := suites.load(name).version) != version:
        state = f" (retired: the current version is {current})"
    return plain(f"suite {name} {version}{state}{which}")
