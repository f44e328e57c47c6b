"""Commands about papers: reproduce and claims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from sparsebench.board import tables
from sparsebench.board.tables import FORMATS, Choice
from sparsebench.cli.run import forecast, read_options
from sparsebench.cli.terminal import PATH, PICTURES, PLACE, options, output, table
from sparsebench.errors import UserError, unknown
from sparsebench.files import write_whole
from sparsebench.plugin.registry import Registry
from sparsebench.runner.progress import Progress


class _Reproduce(click.Command):
    """A command whose help lists the papers of plugins. Plugins are loaded only when the help is shown."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the papers with their presets and figures, and the example."""
        with formatter.section("Papers"):
            formatter.write_dl(
                [
                    (name, f"{paper.title} Presets: {', '.join(paper.presets)}. Figures: {', '.join(paper.figures)}.")
                    for name, paper in Registry().papers().items()
                ]
            )
        super().format_epilog(context, formatter)


@click.command(cls=_Reproduce)
@click.argument("name", metavar="PAPER")
@click.option("--figure", "figures", multiple=True, metavar="FIGURE", help="Only this figure. Repeatable.")
@click.option("--preset", help="Number and size of the trials.  [default: default, or else the smallest]")
@click.option("--out", type=PATH, help="Folder for records, figures and verdicts.  [default: sparsebench-PAPER-PRESET]")
@options("device", "jobs", "rerun", "checkpoint", "timeout", "memory_limit", *PICTURES, "shard", *PLACE)
def reproduce(
    name: str, figures: tuple[str, ...], preset: str | None, out: Path | None, dry_run: bool, **values: Any
) -> None:
    """Reproduce the figures and claims of a published PAPER.

    Writes each figure as PNG, SVG and CSV. Also writes a table of verdicts: the paper's claim, the measured result, and
    the rule by which the claim counts as reproduced. Results in the folder are reused. The exit code is 0 if all trials
    have a result, 1 if some have none, 2 if the command is wrong.
    """
    from sparsebench.paper.reproduce import plan_of
    from sparsebench.paper.reproduce import reproduce as make

    papers = Registry().papers()
    if name not in papers:
        raise unknown("paper", name, papers)
    paper = papers[name]
    preset = preset or ("default" if "default" in paper.presets else paper.presets[0])
    folder = out or Path(f"sparsebench-{name}-{preset}")
    _, files, execution = read_options(values, dry_run)
    if dry_run:
        forecast(lambda: plan_of(paper, figures, preset, folder, execution, files))
        return
    with Progress(folder) as progress:
        verdicts, lost = make(paper, figures, preset, folder, execution, files, progress)
    rows = [(verdict.figure, verdict.claim, verdict.verdict) for verdict in verdicts]
    click.echo(tabulate(rows, tablefmt="plain", disable_numparse=True))
    click.echo(f"written: {folder}/verdicts.md, .csv, .json and the figures", err=True)
    if lost:
        click.echo(f"{lost} trials have no answer, see the notes in verdicts.md", err=True)
        sys.exit(1)


@click.command()
@click.argument("names", metavar="[ROW | BOARD]...", nargs=-1)
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@table
@click.option("--flagged", is_flag=True, help="Show only rows with flags.")
@click.option("--order", is_flag=True, help="Which methods are better in published tables, and on each BOARD.")
@click.option("--file", type=PATH, metavar="FILE.toml", help="List of published numbers. [the list of sparsebench]")
@output
def claims(
    names: tuple[str, ...],
    form: str,
    choice: Choice,
    flagged: bool,
    order: bool,
    file: Path | None,
    output: Path | None,
) -> None:
    """Recompute published MACs from the settings in the papers.

    \b
    agrees            equal within 2 %, or within the rounding of the source
    other convention  equal with another, named convention of counting
    cannot be         different with every known convention
    nothing claimed   the source gives only accuracy or speed
    not recounted     settings are unknown, or MACs differ between images

    Flags mark speed-ups above dense / MACs, MACs that do not follow from the stated settings, and sources that
    contradict each other. Nothing is downloaded.

    --order shows tables in which one party measured several methods on one network: each has one vote for each pair of
    methods. With folders of boards it shows with how many votes they agree, and each vote that they contradict.
    """
    if flagged and order:
        raise UserError("--flagged is for published MACs", next_step="leave it or --order out")
    text = _votes(names, form, choice, file) if order else _recounts(names, form, choice, flagged, file)
    if output is None:
        click.echo(text, nl=False)
        return
    write_whole(output, text.encode())
    click.echo(f"written: {output}", err=True)


def _recounts(names: tuple[str, ...], form: str, choice: Choice, flagged: bool, file: Path | None) -> str:
    from sparsebench.paper import claims

    ledger = claims.load(file)
    rows = claims.recount_all([claims.find(ledger, name) for name in names] or ledger, Registry(), ledger)
    return claims.render([row for row in rows if row.flags or not flagged], form, choice)


def _votes(folders: tuple[str, ...], form: str, choice: Choice, file: Path | None) -> str:
    from sparsebench.board.judge import judge
    from sparsebench.board.reading import read
    from sparsebench.paper import orders

    ledger = orders.load(file)
    if not folders:
        return tables.render(orders.report_of_votes(ledger), form, choice)
    boards = {folder: judge(read(Path(folder))) for folder in folders}
    return tables.render(orders.report_on_boards(ledger, boards), form, choice)
