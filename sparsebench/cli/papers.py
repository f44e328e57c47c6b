"""Commands about papers: reproduce makes their figures again, claims recounts their numbers."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.board.tables import FORMATS, Choice
from sparsebench.cli.terminal import PATH, PICTURES, PLACE, options, output, table
from sparsebench.plan.request import values_of
from sparsebench.runner.progress import Progress

if TYPE_CHECKING:
    from sparsebench.paper import Paper

HOW = ("device", "jobs", "rerun", "checkpoint", "timeout", "memory_limit")


class _Papers(click.Group):
    """A command for each paper that plugins bring; which these are is looked at when that is asked."""

    def list_commands(self, context: click.Context) -> list[str]:
        """See `click.Group.list_commands`."""
        return list(self._papers(context))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """See `click.Group.get_command`."""
        papers = self._papers(context)
        return _command(papers[name]) if name in papers else None

    def _papers(self, context: click.Context) -> dict[str, Paper]:
        """Return those that are installed, looked for once a command."""
        from sparsebench.plugin.registry import Registry

        papers: dict[str, Paper] = context.meta.setdefault(__name__, {}) or Registry().papers()
        context.meta[__name__] = papers
        return papers


@click.group(cls=_Papers)
def reproduce() -> None:
    """Reproduce the figures and claims of a published paper."""


def _command(paper: Paper) -> click.Command:
    """Return the command that makes the figures of one paper."""
    title, presets, figures = paper.title, paper.presets, tuple(paper.figures)
    params: list[click.Parameter] = [
        click.Option(["--figure", "figures"], multiple=True, type=click.Choice(figures), help="Only this. Repeatable."),
        click.Option(
            ["--preset"], type=click.Choice(presets), default="default" if "default" in presets else presets[0],
            show_default=True, help="Number and size of the trials.",
        ),
        click.Option(
            ["--out"], type=PATH,
            help=f"Folder for records, figures and verdicts.  [default: sparsebench-{paper.name}-PRESET]",
        ),
    ]  # fmt: skip
    text = f"""Reproduce {title}.

    Writes each figure as PNG, SVG and CSV. Also writes a table of verdicts: the paper's claim, the measured result, and
    the rule by which the claim counts as reproduced. Results in the folder are reused. The exit code is 0 if all trials
    have a result, 1 if some have none, 2 if the command is wrong.
    """
    callback = partial(_make, paper)
    short = f"Of {title[title.index('(') + 1 : -1]}." if title.endswith(")") and "(" in title else title
    command = click.Command(paper.name, params=params, help=text, short_help=short, callback=callback)
    return options(*HOW, *(PICTURES if paper.pictures else ()), "shard", *PLACE)(command)


def _make(paper: Paper, figures: tuple[str, ...], preset: str, out: Path | None, dry_run: bool, **values: Any) -> None:
    from sparsebench.paper.reproduce import plan_of
    from sparsebench.paper.reproduce import reproduce as make

    folder = out or Path(f"sparsebench-{paper.name}-{preset}")
    _, files, how = values_of(values)
    if dry_run:
        from sparsebench.cli.run import forecast

        forecast(plan_of(paper, figures, preset, folder, how, replace(files, download=False)))
        return
    with Progress(folder) as progress:
        verdicts, lost = make(paper, figures, preset, folder, how, files, progress)
    figure, claim = (max((len(getattr(v, name)) for v in verdicts), default=0) for name in ("figure", "claim"))
    for verdict in verdicts:
        click.echo(f"{verdict.figure:<{figure}}  {verdict.claim:<{claim}}  {verdict.verdict}")
    click.echo(f"written: {folder}/verdicts.md, .csv, .json and the figures", err=True)
    if lost:
        click.echo(f"{lost} trials have no answer, see the notes in verdicts.md", err=True)
        sys.exit(1)


@click.command()
@click.argument("names", metavar="[ROW]...", nargs=-1)
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@table
@click.option("--flagged", is_flag=True, help="Show only rows with flags.")
@click.option("--file", type=PATH, metavar="FILE.toml", help="List of published numbers. [the list of sparsebench]")
@output
def claims(
    names: tuple[str, ...], form: str, choice: Choice, flagged: bool, file: Path | None, output: Path | None
) -> None:
    """Recompute published MACs from the settings in the papers.

    \b
    agrees            equal within 2 %, or within the rounding of the source
    other convention  equal with another, named convention of counting
    cannot be         different with every known convention
    nothing claimed   the source gives only accuracy or speed
    not recounted     settings are unknown, or MACs differ between images

    Flags mark speed-ups above the MACs ratio, MACs that do not follow from the stated settings, and sources that
    contradict each other. Nothing is downloaded.
    """
    from sparsebench.files import write_whole
    from sparsebench.paper import claims
    from sparsebench.plugin.registry import Registry

    ledger = claims.load(file)
    rows = claims.recount_all([claims.find(ledger, name) for name in names] or ledger, Registry(), ledger)
    text = claims.render([row for row in rows if row.flags or not flagged], form, choice)
    if output is None:
        click.echo(text, nl=False)
        return
    write_whole(output, text.encode())
    click.echo(f"written: {output}", err=True)
