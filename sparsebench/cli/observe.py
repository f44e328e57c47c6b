"""sparsebench observe."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sparsebench.cli.guide import Guided


@click.command(cls=Guided)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("observers", nargs=-1, required=True, metavar="NAME|FILE.py[:PARAM=V]...")
def observe(folder: Path, observers: tuple[str, ...]) -> None:
    """Tell observers of all records that a run's FOLDER has, as `run --observe` does while they come.

    Exits with 1 if an observer failed.
    """
    from sparsebench.observe.observers import show_folder

    n, failed = show_folder(observers, folder)
    click.echo(f"{n} records" + (f"; failed: {', '.join(failed)}" if failed else ""), err=True)
    sys.exit(int(bool(failed)))
