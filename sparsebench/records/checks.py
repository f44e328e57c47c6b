"""What the conformance checks say of strategies, stored as OUT/checks/<hash>.json, and as a word and a note on boards.

Reading them imports no torch: the board is made of them and of records.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict

from sparsebench.records import files
from sparsebench.records.cell import canonical, digest
from sparsebench.records.origin import Origin
from sparsebench.spec import label
from sparsebench.text import plain
from sparsebench.version import __version__

Group = Literal["required", "recommended", "informative"]
GROUPS: tuple[Group, ...] = get_args(Group)
Status = Literal["passed", "failed", "expected", "unsupported", "timeout", "crashed", "not run"]
HARMLESS = frozenset({"passed", "expected", "unsupported"})


CHECKS, REMARK = "checks", "checks_remark"
"""The columns of a strategy's badge and of what there is to say of it; rows have them where an outcome is stored."""
UNCHECKED = "unchecked"
CHANGED = "unchecked (changed since)"
SEVERAL = "unchecked (several versions)"
BROKEN = frozenset({"failed", "timeout", "crashed"})


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Outcome(_Value):
    """What one check found.

    Attributes:
        check: its name.
        says: what holds where it passed.
        status: "expected" where the strategy declares that it fails, "unsupported" where there is nothing to check,
            "timeout" and "crashed" where the process had to be ended or ended itself.
        message: why, or what was measured.
    """

    check: str
    group: Group
    says: str
    status: Status = "not run"
    message: str = ""
    seconds: float = 0.0

    def after(self, status: Status, message: str = "", seconds: float = 0.0) -> Outcome:
        """Return what the check found."""
        return self.model_copy(update={"status": status, "message": message, "seconds": round(seconds, 3)})


class Report(_Value):
    """What all checks found about a strategy with its parameters.

    Attributes:
        origin: where the strategy came from, with its revision.
        versions: of sparsebench, torch and timm.
    """

    schema_version: Literal[1] = 1
    strategy: str
    params: dict[str, Any] = {}
    kind: str = ""
    site: str = ""
    origin: Origin
    versions: Mapping[str, str] = {}
    outcomes: tuple[Outcome, ...]

    @property
    def conforms(self) -> bool:
        """Whether no required check failed but for those that the strategy declares."""
        return all(o.status in HARMLESS for o in self.outcomes if o.group == "required")

    @property
    def label(self) -> str:
        """What tables call it: see `sparsebench.spec.label`."""
        return label(self.strategy, self.params)

    @property
    def title(self) -> str:
        """The strategy's name with its parameters."""
        params = ",".join(f"{key}={value}" for key, value in self.params.items())
        return f"{self.strategy}:{params}" if params else self.strategy

    def summary(self) -> str:
        """Return the verdict and the number of checks of each group that passed, in a line."""
        parts = []
        for group in GROUPS:
            statuses = [o.status for o in self.outcomes if o.group == group]
            other = [f"{statuses.count(s)} {s}" for s in get_args(Status)[1:] if s in statuses]
            parts.append(f"{group}: " + ", ".join([f"{statuses.count('passed')} passed", *other]))
        return f"{'conforms' if self.conforms else 'does not conform'} ({'; '.join(parts)})"

    def with_outcome(self, outcome: Outcome) -> Report:
        """Return the report with that outcome in its place."""
        new = tuple(outcome if old.check == outcome.check else old for old in self.outcomes)
        return self.model_copy(update={"outcomes": new})


def write(report: Report, out: Path) -> Path:
    """Write a report into a results folder, in place of an earlier one of the same version; it is there whole or not.

    Raises:
        UserError: the folder cannot be written.
    """
    about = [report.strategy, report.params, report.origin.revision, report.versions.get("sparsebench", "")]
    path = out / "checks" / f"{digest(about)}.json"
    files.write_whole(path, (canonical(report.model_dump(mode="json")) + "\n").encode())
    return path


def read(out: Path) -> list[Report]:
    """Return the reports of a results folder; those that cannot be read are left out with a warning."""
    from sparsebench.records import store  # numpy comes with it, which the command line need not

    reports = []
    for name, content in store.beside(out, "checks").items():
        try:
            reports.append(Report.model_validate_json(content))
        except ValueError as error:
            files.leave_out(Path(name), error)
    return reports


class Badges:
    """The badges of a results folder's strategies.

    A report counts for records of the same revision, made by a strategy of the same name and parameters, and only as
    long as sparsebench, whose version the checks are of, is the same.
    """

    def __init__(self, reports: Iterable[Report] = ()):
        self._reports: dict[str, list[Report]] = {}
        for report in reports:
            self._reports.setdefault(report.label, []).append(report)

    def __bool__(self) -> bool:
        return bool(self._reports)

    def mark(self, rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield flat records with the badge of their strategy, and what there is to say of that."""
        badges: dict[tuple[str, str], tuple[str, str]] = {}
        for row in rows:
            if self._reports:
                key = row["strategy"], row["revision"]
                if key not in badges:
                    badges[key] = self.of(*key)
                row[CHECKS], row[REMARK] = badges[key]
            yield row

    def of(self, label: str, revision: str) -> tuple[str, str]:
        """Return the badge of a strategy of that revision, and what the reader is to know besides, or ""."""
        reports = self._reports.get(label, [])
        matching = [report for report in reports if report.origin.revision == revision != ""]
        version = __version__
        for report in matching:
            if report.versions.get("sparsebench") == version:
                return _badge(report), _remark(report)
        if matching:
            checked = ", ".join(sorted({report.versions.get("sparsebench", "?") for report in matching}))
            return CHANGED, plain(f"checked by sparsebench {checked}, this is {version}")
        return (CHANGED, "another revision was checked") if reports else (UNCHECKED, "")


def _badge(report: Report) -> str:
    required = [o for o in report.outcomes if o.group == "required"]
    failed = sum(o.status in BROKEN for o in required)
    expected = sum(o.status == "expected" for o in report.outcomes)
    verdict = "passes" if report.conforms else f"fails {failed} of {len(required)} required"
    return verdict + (f", expected failures: {expected}" if expected else "")


def _remark(report: Report) -> str:
    """Return which checks failed, by group, which were expected to, and how many were not run."""
    remarks = []
    for group in GROUPS[:2]:
        if broken := [_name_of(o) for o in report.outcomes if o.group == group and o.status in BROKEN]:
            remarks.append(f"fails {group} {', '.join(broken)}")
    if expected := [o.check for o in report.outcomes if o.status == "expected"]:
        remarks.append(f"fails, as it declares, {', '.join(expected)}")
    if report.conforms is False and (left := sum(o.status == "not run" for o in report.outcomes)):
        remarks.append(f"{left} not run for that")
    return plain("; ".join(remarks), 1000)


def _name_of(outcome: Outcome) -> str:
    return outcome.check if outcome.status == "failed" else f"{outcome.check} ({outcome.status})"
