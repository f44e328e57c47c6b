"""sparsebench run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from sparsebench.api import OUT
from sparsebench.board.tables import FORMATS
from sparsebench.cli.progress import Progress


class _Numbers(click.ParamType):
    """One number, or several with commas between."""

    def __init__(self, kind: type):
        self.kind, self.name = kind, "NUMBER[,NUMBER...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.kind(part) for part in value.split(","))
        except ValueError:
            self.fail(f"got '{value}', allowed: numbers with commas between", param, ctx)


@click.command()
@click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="NAME|FILE.py[:PARAM=V,V...]",
    help="A strategy, or a file that brings some; keep_rate=... and macs=... set its budgets. Repeatable.",
)
@click.option("--suite", default="quick", show_default=True, help="A suite's name, or a .toml file.")
@click.option("--task", "tasks", multiple=True, metavar="NAME[:PARAM=V...]", help="Only this task. Repeatable.")
@click.option("--model", metavar="NAME[:PARAM=V...]", help="The model for every task that it fits, e.g. vit:depth=5.")
@click.option("--pretrained", is_flag=True, help="Begin with the trained weights that timm fetches for the model.")
@click.option(
    "--weights", type=click.Path(path_type=Path), metavar="FILE.safetensors", help="Begin with the weights of a file."
)
@click.option("--images", metavar="digits|cifar10|folder:DIR", help="Foregrounds of the image tasks.")
@click.option("--backgrounds", metavar="photos|DIR", help="Backgrounds of the image tasks.")
@click.option("--data-root", type=click.Path(path_type=Path), help="Where torchvision's CIFAR-10 files lie. [./data]")
@click.option("--download", is_flag=True, help="Fetch CIFAR-10 to --data-root if it is missing.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:i.")
@click.option("--seeds", type=int, help="Repetitions of each cell, in place of the suite's.")
@click.option("--keep", type=_Numbers(float), default=(), help="Keep rates at every stage, in place of the budget.")
@click.option("--macs", type=_Numbers(float), default=(), help="Fractions of the dense MACs, in place of the budget.")
@click.option("--n-train", type=_Numbers(int), default=(), help="Training samples, in place of the suite's.")
@click.option(
    "--where",
    type=click.Choice(["both", "train", "test"]),
    default="both",
    show_default=True,
    help="Remove tokens in training, in the test, or in both.",
)
@click.option("--out", default=OUT, show_default=True, type=click.Path(path_type=Path), help="The run's folder.")
@click.option(
    "--rerun",
    type=click.Choice(["missing", "failed", "always"]),
    default="missing",
    show_default=True,
    help="What is run again of what the folder has.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    default="table",
    show_default=True,
    help="How the leaderboard is printed.",
)
@click.option("--jobs", type=click.IntRange(min=0), help="Worker processes; 0 runs in this one. [one a core, or GPU]")
def run(form: str, out: Path, **options: Any) -> None:  # fmt: skip
    """Run a suite with the strategies named beside the baselines, and print the leaderboard.

    What the folder has is not run again: the same command goes on where it was stopped. Leaves with 0 if all is well,
    1 if cells failed, 2 if the command is wrong.
    """
    from sparsebench.api import execute
    from sparsebench.board.build import build
    from sparsebench.board.publish import notes_on
    from sparsebench.board.tables import render

    progress = Progress()
    try:
        finished = execute(out=out, on_plan=progress.begin, on_record=progress.step, **options)
    except KeyboardInterrupt:
        click.echo(f"\nstopped; what is done is kept in {out}: the same command goes on from there", err=True)
        sys.exit(130)
    finally:
        progress.close()
    click.echo(render(build(finished), form, notes_on(finished)), nl=False)
    click.echo(f"written: {out}/leaderboard.md, .csv, .json, .png", err=True)
    sys.exit(int(any(row["status"] not in ("ok", "unsupported", "skipped") for row in finished)))
