"""sparsebench check."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

SIGNS = {"passed": "ok", "failed": "FAILED", "timeout": "TIMEOUT", "crashed": "CRASHED"}


@click.command()
@click.argument("target", metavar="NAME|FILE.py[:PARAM=VALUE...]")
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
def check(target: str, as_json: bool, markdown: bool, time_limit: float) -> None:
    """Check that a strategy keeps the rules, on tiny networks and in a process of its own.

    Required checks are what every strategy must pass; recommended ones say what is good to have; informative ones
    measure. Leaves with 0 if all required checks pass, 1 if not, 2 if the command is wrong. A check that the strategy
    names in `expected_failures` is shown as expected, and does not count as failed.
    """
    from sparsebench.testing import process

    reports = process.check(target, time_limit)
    if as_json:
        click.echo(json.dumps([{**r.model_dump(mode="json"), "conforms": r.conforms} for r in reports], indent=1))
    else:
        for report in reports:
            click.echo(_markdown(report) if markdown else _text(report))
    sys.exit(int(not all(report.conforms for report in reports)))


def _text(report: Any) -> str:
    lines, group = [f"{report.title}  {report.summary()}"], ""
    before = ""  # a remark is shown once where several checks have the same
    for outcome in report.outcomes:
        if outcome.group != group:
            group = outcome.group
            lines += ["", group]
        says = outcome.message if outcome.status == "not run" else outcome.says
        lines.append(f"  {SIGNS.get(outcome.status, outcome.status):<11} {outcome.check:<32} {says}".rstrip())
        if outcome.message not in ("", before) and outcome.status != "not run":
            lines.append(f"{'':14}{outcome.message}")
        before = outcome.message or before
    return "\n".join([*lines, ""])


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
    head = f"## {report.title}\n\n{report.summary()}; source {report.origin.sha256[:12] or 'unknown'}"
    return f"{head}\n\n{tabulate(rows, headers='keys', tablefmt='github')}\n"
