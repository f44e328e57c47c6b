"""Reports of the conformance checks: stored in a run's folder, and shown on its boards as badge and remark."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from flats import filled

import sparsebench
from sparsebench.cli import main
from sparsebench.records import reports
from sparsebench.records.record import Origin, Record
from sparsebench.records.reports import CHANGED, SEVERAL, UNCHECKED, Outcome, Report, badge_of

pytestmark = pytest.mark.usefixtures("no_picture", "timed_once")

CHECKED = {
    "acts_without_error": "required", "plans_are_legal": "required", "odd_sizes": "required",
    "gradients_flow": "recommended", "exports": "informative",
}  # fmt: skip


def report(strategy="mine", revision="a", version=sparsebench.__version__, params=None, **statuses):  # type: ignore
    """Return a report of checks that passed, except for the given outcomes."""
    outcomes = tuple(
        Outcome(check=name, group=group, says="So.", status=statuses.pop(name, "passed"), message='it wrote "ü\n"')  # type: ignore[arg-type]
        for name, group in CHECKED.items()
    )
    assert not statuses
    return Report(
        strategy=strategy, params=params or {}, origin=Origin(plugin="mine", revision=revision),
        versions={"sparsebench": version}, outcomes=outcomes,
    )  # fmt: skip


def test_a_report_is_read_back_and_replaced_by_a_newer_one(tmp_path: Path) -> None:
    assert reports.read(tmp_path) == []
    for example in (report(), report(odd_sizes="failed")):
        reports.write(example, tmp_path)
        assert reports.read(tmp_path) == [example]
    others = [report(params={"power": 2.0}), report(revision="b"), report(version="0.0.9"), report("its")]
    for number, other in enumerate(others, 2):
        reports.write(other, tmp_path)
        assert len(reports.read(tmp_path)) == number and other in reports.read(tmp_path)


OTHER = (CHANGED, "another revision was checked")
OLD = (CHANGED, f"checked by sparsebench 0.0.9, this is {sparsebench.__version__}")
SQUARE = report(params={"power": 2.0})


@pytest.mark.parametrize(
    ("reports", "label", "revision", "badge"),
    [
        ([], "mine", "a", (UNCHECKED, "")),
        ([report()], "mine", "a", ("passes", "")),
        ([report()], "mine", "b", OTHER),
        ([SQUARE], "mine", "a", (UNCHECKED, "")),
        ([SQUARE], "mine(power=2.0)", "a", ("passes", "")),
        ([report(version="0.0.9")], "mine", "a", OLD),
        ([report(version="0.0.9"), report()], "mine", "a", ("passes", "")),
        ([report(), report(version="0.0.9")], "mine", "a", ("passes", "")),
        ([report(revision="")], "mine", "", OTHER),  # an unknown revision
        *(([report(**statuses)], "mine", "a", (badge, remark)) for statuses, badge, remark in (
            ({"gradients_flow": "unsupported", "odd_sizes": "unsupported"}, "passes", ""),
            ({"gradients_flow": "failed"}, "passes", "fails recommended gradients_flow"),
            ({"exports": "failed"}, "passes", ""),
            ({"gradients_flow": "expected"}, "passes, expected failures: 1", "fails, as it declares, gradients_flow"),
            ({"plans_are_legal": "failed", "odd_sizes": "timeout", "gradients_flow": "not run"},
             "fails 2 of 3 required",
             "fails required plans_are_legal, odd_sizes (timeout); 1 not run for that"),
            ({"plans_are_legal": "crashed", "acts_without_error": "expected", "exports": "failed"},
             "fails 1 of 3 required, expected failures: 1",
             "fails required plans_are_legal (crashed); fails, as it declares, acts_without_error"))),
    ],
)  # fmt: skip
def test_a_badge(reports: list[Report], label: str, revision: str, badge: tuple[str, str]) -> None:
    assert badge_of(reports, label, revision) == badge


@pytest.fixture
def board(tmp_path: Path, make_record: Callable[..., Record]) -> Callable[..., str]:
    """Return a function that prints the board of a folder with two cells of two strategies and one report."""

    def show(*words: str, of: Report | None = None, revisions: str = "aa", **more: Any) -> str:
        records = [make_record(repetition=k, revision=revision, **more) for k, revision in enumerate(revisions)]
        other = records[0].cell.model_copy(update={"strategy": records[0].cell.strategy.model_copy(
            update={"name": "other"})})  # fmt: skip
        filled(tmp_path, *records, make_record().model_copy(
            update={"cell": other, "cell_id": other.id, "label": "other"}))  # fmt: skip
        if of is not None:
            reports.write(of, tmp_path)
        result = CliRunner().invoke(main, ["leaderboard", str(tmp_path), *words])
        assert result.exit_code == 0, result.output
        return result.stdout

    return show


@pytest.mark.parametrize(
    ("by", "revisions", "of", "badge"),
    [((), "aa", "a", "passes"), (("--by", "task"), "ab", "a", SEVERAL), ((), "aa", "b", CHANGED)],
)
def test_boards_have_the_badge_of_all_records(
    board: Callable[..., str], by: tuple[str, ...], revisions: str, of: str, badge: str
) -> None:
    text = board("--format", "csv", *by, of=report(revision=of), revisions=revisions)
    badges = {row["strategy"]: row["checks"] for row in csv.DictReader(io.StringIO(text))}
    assert badges == {"mine": badge, "other": UNCHECKED}


def test_a_board_has_the_badge_and_remark_of_a_report(
    board: Callable[..., str],
) -> None:
    """A board for people has the badge and the remark where a report is of its strategies."""
    assert "check" not in board() + board(of=report("its"))
    text = board(of=report(plans_are_legal="failed")).replace("\\_", "_")
    assert "fails 1 of 3 required" in text and UNCHECKED in text
    assert "mine: checks: fails required plans_are_legal" in text
