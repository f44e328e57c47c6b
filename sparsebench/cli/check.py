"""Commands for authors of strategies: new and check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparsebench.cli.terminal import Guided

if TYPE_CHECKING:
    from sparsebench.testing.reports import Report


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
    say what else it can do. Exits with 0 if all required checks pass, 1 if not, 2 if the command is wrong. A check that
    the strategy names in `expected_failures` is shown as expected, and does not count as failed.

    With --results the reports are stored, too, and the folder's board shows them for as long as a strategy's
    revision stays as it is. Then 1 also says that a strategy of the folder could not be checked.
    """
    from sparsebench.testing import process, reports
    from sparsebench.testing import results as of_results

    if not targets and results is None:
        raise click.UsageError("name a strategy or a file, or a results folder with --results")
    shown: list[Report] = []

    def show(report: Report) -> None:
        shown.append(report)
        if not as_json:
            click.echo(reports.markdown(report) if markdown else reports.text(report, whole=bool(targets)))

    left_out: list[str] = []
    for target in targets or (None,):
        if results is not None:
            left_out += of_results.check(results, target, time_limit, show)
        elif target is not None:
            for report in process.check(target, time_limit):
                show(report)
    if as_json:
        click.echo(json.dumps([{**r.model_dump(mode="json"), "conforms": r.conforms} for r in shown], indent=1))
    if results is not None:
        _conclude(results, left_out)
    sys.exit(int(bool(left_out) or not all(report.conforms for report in shown)))


def _conclude(results: Path, left_out: list[str]) -> None:
    """Bring the folder's board up to date, and say what is not on it."""
    from sparsebench.api import refresh

    for line in left_out:
        click.echo(f"not checked: {line}", err=True)
    board = f"; written: {results}/leaderboard.md, .csv, .json, .png, .html" if refresh(results) else ""
    click.echo(f"stored: {results}/checks{board}", err=True)
