"""Reports of the conformance checks of a strategy: as text, as files OUT/checks/<hash>.json, and as badges on boards.

This module does not import torch, because boards are made from reports and records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from sparsebench import __version__, files
from sparsebench.errors import plain
from sparsebench.records.record import Origin, Value, canonical, digest
from sparsebench.strategy.spec import label

if TYPE_CHECKING:
    from sparsebench.records.store import Store

Group = Literal["required", "recommended", "informative"]
GROUPS: tuple[Group, ...] = get_args(Group)
Status = Literal["passed", "failed", "expected", "unsupported", "timeout", "crashed", "not run"]
SIGNS = {"passed": "ok", "failed": "FAILED", "timeout": "TIMEOUT", "crashed": "CRASHED"}
"""The words for some statuses in a text."""
HARMLESS = frozenset({"passed", "expected", "unsupported"})
BROKEN = frozenset({"failed", "timeout", "crashed"})
CHECKS, REMARK = "checks", "checks_remark"
"""The columns of a strategy's badge and remark; rows have them if reports are stored."""
UNCHECKED = "unchecked"
CHANGED = "unchecked (changed since)"
SEVERAL = "unchecked (several versions)"


class Outcome(Value):
    """The outcome of one check.

    Attributes:
        check: name of the check.
        says: the rule, which holds if the check passes.
        status: "expected" for a failure that the strategy declares, "unsupported" if there is nothing to check,
            "timeout" if the process had to be ended, "crashed" if it ended itself.
        message: the reason, or a measured value.
    """

    check: str
    group: Group
    says: str
    status: Status = "not run"
    message: str = ""
    seconds: float = 0.0

    def after(self, status: Status, message: str = "", seconds: float = 0.0) -> Outcome:
        """Return the outcome after the check was run."""
        return self.model_copy(update={"status": status, "message": message, "seconds": round(seconds, 3)})


class Report(Value):
    """The outcomes of all checks of a strategy with its parameters.

    Attributes:
        origin: the origin of the strategy, with its revision.
        versions: versions of sparsebench, torch and timm.
    """

    schema_version: Literal[1] = 1
    strategy: str
    params: Mapping[str, Any] = {}
    kind: str = ""
    site: str = ""
    origin: Origin
    versions: Mapping[str, str] = {}
    outcomes: tuple[Outcome, ...]

    @property
    def conforms(self) -> bool:
        """Whether no required check failed, except those that the strategy declares."""
        return all(o.status in HARMLESS for o in self.outcomes if o.group == "required")

    @property
    def undecided(self) -> Outcome | None:
        """The first check that still has to run, or None. A check that is skipped has a message with the reason."""
        return next((o for o in self.outcomes if o.status == "not run" and not o.message), None)

    @property
    def label(self) -> str:
        """The label of the strategy in tables, see `sparsebench.strategy.spec.label`."""
        return label(self.strategy, self.params)

    def with_outcome(self, outcome: Outcome) -> Report:
        """Return the report with the outcome of one check replaced."""
        new = tuple(outcome if old.check == outcome.check else old for old in self.outcomes)
        return self.model_copy(update={"outcomes": new})

    @property
    def badge(self) -> str:
        """Whether the strategy conforms, and how many checks failed."""
        required = [o for o in self.outcomes if o.group == "required"]
        failed = sum(o.status in BROKEN for o in required)
        expected = sum(o.status == "expected" for o in self.outcomes)
        verdict = "passes" if self.conforms else f"fails {failed} of {len(required)} required"
        return verdict + (f", expected failures: {expected}" if expected else "")

    @property
    def remark(self) -> str:
        """The failed checks by group, the expected failures, and how many checks were not run."""
        remarks = []
        for group in GROUPS[:2]:
            broken = [o for o in self.outcomes if o.group == group and o.status in BROKEN]
            if names := [o.check if o.status == "failed" else f"{o.check} ({o.status})" for o in broken]:
                remarks.append(f"fails {group} {', '.join(names)}")
        if expected := [o.check for o in self.outcomes if o.status == "expected"]:
            remarks.append(f"fails, as it declares, {', '.join(expected)}")
        if not self.conforms and (left := sum(o.status == "not run" for o in self.outcomes)):
            remarks.append(f"{left} not run for that")
        return plain("; ".join(remarks), 1000)


def _summary(report: Report) -> str:
    """Return the verdict and the number of checks of each group by status, in one line."""
    parts = []
    for group in GROUPS:
        counts = Counter(outcome.status for outcome in report.outcomes if outcome.group == group)
        other = [f"{counts[status]} {status}" for status in get_args(Status)[1:] if counts[status]]
        parts.append(f"{group}: " + ", ".join([f"{counts['passed']} passed", *other]))
    return f"{'conforms' if report.conforms else 'does not conform'} ({'; '.join(parts)})"


def text(report: Report, whole: bool) -> str:
    """Return the report as text: all checks if `whole`, otherwise those that failed or were not run."""
    lines = [f"{report.label}  {_summary(report)}"]
    group = ""
    before = ""  # successive checks with the same message show it once
    for outcome in report.outcomes:
        if not whole and outcome.status in HARMLESS:
            continue
        if whole and outcome.group != group:
            group = outcome.group
            lines += ["", group]
        says = outcome.message if outcome.status == "not run" else outcome.says
        lines.append(f"  {SIGNS.get(outcome.status, outcome.status):<11} {outcome.check:<32} {says}".rstrip())
        if outcome.message not in ("", before) and outcome.status != "not run":
            lines.append(f"{'':14}{outcome.message}")
        before = outcome.message or before
    return "\n".join([*lines, ""] if whole else lines)


def markdown(report: Report) -> str:
    """Return the report as a section of Markdown, with a table of all checks."""
    from tabulate import tabulate

    rows = [(o.check, o.group, o.status, (o.message or o.says).replace("|", "\\|")) for o in report.outcomes]
    table = tabulate(rows, headers=("check", "group", "outcome", "remark"), tablefmt="github")
    head = f"## {report.label}\n\n{_summary(report)}; revision {report.origin.revision or 'unknown'}"
    return f"{head}\n\n{table}\n"


def write(report: Report, out: Path) -> None:
    """Write a report into a results folder; it replaces one of the same strategy and versions.

    Raises:
        UserError: the folder cannot be written.
    """
    key = [report.strategy, report.params, report.origin.revision, report.versions.get("sparsebench", "")]
    path = out / "checks" / f"{digest(key)}.json"
    files.write_whole(path, (canonical(report.model_dump(mode="json")) + "\n").encode())


def read(folder: Path | Store) -> list[Report]:
    """Return the reports of a results folder; unreadable ones are left out with a warning."""
    from sparsebench.records.store import Store  # imports numpy, which the command line avoids

    return list(Store.open(folder).values("checks", Report).values())


def badge_of(reports: Iterable[Report], label: str, revision: str) -> tuple[str, str]:
    """Return the badge of a strategy with its parameters, and a remark for the reader, or "".

    A report counts for the same name, parameters and revision, and for the version of sparsebench that made it.
    """
    reports = [report for report in reports if report.label == label]
    matching = [report for report in reports if report.origin.revision == revision != ""]
    for report in matching:
        if report.versions.get("sparsebench") == __version__:
            return report.badge, report.remark
    if matching:
        checked = ", ".join(sorted({report.versions.get("sparsebench", "?") for report in matching}))
        return CHANGED, plain(f"checked by sparsebench {checked}, this is {__version__}")
    return (CHANGED, "another revision was checked") if reports else (UNCHECKED, "")
