"""sparsebench speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.errors import UserError

if TYPE_CHECKING:
    from sparsebench.speed.rows import Row

HEADER = ("strategy", "mode", "precision", "batch", "p50 ms", "p95 ms", "speed-up", "over compiled", "MACs ratio",
          "share", "choice ms", "memory MB", "A/A", "marks")  # fmt: skip


@click.command()
@click.argument("model")
@click.argument("strategies", metavar="[STRATEGY]...", nargs=-1)
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 8, 32), show_default=True)
@click.option("--mode", "modes", type=click.Choice(["eager", "compiled"]), multiple=True, help="[both]")
@click.option(
    "--precision", "precisions", type=click.Choice(["float32", "bfloat16", "float16"]), multiple=True,
    default=("float32",), show_default=True, help="Half precision is by autocast.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(2), default=20, show_default=True, help="Times each network is called.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[cuda where there is one]")
@click.option(
    "--weights", type=click.Path(path_type=Path), metavar="FILE.safetensors", help="[random: speed needs none]"
)
@click.option("--weights-key", metavar="NAME", default="", help="Which state dict of a checkpoint that has several.")
@click.option("--out", type=click.Path(path_type=Path), default="sparsebench-speed", show_default=True)
def speed(
    model: str, strategies: tuple[str, ...], out: Path, device: str | None, weights: Path | None, weights_key: str,
    **how: Any,
) -> None:  # fmt: skip
    """Measure how fast strategies make MODEL, as timm:NAME, on this machine.

    Dense and sparse networks take turns. The dense network is measured twice in each mode: A/A says how far the two
    are apart. The dense network is always compiled too: it is what a sparse one has to beat. Speed-ups are over the
    eager dense network.

    Folder --out, which must be new or empty, has speed.jsonl, timm.csv with the columns of timm's own tables, and
    speed.png.
    """
    import torch

    from sparsebench.deploy.named import named_model
    from sparsebench.speed.clock import MODES, measure
    from sparsebench.speed.rows import lines

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there and is not written over", next_step="give another --out")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU that torch can use", got="--device cuda", allowed="cpu")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    network = named_model(model, weights, weights_key, fetched=False)
    how["modes"] = how["modes"] or MODES
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with (out / "speed.jsonl").open("a", encoding="utf-8") as file:
        for row in measure(network, model.removeprefix("timm:"), strategies, device=device, **how):
            rows.append(row)
            file.write(lines([row]))
            file.flush()
    _finish(rows, out)


def _finish(rows: list[Row], out: Path) -> None:
    """Write the files of all rows, and print them."""
    from tabulate import tabulate

    from sparsebench.records.files import write_whole
    from sparsebench.speed.picture import draw
    from sparsebench.speed.rows import timm_csv

    write_whole(out / "timm.csv", timm_csv(rows).encode())
    write_whole(out / "speed.png", draw(rows))
    click.echo(tabulate([_cells(row) for row in rows], HEADER, disable_numparse=True))
    click.echo(f"written: {out}", err=True)


def _cells(row: Row) -> list[str]:
    from sparsebench.speed.rows import marks

    def text(value: float | None, scale: float = 1, form: str = ".2f") -> str:
        return "" if value is None else format(value * scale, form)

    return [
        row.strategy, row.mode, row.precision, str(row.batch), text(row.p50, 1000), text(row.p95, 1000),
        text(row.speedup), text(row.speedup_compiled), text(row.macs_ratio), text(row.share), text(row.choice, 1000),
        text(row.memory, 1e-6, ".0f"), text(row.spread, 100, ".1f") + " %" * (row.spread is not None),
        row.problem or ", ".join(marks(row)),
    ]  # fmt: skip
