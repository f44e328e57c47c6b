"""sparsebench claims."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.board.tables import FORMATS, Choice
from sparsebench.cli.options import options
from sparsebench.cli.terminal import table
from sparsebench.errors import UserError
from sparsebench.plan.request import values_of
from sparsebench.runner.progress import Progress

if TYPE_CHECKING:
    from sparsebench.paper.claims.rows import Claim

CHECK_OUT = "sparsebench-claims"


@click.command()
@click.argument("names", metavar="[ROW]...", nargs=-1)
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@table
@click.option("--flagged", is_flag=True, help="Show only rows with flags.")
@click.option(
    "--file",
    type=click.Path(path_type=Path),
    metavar="FILE.toml",
    help="List of published numbers. [the list of sparsebench]",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="File to write. [standard output]"
)
@click.option("--check", metavar="ROW", help="Measure the accuracy of ROW again, with --weights and --images.")
@click.option(
    "--weights", type=click.Path(path_type=Path), metavar="FILE.safetensors", help="Weights of the network of ROW."
)
@click.option(
    "--images", type=click.Path(path_type=Path), metavar="DIR", help="ImageNet pictures: val/<class>/* or <class>/*."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=CHECK_OUT,
    show_default=True,
    help="Folder for the records of --check.",
)
@options("device", "jobs", "timeout", "memory_limit")
def claims(
    names: tuple[str, ...], form: str, choice: Choice, flagged: bool, file: Path | None, output: Path | None,
    check: str | None, weights: Path | None, images: Path | None, out: Path, **how: Any,
) -> None:  # fmt: skip
    """Recompute published MACs from the settings in the papers.

    \b
    agrees            equal within 2 %, or within the rounding of the source
    other convention  equal with another, named convention of counting
    cannot be         different with every known convention
    nothing claimed   the source gives only accuracy or speed
    not recounted     settings are unknown, or MACs differ between images

    Flags mark speed-ups above the MACs ratio, MACs that do not follow from the stated settings, and sources that
    contradict each other. Nothing is downloaded.

    --check tests the given weights, without training. It exits with 1 if the claimed accuracy is outside the
    interval of the measured accuracy.
    """
    from sparsebench.paper.claims import rows

    ledger = rows.load(file)
    if check is not None:
        if names or flagged or output is not None:
            raise UserError("--check is of one row, and prints one line", next_step="leave the other options out")
        sys.exit(_measure(rows.find(ledger, check), weights, images, out, how))
    if weights is not None or images is not None:
        raise UserError("--weights and --images are for --check", next_step="add --check ROW")
    text = _table([rows.find(ledger, name) for name in names] or ledger, ledger, form, choice, flagged)
    if output is None:
        click.echo(text, nl=False)
        return
    from sparsebench.files import write_whole

    write_whole(output, text.encode())
    click.echo(f"written: {output}", err=True)


def _table(chosen: list[Claim], ledger: list[Claim], form: str, choice: Choice, flagged: bool) -> str:
    from sparsebench.paper.claims import recount, table
    from sparsebench.plugin.registry import Registry

    shown = recount.recount_all(chosen, Registry(), ledger)
    shown = [one for one in shown if one.flags or not flagged]
    return table.render(shown, form, choice)


def _measure(claim: Claim, weights: Path | None, images: Path | None, out: Path, how: dict[str, Any]) -> int:
    from sparsebench.api import execute
    from sparsebench.paper.claims.measure import request_of, result_of
    from sparsebench.plugin.registry import Registry

    if weights is None or images is None:
        raise UserError("--check needs the network and the pictures", next_step="give --weights FILE and --images DIR")
    request, files = request_of(claim, weights, images, Registry())
    with Progress(out) as progress:
        records = execute(request, files, values_of(how)[2], out, progress.callbacks()).records
    result = result_of(claim, records)
    click.echo(str(result))
    return int(not result.holds)
