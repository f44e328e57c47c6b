"""sparsebench submit."""

from __future__ import annotations

from pathlib import Path

import click

from sparsebench.cli import folder as folders
from sparsebench.cli.guide import Guided


@click.command(cls=Guided)
@folders.argument
@click.option("--strategy", metavar="NAME", help="Whose records, if FOLDER has several deployable strategies.")
@click.option(
    "--to",
    default="leaderboard/submissions",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Where submissions lie, in a clone of the repository.",
)
def submit(folder: Path, strategy: str | None, to: Path) -> None:
    """Write the records of a run's FOLDER as a submission, TO/<strategy>/<version>, and say how to publish it.

    It has the strategy's records and those of the baselines beside it, their outcomes, the strategy's revision, the
    machine and the suite. It names a suite only if it has all its cells. Nothing is sent: the git commands are
    printed.
    """
    from sparsebench.publish.submit import git_steps
    from sparsebench.publish.submit import submit as submitted

    made = submitted(folder, to, strategy)
    why = f" (not the next badge: {'; '.join(made.verdict.why)})" if made.verdict.why else ""
    click.echo(f"written: {made.folder}, {made.verdict.records} records, {made.verdict.badge}{why}", err=True)
    click.echo(git_steps(made))
