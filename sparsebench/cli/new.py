"""sparsebench new."""

from __future__ import annotations

from pathlib import Path

import click

from sparsebench.cli.guide import Guided


@click.command(cls=Guided)
@click.argument("name")
@click.option("--package", is_flag=True, help="A distribution that can be published, in place of two files.")
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path), default=Path(), metavar="DIR", help="Where.  [default: here]"
)
def new(name: str, package: bool, folder: Path) -> None:
    """Write a strategy NAME to begin with, NAME.py, and its test; both run as they are. Overwrites nothing."""
    from sparsebench.plugin.registry import Registry
    from sparsebench.plugin.scaffold import write

    files = write(name, folder, Registry(), package=package)
    for path in files:
        click.echo(f"written: {path}")
    where = folder / name if package else folder
    click.echo(f"\nsparsebench check {files[0]}\nsparsebench run --plugin {files[0]}\npytest {where}")
