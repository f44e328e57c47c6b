"""Commands for authors of strategies: new and check."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import click

from sparsebench.cli.terminal import Guided
from sparsebench.records.checks import GROUPS, HARMLESS, Status


@click.command(cls=Guided)
@click.argument("name")
@click.option("--package", is_flag=True, help="A distribution that can be published, in place of two files.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), default=Path(), metavar="DIR", help="Where.  [default: here]"
)
def new(name: str, package: bool, folder: Path) -> None:
    """Write a strategy NAME to begin with, NAME.py, and its test; both run as they are. Overwrites nothing."""
    from sparsebench.plugin.registry import Registry
    from sparsebench.plugin.scaffold import write

    files = write(name, folder, Registry(), package=package)
    for path in files:
        click.echo(f"written: {path}")
    where = folder / name if package else folder
    click.echo(f"\nsparsebench check {files[0]}\nsparsebench run --plugin {files[0]}\npytest {where}")


SIGNS = {"passed": "ok", "failed": "FAILED", "timeout": "TIMEOUT", "crashed": "CRASHED"}


@click.command(cls=Guided)
@click.argument("targets", metavar="[NAME|FILE.py[:PARAM=VALUE...]]...", nargs=-1)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Store what was found in this folder of a run, for its board; without names, of all its strategies.",
)
@click.option("--json", "as_json", is_flag=True, help="A list of reports, one a strategy.")
@click.option("--markdown", is_flag=True, help="A table for a page or a pull request.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="For each check.",
)
def check(targets: tuple[str, ...], results: Path | None, as_json: bool, markdown: bool, time_limit: float) -> None:
    """Test strategies on tiny networks, each in its own process.

    Required checks are what every strategy must pass; recommended ones say what is good to have; informative ones
    measure. Exits with 0 if all required checks pass, 1 if not, 2 if the command is wrong. A check that the strategy
    names in `expected_failures` is shown as expected, and does not count as failed.

    With --results the reports are stored, too, and the folder's board shows them for as long as a strategy's
    revision stays as it is. Then 1 also says that a strategy of the folder could not be checked.
    """
    from sparsebench.testing import process
    from sparsebench.testing import results as of_results

    if not targets and results is None:
        raise click.UsageError("name a strategy or a file, or a results folder with --results")
    reports: list[Any] = []

    def show(report: Any) -> None:
        reports.append(report)
        _note(report)
        if not as_json:
            click.echo(_markdown(report) if markdown else _text(report, whole=bool(targets)))

    left_out: list[str] = []
    for target in targets or (None,):
        if results is not None:
            left_out += of_results.check(results, target, time_limit, show)
        elif target is not None:
            for report in process.check(target, time_limit):
                show(report)
    if as_json:
        click.echo(json.dumps([{**r.model_dump(mode="json"), "conforms": r.conforms} for r in reports], indent=1))
    if results is not None:
        _conclude(results, left_out)
    sys.exit(int(bool(left_out) or not all(report.conforms for report in reports)))


def _note(report: Any) -> None:
    """Let lists say whether an installed strategy can be exported."""
    from sparsebench.deploy.export import note_export

    answers = [outcome.message for outcome in report.outcomes if outcome.check == "exports"]
    if answers and not report.params and report.origin.distribution:
        note_export(report.strategy, report.origin, "yes" if answers[0] == "yes" else "no")


def _conclude(results: Path, left_out: list[str]) -> None:
    """Bring the folder's board up to date, and say what is not on it."""
    from sparsebench.api import refresh

    for line in left_out:
        click.echo(f"not checked: {line}", err=True)
    board = f"; written: {results}/leaderboard.md, .csv, .json, .png, .html" if refresh(results) else ""
    click.echo(f"stored: {results}/checks{board}", err=True)


def _title(report: Any) -> str:
    params = ",".join(f"{key}={value}" for key, value in report.params.items())
    return f"{report.strategy}:{params}" if params else str(report.strategy)


def _summary(report: Any) -> str:
    """Return the verdict and the number of checks of each group that passed, in a line."""
    parts = []
    for group in GROUPS:
        counts = Counter(outcome.status for outcome in report.outcomes if outcome.group == group)
        other = [f"{counts[status]} {status}" for status in get_args(Status)[1:] if counts[status]]
        parts.append(f"{group}: " + ", ".join([f"{counts['passed']} passed", *other]))
    return f"{'conforms' if report.conforms else 'does not conform'} ({'; '.join(parts)})"


def _text(report: Any, whole: bool) -> str:
    """Return the report: all checks, or those that did not pass where they should."""
    lines, group = [f"{_title(report)}  {_summary(report)}"], ""
    before = ""  # a remark is shown once where several checks have the same
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


def _markdown(report: Any) -> str:
    from tabulate import tabulate

    rows = [
        {
            "check": outcome.check,
            "group": outcome.group,
            "outcome": outcome.status,
            "remark": (outcome.message or outcome.says).replace("|", "\\|"),
        }
        for outcome in report.outcomes
    ]
    head = f"## {_title(report)}\n\n{_summary(report)}; revision {report.origin.revision or 'unknown'}"
    return f"{head}\n\n{tabulate(rows, headers='keys', tablefmt='github')}\n"
