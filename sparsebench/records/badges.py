"""What the stored conformance checks say of a strategy, in a word for its row and a line for the foot of the board."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from sparsebench.records.report import GROUPS, Outcome, Report
from sparsebench.text import plain
from sparsebench.version import __version__

CHECKS, REMARK = "checks", "checks_remark"
"""The columns of a strategy's badge and of what there is to say of it; rows have them where an outcome is stored."""
UNCHECKED = "unchecked"
CHANGED = "unchecked (changed since)"
SEVERAL = "unchecked (several versions)"
BROKEN = frozenset({"failed", "timeout", "crashed"})


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
