"""sparsebench reproduce."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.cli.options import PICTURES, PLACE, callbacks_of, options
from sparsebench.planning.request import values_of
from sparsebench.progress import Progress

if TYPE_CHECKING:
    from sparsebench.reproduce.paper import Paper

PAPERS = {
    "theory": (
        "the synthetic figures of the shallow-ViT paper (Li et al., ICLR 2023)",
        ("quick", "default", "full"),
        ("1a", "1b", "2", "3", "4", "5", "7", "8", "rank", "neurons", "spurious", "strategies"),
    ),
    "overfitting": (
        "the synthetic figures of the benign-overfitting paper (Jiang et al., NeurIPS 2024)",
        ("quick", "full"),
        ("1", "2", "3", "strategies"),
    ),
    "spatial": (
        "the figures of the spatial-structure paper (Jelassi et al., NeurIPS 2022)",
        ("quick", "full"),
        ("association", "permutation", "transfer", "strategies", "images"),
    ),
    "images": (
        "the image experiments of the shallow-ViT paper (Li et al., ICLR 2023, Figure 6)",
        ("quick", "small", "full"),
        ("6a", "6b", "6c"),
    ),
    "sparse-tokens": (
        "the claims of the sparse-token paper (Barnfield et al., ICLR 2026)",
        ("quick", "default"),
        ("strength", "alignment", "removal"),
    ),
}
"""Title, presets and figures of each, here so that help need not load them."""


PICTURED = {"spatial", "images"}
"""Papers with figures of pictures."""
HOW = ("device", "jobs", "rerun", "checkpoint", "timeout", "memory_limit")


@click.group()
def reproduce() -> None:
    """Make the figures of a published paper again, and say which of its claims hold."""


def _command(paper: str) -> click.Command:
    """Return the command that makes the figures of one paper."""
    title, presets, figures = PAPERS[paper]
    params: list[click.Parameter] = [
        click.Option(["--figure", "figures"], multiple=True, type=click.Choice(figures), help="Only this; repeatable."),
        click.Option(
            ["--preset"], type=click.Choice(presets), default="default" if "default" in presets else presets[0],
            show_default=True, help="How many trials, and how large.",
        ),
        click.Option(
            ["--out"], type=click.Path(path_type=Path),
            help=f"Where records, figures and verdicts go.  [default: sparsebench-{paper}-PRESET]",
        ),
    ]  # fmt: skip
    text = f"""Make {title}.

    Writes each figure as PNG, SVG and CSV, and a table of verdicts: what the paper claims, what came out, and by which
    rule it counts as reproduced. What the folder has is not run again. Exits with 0 when all trials have an answer,
    1 when some have none, 2 if the command is wrong.
    """
    callback = partial(_make, paper)
    short = title[title.index("(") + 1 : -1]
    command = click.Command(paper, params=params, help=text, short_help=f"Of {short}.", callback=callback)
    return options(*HOW, *(PICTURES if paper in PICTURED else ()), "shard", *PLACE)(command)


def _make(paper: str, figures: tuple[str, ...], preset: str, out: Path | None, dry_run: bool, **values: Any) -> None:
    from sparsebench.reproduce import run

    about: Paper = importlib.import_module(f"sparsebench.papers.{paper.replace('-', '_')}").PAPER
    folder = out or Path(f"sparsebench-{paper}-{preset}")
    _, files, how = values_of(values)
    if dry_run:
        from sparsebench.cli.dry_run import forecast

        forecast(run.plan_of(about, figures, preset, folder, how, replace(files, dry=True)))
        return
    with Progress(folder) as progress:
        verdicts, lost = run.reproduce(about, figures, preset, folder, how, files, callbacks_of(progress))
    figure, claim = (max((len(getattr(v, name)) for v in verdicts), default=0) for name in ("figure", "claim"))
    for verdict in verdicts:
        click.echo(f"{verdict.figure:<{figure}}  {verdict.claim:<{claim}}  {verdict.verdict}")
    click.echo(f"written: {folder}/verdicts.md, .csv, .json and the figures", err=True)
    if lost:
        click.echo(f"{lost} trials have no answer, see the notes in verdicts.md", err=True)
        sys.exit(1)


for paper in PAPERS:
    reproduce.add_command(_command(paper))
