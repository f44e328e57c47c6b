"""The badge of the conformance checks on the board: what it says, for which source, and where it is left out."""

import csv
import io
import json
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import pytest
from flats import flatten

import sparsebench
from sparsebench.board.build import build, columns_of
from sparsebench.board.columns import CHECKS, COLUMNS, FORMATS
from sparsebench.board.latex import escape
from sparsebench.board.notes import notes_on, remarks
from sparsebench.board.tables import LEGEND_OF_CHECKS, render
from sparsebench.budget import Budget
from sparsebench.records.cell import Cell, Part
from sparsebench.records.checks import CHANGED, SEVERAL, UNCHECKED, Badges, Outcome, Report
from sparsebench.records.origin import Origin
from sparsebench.records.record import Failure, Metric, Record

Make = Callable[..., Report]
REQUIRED = ("acts_without_error", "plans_are_legal", "nothing_is_nan")


def report(*, revision: str = "a", version: str | None = None, params: Any = None, **statuses: Any) -> Report:
    """Return a report of three required, one recommended and one informative check, which passed if not said else."""
    groups = dict.fromkeys(REQUIRED, "required") | {"gradients_flow": "recommended", "time_of_a_choice": "informative"}
    outcomes = tuple(
        Outcome(check=name, group=group, says="So.", status=statuses.pop(name, "passed"))  # type: ignore[arg-type]
        for name, group in groups.items()
    )
    assert not statuses
    versions = {"sparsebench": version or sparsebench.__version__}
    origin = Origin(plugin="mine", revision=revision)
    return Report(strategy="mine", params=params or {}, origin=origin, versions=versions, outcomes=outcomes)


def badge(*reports: Report, label: str = "mine", revision: str = "a") -> tuple[str, str]:
    return Badges(reports).of(label, revision)


@pytest.mark.parametrize(
    ("statuses", "shown", "remark"),
    [
        ({}, "passes", ""),
        ({"gradients_flow": "unsupported", "nothing_is_nan": "unsupported"}, "passes", ""),
        ({"gradients_flow": "failed"}, "passes", "fails recommended gradients_flow"),
        ({"time_of_a_choice": "failed"}, "passes", ""),
        (
            {"gradients_flow": "expected"},
            "passes, expected failures: 1",
            "fails, as it declares, gradients_flow",
        ),
        (
            {"plans_are_legal": "failed", "nothing_is_nan": "timeout", "gradients_flow": "not run"},
            "fails 2 of 3 required",
            "fails required plans_are_legal, nothing_is_nan (timeout); 1 not run for that",
        ),
        (
            {"plans_are_legal": "crashed", "acts_without_error": "expected"},
            "fails 1 of 3 required, expected failures: 1",
            "fails required plans_are_legal (crashed); fails, as it declares, acts_without_error",
        ),
    ],
)
def test_a_badge_says_how_many_required_checks_failed_and_its_remark_which(
    statuses: dict[str, str], shown: str, remark: str
) -> None:
    assert badge(report(**statuses)) == (shown, remark)


def test_a_report_counts_for_its_source_its_parameters_and_its_version_only() -> None:
    assert badge() == (UNCHECKED, "")
    assert badge(report(), revision="b") == (CHANGED, "another revision was checked")
    assert badge(report(params={"power": 2.0})) == (UNCHECKED, "")
    assert badge(report(params={"power": 2.0}), label="mine(power=2.0)") == ("passes", "")
    old = report(version="0.0.9")
    assert badge(old) == (CHANGED, f"checked by sparsebench 0.0.9, this is {sparsebench.__version__}")
    assert badge(old, report()) == badge(report(), old) == ("passes", "")
    assert badge(report(revision=""), revision="")[0] == CHANGED, "a source of which nothing is known is none"


def record(strategy: str, seed: int = 0, revision: str = "a", **more: Any) -> Record:
    cell = Cell(
        task=Part(name="composite"), model=Part(name="vit"), strategy=Part(name=strategy), budget=Budget(macs=0.5),
        n_train=8, repetition=seed,
    )  # fmt: skip
    given = {"status": "ok", "metrics": {"accuracy": Metric(value=0.5, unit="fraction", n=20)}} | more
    origin = Origin(plugin=strategy, revision=revision)
    return Record(cell=cell, cell_id=cell.id, origin=origin, kind="deployable", label=strategy, **given)


def flat_of(records: Iterable[Record], *reports: Report) -> list[dict[str, Any]]:
    """Return records as a board reads them."""
    return list(Badges(reports).mark(map(flatten, records)))


def board(reports: list[Report], *records: Record, by: str | None = None) -> dict[str, str]:
    """Return the badges of the board's rows by strategy."""
    return {row["strategy"]: row["checks"] for row in build(flat_of(records, *reports), by)}


@pytest.mark.parametrize("by", [None, "task"])
def test_rows_have_the_badge_that_all_their_records_have(by: str | None) -> None:
    both = [record("mine"), record("mine", 1), record("other")]
    assert board([report()], *both, by=by) == {"mine": "passes", "other": UNCHECKED}
    assert board([report()], *both[::2], record("mine", 1, "b"), by=by) == {"mine": SEVERAL, "other": UNCHECKED}
    assert board([report(revision="b")], *both, by=by) == {"mine": CHANGED, "other": UNCHECKED}


@pytest.mark.parametrize("by", [None, "task"])
@pytest.mark.parametrize("form", FORMATS)
def test_where_no_row_has_an_outcome_there_is_no_column(form: str, by: str | None) -> None:
    for flat in (flat_of([record("mine")]), flat_of([record("other")], report())):
        rows = build(flat, by)
        assert set(columns_of(rows)) >= set(COLUMNS) and CHECKS not in columns_of(rows)
        text = render(rows, form, notes_on(flat))
        assert "checks" not in text and LEGEND_OF_CHECKS not in text


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_badge_and_those_for_people_the_failures(form: str) -> None:
    flat = flat_of((record(name) for name in ("mine", "other")), report(plans_are_legal="failed"))
    rows, note = build(flat), "mine: checks: fails required plans_are_legal"
    text = render(rows, form, notes_on(flat))
    shown = "fails 1 of 3 required"
    legend = escape(LEGEND_OF_CHECKS) if form == "latex" else LEGEND_OF_CHECKS
    if form == "csv":
        found = {row["strategy"]: row["checks"] for row in csv.DictReader(io.StringIO(text))}
        assert found == {"mine": shown, "other": UNCHECKED} and text.splitlines()[0].endswith(",n_seeds,checks")
    elif form == "json":
        assert {row["strategy"]: row["checks"] for row in json.loads(text)} == {"mine": shown, "other": UNCHECKED}
    else:
        assert shown in text and UNCHECKED in text and legend in text and note in text.replace("\\_", "_")


def test_a_strategy_whose_cells_all_failed_has_its_remark_once() -> None:
    failed = [record("mine", seed, status="failed", metrics={}, failure=Failure(reason="no")) for seed in range(3)]
    flat = flat_of(failed, report(acts_without_error="failed"))
    assert build(flat) == [] and remarks(flat) == ["mine: checks: fails required acts_without_error"]


def test_the_column_comes_through_data_frames() -> None:
    flat = flat_of([record("mine"), record("other")], report())
    table = sparsebench.leaderboard(pd.DataFrame(flat))
    assert dict(zip(table["strategy"], table["checks"], strict=True)) == {"mine": "passes", "other": UNCHECKED}
    assert "checks" not in sparsebench.leaderboard(pd.DataFrame(flat[1:])).columns
