"""sparsebench env."""

from __future__ import annotations

import click

from sparsebench.cli.guide import Guided


@click.command(cls=Guided)
def env() -> None:
    """Show the machine and the libraries that records are made with."""
    from tabulate import tabulate

    from sparsebench.records.cell import digest
    from sparsebench.records.environment import describe, gpus

    environment = describe()
    rows = [*environment.items(), ("CUDA devices", ", ".join(gpus()) or "none"), ("hash", digest(environment))]
    click.echo(tabulate(rows, tablefmt="plain"))
