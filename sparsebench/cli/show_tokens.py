"""sparsebench show-tokens."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sparsebench.cli.guide import Guided
from sparsebench.cli.options import PLACE, REQUEST, callbacks_of, options
from sparsebench.planning.request import values_of
from sparsebench.progress import Progress


@click.command("show-tokens", cls=Guided)
@options(*REQUEST)
@click.option("--task", default="composite", show_default=True, metavar="NAME[:PARAM=V...]", help="A task of pictures.")
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Test pictures to show.")
@click.option(
    "--file", type=click.Path(path_type=Path), help="The PNG, SVG or PDF to write.  [default: tokens.png in --out]"
)
@options(*PLACE)
def show_tokens(
    task: str,
    samples: int,
    file: Path | None,
    out: Path,
    dry_run: bool,
    **values: Any,
) -> None:
    """Draw which patches of test pictures the strategies keep, block by block, and what the network then says.

    Each strategy is trained first, once, as `sparsebench run` would in the first repetition with the largest number of
    training samples; the same command again only draws. The pictures are the first of each class, or of each group
    where the task has some. Exits with 0 if all is well, 1 if a strategy has no result, 2 if the command is wrong.
    """
    file = file or out / "tokens.png"
    from sparsebench import style

    form = style.form_of("--file", file)
    from sparsebench.look.show_tokens import plan_of, show
    from sparsebench.look.tokens_picture import draw
    from sparsebench.look.training import Trainer
    from sparsebench.records.files import write_whole

    request, files, how = values_of(values | {"tasks": task, "seeds": 1})
    request = replace(request, single=True)
    if dry_run:
        from sparsebench.cli.dry_run import forecast

        forecast(plan_of(request, Trainer(replace(files, dry=True), how, out)))
        return
    with Progress(out) as progress:
        trainer = Trainer(files, how, out, callbacks_of(progress))
        pictures = show(request, trainer, samples)
    write_whole(file, draw(pictures, form))
    lost = [shown for shown in pictures.shown if shown.why]
    for shown in lost:
        click.echo(f"{shown.label} has no result: {shown.why}", err=True)
    click.echo(f"written: {file}", err=True)
    sys.exit(int(bool(lost)))
