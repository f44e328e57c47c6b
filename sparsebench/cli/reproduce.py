"""sparsebench reproduce."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from sparsebench.sweep.run import Rerun

from sparsebench.cli.progress import Progress

FIGURES = ("1a", "1b", "2", "3", "4", "5", "7", "8", "spurious", "strategies")


@click.group()
def reproduce() -> None:
    """Make the figures of a published paper again, and say which of its claims hold."""


@reproduce.command()
@click.option("--figure", "figures", multiple=True, type=click.Choice(FIGURES), help="Only this one. Repeatable.")
@click.option(
    "--preset",
    type=click.Choice(["quick", "default", "full"]),
    default="default",
    show_default=True,
    help="How many trials, samples and neurons.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Where records, figures and verdicts go.  [default: sparsebench-theory-PRESET]",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:i.")
@click.option("--jobs", type=click.IntRange(min=0), help="Worker processes; 0 runs in this one. [one a core, or GPU]")
@click.option("--rerun", type=click.Choice(["missing", "failed", "always"]), default="missing", show_default=True)
def theory(
    figures: tuple[str, ...], preset: str, out: Path | None, device: str, jobs: int | None, rerun: Rerun
) -> None:
    """Make the synthetic figures of the shallow-ViT paper (Li et al., ICLR 2023).

    Writes each figure as PNG, SVG and CSV, and a table of verdicts: what the paper claims, what came out, and by which
    rule it counts as reproduced. What the folder has is not run again. Leaves with 0 when all trials have an answer,
    1 when some have none, 2 if the command is wrong.
    """
    from sparsebench.reproduce.run import reproduce as make

    folder, progress = out or Path(f"sparsebench-theory-{preset}"), Progress()
    try:
        verdicts, lost = make(figures, preset, folder, device, jobs, rerun, progress.begin, progress.step)
    except KeyboardInterrupt:
        click.echo(f"\nstopped; what is done is kept in {folder}: the same command goes on from there", err=True)
        sys.exit(130)
    finally:
        progress.close()
    width = max((len(verdict.claim) for verdict in verdicts), default=0)
    for verdict in verdicts:
        click.echo(f"{verdict.figure:>4}  {verdict.claim:<{width}}  {verdict.verdict}")
    click.echo(f"written: {folder}/verdicts.md, .csv, .json and the figures", err=True)
    if lost:
        click.echo(f"{lost} trials have no answer, see the notes in verdicts.md", err=True)
        sys.exit(1)
