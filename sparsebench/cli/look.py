"""Commands that examine strategies in networks: show-tokens, compare, schedules and speed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from tabulate import tabulate

from sparsebench.cli.run import forecast, read_options
from sparsebench.cli.terminal import PATH, PLACE, REQUEST, RUN, SETTING, Guided, image_size, numbers, options
from sparsebench.errors import UserError
from sparsebench.files import write_whole
from sparsebench.measure.schedule import NEAR
from sparsebench.plan import suite as suites
from sparsebench.plugin.registry import Registry
from sparsebench.runner.progress import Progress
from sparsebench.stats import style

if TYPE_CHECKING:
    from sparsebench.inspection.schedules import Schedules
    from sparsebench.inspection.speed import Row
    from sparsebench.plan.request import Execution, Files, Request


NO_HEAD = "the network has no head, so it predicts no classes"
TASK = "[default: the suite's image task if it has only one, else composite]"


def _task_of(suite: str) -> str:
    images = {task.name for task in Registry().tasks() if task.inputs == "images"}
    of_suite = images & {entry.name for entry in suites.load(suite).task}
    return of_suite.pop() if len(of_suite) == 1 else "composite"


@click.command("show-tokens", cls=Guided)
@options(*REQUEST)
@click.option("--task", metavar="NAME[:PARAM=V...]", help=f"An image task.  {TASK}")
@click.option("--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Number of test pictures.")
@click.option("--file", type=PATH, help="PNG, SVG or PDF file to write.  [default: tokens.png in --out]")
@options(*PLACE)
def show_tokens(
    task: str | None,
    samples: int,
    file: Path | None,
    out: Path,
    dry_run: bool,
    **values: Any,
) -> None:
    """Draw which patches the strategies keep in each block.

    The drawing also shows the prediction for each test picture; for given weights without a head, the cosine of the
    pooled features with those of the network without a strategy. Networks are first trained as by `sparsebench run`, in
    the first repetition with the largest number of training samples. The same command run again only draws. The
    pictures are the first of each class, or of each group if the task has groups. On the task patches the class that
    the probe predicts is drawn on each patch, of the records of `sparsebench run`. The exit code is 0 for success, 1 if
    a strategy has no result, 2 if the command is wrong.
    """
    file = file or out / "tokens.png"
    form = style.form_of("--file", file)
    from sparsebench.inspection.pictures import Trainer, figure, show
    from sparsebench.inspection.predictions import predicts_patches

    task = task or _task_of(values["suite"])
    request, files, execution = read_options(values | {"tasks": task, "seeds": 1}, dry_run)
    registry = Registry()
    if predicts_patches(request, registry):
        _show_predictions(request, files, execution, registry, samples, file, form, out, dry_run)
        return
    with Progress(out) as progress:
        trainer = Trainer(files, execution, out, progress)
        if dry_run:
            forecast(lambda: trainer.plan(request, registry, pictures=True))
            return
        pictures = show(request, trainer, samples, registry)
    write_whole(file, style.content(figure(pictures), form))
    if any(len(row.cosines) for row in pictures.shown):
        click.echo(f"{NO_HEAD}: the cosine of its features with those without a strategy is drawn instead", err=True)
    lost = [row for row in pictures.shown if row.why]
    for row in lost:
        click.echo(f"{row.label} has no result: {row.why}", err=True)
    click.echo(f"written: {file}", err=True)
    sys.exit(int(bool(lost)))


def _show_predictions(
    request: Request,
    files: Files,
    execution: Execution,
    registry: Registry,
    n: int,
    file: Path,
    form: str,
    out: Path,
    dry_run: bool,
) -> None:
    """Draw the classes that probes predict for the patches of n pictures, and end the command."""
    from sparsebench.inspection.predictions import figure, show_predictions
    from sparsebench.runner.run import plan_of

    if dry_run:
        forecast(lambda: plan_of(request, files, execution, registry, out))
        return
    with Progress(out) as progress:
        pictures = show_predictions(request, files, execution, out, progress, n, registry)
    write_whole(file, style.content(figure(pictures), form))
    lost = [each for each in pictures.predicted if each.why]
    for each in lost:
        click.echo(f"{each.label} has no result: {each.why}", err=True)
    click.echo(f"written: {file}", err=True)
    sys.exit(int(bool(lost)))


@click.command(cls=Guided)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@options(*SETTING, *RUN)
@click.option("--task", metavar="NAME[:PARAM=V...]", help=f"The task.  {TASK}")
@click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE.py",
    help="A file that defines the task or the model. Repeatable.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print an object with the setting and a list of rows, one per block."
)
@click.option("--markdown", is_flag=True, help="Print a table for a page or a pull request.")
@click.option(
    "--picture", type=PATH, metavar="FILE", help="Draw the patches that both keep on test pictures: PNG, SVG or PDF."
)
@click.option(
    "--samples", type=click.IntRange(min=1), default=4, show_default=True, help="Number of test pictures to draw."
)
@options(*PLACE)
def compare(
    a: str,
    b: str,
    task: str | None,
    as_json: bool,
    markdown: bool,
    picture: Path | None,
    samples: int,
    out: Path,
    dry_run: bool,
    **values: Any,
) -> None:
    """Compare the patches that two strategies keep.

    A and B are NAME|FILE.py[:PARAM=V...]. Both act on the same network, which `sparsebench run` trains without a
    strategy in the first repetition, with the largest number of training samples. The same command run again does not
    train. The whole test split is compared, block by block. The result also shows the agreement of two random
    selections of the same sizes. Given weights need no head; without one, the result has the cosines of the pooled
    features with A, with B, and without a strategy.

    In a group of merged patches the first counts as kept. A fused or mixed token counts for no patch. Random numbers of
    the two strategies are independent. The exit code is 0, or 2 if the command is wrong or a strategy fails.
    """
    form = style.form_of("--picture", picture) if picture is not None else ""
    from sparsebench.inspection import compare as comparing
    from sparsebench.inspection.pictures import Trainer

    task = task or _task_of(values["suite"])
    request, files, execution = read_options(values | {"tasks": task, "seeds": 1}, dry_run)
    drawn = samples if picture else 0
    with Progress(out) as progress:
        trainer = Trainer(files, execution, out, progress)
        if dry_run:
            forecast(lambda: comparing.plan_of((a, b), request, trainer, drawn))
            return
        comparison = comparing.compare((a, b), request, trainer, drawn)
    if picture is not None:
        write_whole(picture, style.content(comparing.figure(comparison), form))
        click.echo(f"written: {picture}", err=True)
    click.echo(
        comparing.as_json(comparison) if as_json else comparing.as_text(comparison, markdown=markdown),
        nl=False,
    )


@click.command()
@click.argument("models", metavar="MODEL[,MODEL...]")
@click.argument("strategies", metavar="[NAME|FILE.py[:PARAM=V,V...]]...", nargs=-1)
@click.option("--batch", "batches", **numbers(int), default=["1,8,32"], show_default=True, help="Batch sizes.")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(["eager", "compiled"]),
    multiple=True,
    help="Mode of the networks. Repeatable. [both]",
)
@click.option(
    "--precision",
    "precisions",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    multiple=True,
    default=("float32",),
    show_default=True,
    help="Half precision uses autocast. Repeatable.",
)
@click.option(
    "--rounds", type=click.IntRange(2), default=20, show_default=True, help="Number of timed calls of each network."
)
@options("device")
@click.option("--weights", type=PATH, metavar="FILE.safetensors", help="Trained weights. [random weights]")
@click.option("--weights-key", metavar="NAME", default="", help="The state dict to use if a checkpoint has several.")
@image_size
@click.option("--out", type=PATH, default="sparsebench-speed", show_default=True)
def speed(
    models: str,
    strategies: tuple[str, ...],
    out: Path,
    device: str,
    weights: Path | None,
    weights_key: str,
    side: int | None,
    **settings: Any,
) -> None:
    """Measure the speed of models with strategies.

    MODEL is timm:NAME or hf:FOLDER, with or without a head. Dense and sparse networks are measured in turn. The dense
    network is measured twice in each mode: A/A is the difference of the two. The dense network is also measured
    compiled, because a useful strategy is faster than that. Speed-ups are relative to the eager dense network.

    The folder --out must be new or empty. It gets speed.jsonl, timm.csv with the columns of timm's own tables, and
    speed.png. `sparsebench leaderboard --view paper --speed FOLDER` puts the times into the table of a paper.
    """
    from sparsebench.deploy.apply import description, timm_model
    from sparsebench.inspection.speed import MODES, measure
    from sparsebench.runner.devices import first_of, resolve_device

    _check_unused(out)
    names = models.split(",")
    if weights is not None and len(names) > 1:
        raise UserError("--weights needs exactly one MODEL", got=models)
    networks = {_label(name): timm_model(name, weights, weights_key, fetch=False, side=side) for name in names}
    settings["modes"] = settings["modes"] or MODES
    measured = measure(networks, strategies, device=first_of(resolve_device(device)), **settings)
    for label, network in networks.items():
        click.echo(f"{label}: {description(network)}", err=True)
    rows = _write_speeds(out, measured)
    click.echo(_table_of_speeds(rows))
    click.echo(f"written: {out}", err=True)


def _check_unused(out: Path) -> None:
    """Raise UserError if a folder has content, or if it is a file."""
    is_used = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if is_used:
        raise UserError(f"{out} already exists and is not overwritten", next_step="give another --out")


def _label(model: str) -> str:
    """Return the name of a model without the words that all have."""
    return model.removeprefix("timm:").removeprefix("arch=")


def _write_speeds(out: Path, measured: Iterable[Row]) -> list[Row]:
    """Write speeds into a folder while they are measured, and return them."""
    from sparsebench.inspection.speed import draw, lines, timm_csv

    rows: list[Row] = []
    out.mkdir(parents=True, exist_ok=True)
    with (out / "speed.jsonl").open("a", encoding="utf-8") as file:
        for row in measured:  # measured rows are not lost if a later one fails
            rows.append(row)
            file.write(lines([row]))
            file.flush()
    write_whole(out / "timm.csv", timm_csv(rows).encode())
    write_whole(out / "speed.png", draw(rows))
    return rows


def _table_of_speeds(rows: Sequence[Row]) -> str:
    """Return a table of speeds; it names the networks if there are several."""
    several = len({row.network for row in rows}) > 1
    body = []
    for row in rows:
        named = {"network": row.network} if several else {}
        body.append(named | _cells(row))
    return tabulate(body, headers="keys", disable_numparse=True)


def _cells(row: Row) -> dict[str, str]:
    def text(value: float | None, scale: float = 1, form: str = ".2f") -> str:
        return "" if value is None else format(value * scale, form)

    return {
        "strategy": row.strategy,
        "budget": row.budget,
        "mode": row.mode,
        "precision": row.precision,
        "batch": str(row.batch),
        "ms": text(row.latency, 1000),
        "p95 ms": text(row.latency_p95, 1000),
        "images/s": text(row.images_per_s, 1, ".1f"),
        "speed-up": text(row.speed_up),
        "over compiled": text(row.speed_up_compiled),
        "MACs/dense": text(row.macs_ratio, 1, ".3f"),
        "share": text(row.share),
        "choice ms": text(row.choice, 1000),
        "memory MB": text(row.memory, 1e-6, ".0f"),
        "A/A": text(row.spread, 100, ".1f") + " %" * (row.spread is not None),
        "marks": row.problem or ", ".join(row.marks),
    }


@click.command(cls=Guided)
@click.argument("strategy", metavar="NAME|FILE.py[:PARAM=V]")
@options(*SETTING, *RUN)
@click.option("--task", metavar="NAME[:PARAM=V...]", help="The task.  [default: folder with --images, else composite]")
@click.option("--json", "as_json", is_flag=True, help="Print a list with an object for each budget.")
def schedules(strategy: str, task: str | None, as_json: bool, out: Path, **values: Any) -> None:
    """Compare the schedules of a strategy at equal MACs.

    A schedule says in which blocks how many tokens leave. Each schedule is compared with the network without a
    strategy by the distance of their outputs, without labels. The chosen schedule (*) is that of schedule=auto: the
    first whose distance exceeds the smallest by at most one standard error. The last line of each table is the strategy
    with the chosen counts, for --plugin, speed, export and Python.

    The network is one of --weights, or else that of the task, which is trained if it is missing. --images folder:DIR
    compares on pictures of DIR/train if there are some, else on those of DIR.
    """
    from sparsebench.inspection.pictures import Trainer
    from sparsebench.inspection.schedules import as_rows, compare_schedules

    shares = values.pop("macs") or (0.7, 0.5, 0.3)
    task = task or ("folder" if values["images"] else "composite")
    request, files, execution = read_options(values | {"tasks": task, "seeds": 1, "macs": ()}, False)
    with Progress(out) as progress:
        measured = compare_schedules(strategy, shares, request, Trainer(files, execution, out, progress))
    if as_json:
        objects = [
            asdict(each) | {"candidates": [candidate.model_dump(mode="json") for candidate in each.candidates]}
            for each in measured
        ]
        click.echo(json.dumps(objects, indent=1))
        return
    for each in measured:
        click.echo(f"{each.label} at {each.macs:g} of the MACs")
        if each.reason:
            click.echo(f"it has one schedule: {each.reason}\n{each.words}\n")
            continue
        click.echo(tabulate(as_rows(each), headers="keys", disable_numparse=True))
        click.echo(f"{_basis(each)}\n{each.words}\n")


def _basis(schedules: Schedules) -> str:
    """Return a line that says on what the choice of a schedule rests."""
    chosen = schedules.candidates[schedules.chosen]
    if len(schedules.candidates) == 1:
        off = abs(chosen.macs_ratio / schedules.macs - 1)
        return "no other schedule has these MACs" if off <= NEAR else "no schedule has these MACs; this is the closest"
    basis = f"chosen on {schedules.images} {schedules.source}"
    if not schedules.on_others:
        return f"{basis}; there are no others to compare with"
    if schedules.on_others == chosen.name:
        return f"{basis}; others give the same choice"
    return f"{basis}; others give another choice: '{schedules.on_others}'"
