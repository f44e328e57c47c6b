"""Checking the strategies that a results folder has records of, and keeping what was found beside those."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sparsebench.errors import UserError
from sparsebench.plugin.content import file_revision
from sparsebench.records import store
from sparsebench.records.record import Record
from sparsebench.strategy.spec import parse
from sparsebench.testing import process, reports
from sparsebench.testing.reports import Report

Given = dict[str, list[dict[str, Any]]]


def check(out: Path, target: str | None, limit: float, on_report: Callable[[Report], None]) -> list[str]:
    """Check strategies in processes of their own, store each report in the folder, and return which were left out.

    Args:
        out: a results folder.
        target: what is to be checked: NAME or FILE.py, with parameters; without any it stands for all parameters that
            the folder has records of. None is every strategy of the records.
        limit: seconds for each check.
        on_report: is called with each report when it is stored.

    Raises:
        UserError: there is no such target, the folder holds no records, or cannot be written.
    """
    records = list(store.read(out, needed=True).values())
    store.check_writable(out)

    def check_one(name: str, given: Given | None) -> None:
        for report in process.check(name, limit, given=given):
            reports.write(report, out)
            on_report(report)

    if target is not None:
        check_one(target, _recorded_params(target, records))
        return []
    left_out = []
    for name in sorted({record.cell.strategy.name for record in records}):
        group = [record for record in records if record.cell.strategy.name == name]
        try:
            check_one(_installed_name(name, group), _params(group))
        except UserError as error:
            left_out.append(f"{name}: {error}")
    return left_out


def _recorded_params(target: str, records: Iterable[Record]) -> Given | None:
    """Return what the records have of a target that names no parameters; None where they have nothing of it."""
    spec = parse(target)
    if spec.params:
        return None
    if spec.name.endswith(".py"):
        revision = file_revision(Path(spec.name))
        matching = [record for record in records if record.origin.revision == revision != ""]
    else:
        matching = [record for record in records if record.cell.strategy.name == spec.name]
    return _params(matching) or None


def _params(records: Iterable[Record]) -> Given:
    given: Given = {}
    for record in sorted(records, key=lambda record: record.label):
        variants = given.setdefault(record.cell.strategy.name, [])
        if (params := dict(record.cell.strategy.params)) not in variants:
            variants.append(params)
    return given


def _installed_name(name: str, records: Iterable[Record]) -> str:
    """Return the name; UserError if its newest records are of a file, of which they do not know where it lies."""
    origin = max(records, key=lambda record: record.started).origin
    if origin.plugin.startswith("file:"):
        path = origin.plugin.removeprefix("file:")
        raise UserError(f"it comes from a file, {path}", next_step=f"give that too: sparsebench check {path} --results")
    return name
