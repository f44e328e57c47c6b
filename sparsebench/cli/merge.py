"""sparsebench merge."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import click

from sparsebench.cli.guide import Guided

SHOWN = 5
"""Cells that are named."""


@click.command(cls=Guided)
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="A folder that is not there yet.")
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Write the records of several runs' FOLDERS to one, sorted: the same records always give the same bytes.

    Of a cell that several have, the newest success counts. Exits with 1 if a record contradicts itself, see verify.
    """
    from sparsebench.publish.consistent import contradictions
    from sparsebench.records import store

    click.echo(f"written: {out}, {store.merge(folders, out)} records", err=True)
    wrong = list(islice(contradictions(out), SHOWN))
    for text in wrong:
        click.echo(f"{out}: {text}", err=True)
    sys.exit(int(bool(wrong)))
