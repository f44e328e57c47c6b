"""sparsebench verify."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.cli.guide import Guided
from sparsebench.cli.options import PICTURES, options
from sparsebench.errors import UserError
from sparsebench.planning.request import Files
from sparsebench.progress import Progress

if TYPE_CHECKING:
    from sparsebench.publish.verify import Verdict


ALL = -1
"""What stands for all cells."""


class Cells(click.IntRange):
    """A number of cells, or "all"."""

    name = "cells"

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, `ALL` for "all"."""
        return ALL if value == "all" else super().convert(value, param, ctx)


@click.command(cls=Guided)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--board", type=click.Path(path_type=Path), metavar="DIR", help="Say what has another suite than DIR.")
@click.option("--replay", type=Cells(), metavar="N", help="Run N cells of one submission again here, or all.")
@click.option("--replay-seed", type=int, metavar="SEED", help="Draw those cells as a replay before did, which says it.")
@click.option("--device", default="auto", show_default=True, help="To replay on: auto, cpu, cuda or cuda:i.")
@click.option("--yes", is_flag=True, help="Replay without asking whether to run that code.")
@click.option("--json", "as_json", is_flag=True, help="A list, one object a submission.")
def verify(
    path: Path, board: Path | None, replay: int | None, replay_seed: int | None, device: str, yes: bool, as_json: bool,
    **files: Any,
) -> None:  # fmt: skip
    """Give each submission below PATH its badge, from its files alone, and say what is wrong with it.

    \b
    reported   whole and consistent; nobody has run it again
    replayed   and cells drawn by chance, run again here, agree with it
    A submission without any is rejected.

    Only --replay runs the strategy's code, from the submission or as it is installed, and needs the pictures, weights
    and networks that the run was given.

    Exits with 0 if nothing contradicts itself, 1 if something does, 2 if the command is wrong.
    """
    from sparsebench.publish.verify import submissions_in, verify_each

    folders, verdicts = submissions_in(path), []
    if replay and len(folders) > 1:
        raise UserError("one submission is replayed at a time", got=f"{len(folders)} of them", next_step="name one")
    for folder, verdict in zip(folders, verify_each(folders, board), strict=True):
        if replay and verdict.badge == "reported":
            _ask(folder, yes)
            _replay(folder, verdict, replay, replay_seed, device, Files(**files))
        verdicts.append(verdict)
        if not as_json:
            click.echo(_lines(verdict))
    if as_json:
        click.echo(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
    sys.exit(int(any(verdict.wrong for verdict in verdicts)))


def _ask(folder: Path, yes: bool) -> None:
    """Say what is going to run, and go on only if that is wanted."""
    from sparsebench.publish.replay import announcement

    line = announcement(folder)
    if yes:
        click.echo(line, err=True)
    elif not sys.stdin.isatty():
        raise UserError(line, next_step="give --yes if that is what you want")
    else:
        click.confirm(f"{line}; go on?", abort=True, err=True)


def _replay(folder: Path, verdict: Verdict, number: int, seed: int | None, device: str, files: Files) -> None:
    from sparsebench.publish.replay import Here, replay

    here = Here(files, device, seed, Progress(folder).stopping)
    replay(folder, verdict, None if number == ALL else number, here)


def _lines(verdict: Verdict) -> str:
    lines = [f"{verdict.folder}: {verdict.badge}: {verdict.said}"]
    if verdict.strategy:
        of = f"suite {verdict.suite}" if verdict.suite else "cells of its own"
        lines.append(f"{verdict.strategy} {verdict.version}, {of}, {verdict.records} records")
    return "\n  ".join([*lines, *verdict.why, *verdict.notes])


options("weights", "weights_key", "networks", *PICTURES)(verify)
