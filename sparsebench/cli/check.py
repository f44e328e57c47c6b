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
@click.option("--package", is_flag=True, help="Write a package that can be published, instead of two files.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Folder to write to.  [default: the current folder]",
)
def new(name: str, package: bool, folder: Path) -> None:
    """Write a working template of a strategy.

    The files are NAME.py and its test; both run without changes. Existing files are not overwritten.
    """
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
    help="Store the reports in this folder of a run, for its board. Without names, check all its strategies.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of reports, one per strategy.")
@click.option("--markdown", is_flag=True, help="Print a table for a page or a pull request.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit of each check.",
)
def check(targets: tuple[str, ...], results: Path | None, as_json: bool, markdown: bool, time_limit: float) -> None:
    """Test strategies on tiny networks, each in its own process.

    Every strategy must pass the required checks and should pass the recommended checks; informative checks say what
    else it can do. Checks that the strategy declares in `expected_failures` are shown as expected and do not count as
    failed. The exit code is 0 if all required checks pass, 1 if not, 2 if the command is wrong.

    With --results the reports are also stored. The board of the folder shows them until the strategy's revision
    changes. The exit code is then also 1 if a strategy of the folder could not be checked.
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
