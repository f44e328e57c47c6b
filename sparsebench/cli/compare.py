"""sparsebench compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from sparsebench.cli.guide import Guided
from sparsebench.cli.options import PLACE, RUN, SETTING, callbacks_of, options
from sparsebench.planning.request import values_of
from sparsebench.progress import Progress


@click.command(cls=Guided)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options(*SETTING, *RUN)
@click.option("--task", default="composite", show_default=True, metavar="NAME[:PARAM=V...]", help="A task.")
@click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE.py",
    help="A file that brings the task or the model. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="What was compared, and a list of rows, one a block.")
@click.option("--markdown", is_flag=True, help="A table for a page or a pull request.")
@click.option(
    "--picture", type=click.Path(path_type=Path), metavar="FILE", help="Draw both on test pictures: a PNG, SVG or PDF."
)
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Test pictures to draw.")
@options(*PLACE)
def compare(
    a: str,
    b: str,
    task: str,
    as_json: bool,
    markdown: bool,
    picture: Path | None,
    samples: int,
    out: Path,
    dry_run: bool,
    **values: Any,
) -> None:
    """Say where strategies A and B, NAME|FILE.py[:PARAM=V...], keep the same patches, block by block.

    Both act on the same network: the one that `sparsebench run` trains without a strategy in the first repetition, with
    the largest number of training samples. It is trained once; the same command again only compares. What is
    compared is the whole test split, beside what two random choices of as many patches would come to.

    A patch is kept if a token is named after it: of merged patches the first is, and a fused or mixed token is named
    after none. Strategies that draw at random draw independently here. Exits with 0, or with 2 if the command is wrong
    or a strategy fails.
    """
    from sparsebench import style

    form = style.form_of("--picture", picture) if picture is not None else ""
    from sparsebench.look import agreement_picture, agreement_table
    from sparsebench.look import compare as comparing
    from sparsebench.look.training import Trainer
    from sparsebench.records.files import write_whole

    request, files, how = values_of(values | {"tasks": task, "seeds": 1})
    request, drawn = replace(request, single=True), samples if picture else 0
    if dry_run:
        from sparsebench.cli.dry_run import forecast

        trainer = Trainer(replace(files, dry=True), how, out)
        forecast(comparing.plan_of((a, b), request, trainer, drawn))
        return
    with Progress(out) as progress:
        trainer = Trainer(files, how, out, callbacks_of(progress))
        comparison = comparing.compare((a, b), request, trainer, drawn)
    if picture is not None:
        write_whole(picture, agreement_picture.draw(comparison, form))
        click.echo(f"written: {picture}", err=True)
    click.echo(
        agreement_table.as_json(comparison) if as_json else agreement_table.as_text(comparison, markdown=markdown),
        nl=False,
    )
