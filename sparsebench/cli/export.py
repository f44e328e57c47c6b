"""sparsebench export."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from sparsebench.cli import folder as folders
from sparsebench.cli.guide import Guided
from sparsebench.errors import UserError


@click.command(cls=Guided)
@folders.argument
@click.option("--format", "form", type=click.Choice(["csv", "jsonl", "parquet"]), default="csv", show_default=True)
@click.option("-o", "--out", metavar="FILE", type=click.Path(path_type=Path), help="[standard output]")
def export(folder: Path, form: str, out: Path | None) -> None:
    """Write the records of a run's FOLDER for other programs, one row a record.

    csv and parquet have flat columns, docs/reference/records.md says which; jsonl the whole records. parquet needs
    pyarrow: pip install 'sparsebench[scale]'.
    """
    from sparsebench.records.export import write
    from sparsebench.records.store import whole_file

    if out is None:
        if form == "parquet":
            raise UserError("parquet is not for standard output", next_step="give -o FILE")
        write(folder, form, sys.stdout.buffer)
        return
    if out.exists():
        raise UserError(f"{out} is there and is not written over", next_step="give another -o")
    with whole_file(out) as file:
        write(folder, form, file)
