"""sparsebench export: records for other programs, or a sparse network."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sparsebench.cli import folder as folders
from sparsebench.cli.guide import Guided
from sparsebench.errors import UserError


@click.command(cls=Guided)
@click.argument("what", metavar="[FOLDER|MODEL]", required=False)
@click.option("--format", "form", type=click.Choice(["csv", "jsonl", "parquet"]), default="csv", show_default=True)
@click.option("-o", "--out", metavar="FILE", type=click.Path(path_type=Path), help="[standard output]")
@click.option("--plugin", metavar="NAME[:PARAM=V]", help="Write MODEL with this strategy, in place of records.")
@click.option(
    "--weights", metavar="FILE.safetensors", type=click.Path(path_type=Path), help="[those that timm fetches]"
)
@click.option("--weights-key", metavar="NAME", default="", help="Which state dict of a checkpoint that has several.")
@click.option("--learned", metavar="FILE.safetensors", type=click.Path(path_type=Path), help="What it has learned.")
@click.option("--batch", type=int, default=1, show_default=True, help="Pictures that the network takes at a time.")
def export(what: str | None, form: str, out: Path | None, plugin: str | None, **network: Any) -> None:
    """Write the records of a run's FOLDER for other programs, one row a record; or MODEL, as timm:NAME, made sparse.

    docs/reference/records.md says which columns csv and parquet have; jsonl has the whole records.

    With --plugin it is a network, whose file -o ends in .onnx, which needs pip install 'sparsebench[export]', or .pt2.
    """
    if plugin is not None:
        if what is None:
            raise UserError("MODEL is missing", next_step="name it, as in timm:deit_small_patch16_224")
        _export_model(what, plugin, out, **network)
        return
    folder = folders.named_or_last(what)
    from sparsebench.records.export import write
    from sparsebench.records.files import whole_file

    if out is None:
        if form == "parquet":
            raise UserError("parquet is not for standard output", next_step="give -o FILE")
        write(folder, form, sys.stdout.buffer)
        return
    if out.exists():
        raise UserError(f"{out} is there and is not written over", next_step="give another -o")
    with whole_file(out) as file:
        write(folder, form, file)


def _export_model(
    model: str,
    plugin: str,
    out: Path | None,
    weights: Path | None,
    weights_key: str,
    learned: Path | None,
    batch: int,
) -> None:
    """Write a sparse network and say what it is."""
    from sparsebench.deploy.apply import apply
    from sparsebench.deploy.named import named_model

    if out is None:
        raise UserError("a network is not for standard output", next_step="give -o FILE.onnx or FILE.pt2")
    with apply(named_model(model, weights, weights_key), plugin, learned=learned) as sparse:
        sparse.export(out, batch)
        click.echo(f"written: {out}, {sparse.spec}, {sparse.macs_ratio:.3f} of the MACs of {model}")
