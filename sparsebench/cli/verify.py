"""sparsebench verify."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sparsebench.publish.verify import Verdict


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--board", type=click.Path(path_type=Path), metavar="DIR", help="Say what has another suite than DIR.")
@click.option("--json", "as_json", is_flag=True, help="A list, one object a submission.")
def verify(path: Path, board: Path | None, as_json: bool) -> None:
    """Give each submission below PATH its badge, from its records alone, and say why not the next.

    \b
    reported   types, hashes and finite numbers are as they must be
    rescored   its metrics are what its outcomes come to
    recounted  its MACs are what its token counts come to
    replayed   cells that were run again here agree
    A submission without any is rejected.

    Leaves with 0 if nothing contradicts itself, 1 if something does, 2 if the command is wrong.
    """
    from sparsebench.publish.verify import submissions_in, verify_each

    verdicts = []
    for verdict in verify_each(submissions_in(path), board):
        verdicts.append(verdict)
        if not as_json:
            click.echo(_told(verdict))
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    sys.exit(int(any(verdict.wrong for verdict in verdicts)))


def _told(verdict: Verdict) -> str:
    lines = [f"{verdict.folder}: {verdict.badge}"]
    if verdict.strategy:
        lines.append(f"{verdict.strategy} {verdict.version}, suite {verdict.suite}, {verdict.records} records")
    lines += [f"not the next badge: {why}" for why in verdict.why] + verdict.notes
    if verdict.as_reported:
        lines.append(f"as reported: {', '.join(verdict.as_reported)}")
    return "\n  ".join(lines)
