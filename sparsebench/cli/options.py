"""Options that several commands have: what to run, on which pictures, where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparsebench.api import OUT
from sparsebench.cli.progress import Progress

if TYPE_CHECKING:
    from sparsebench.look.training import Trainer


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


_PICTURES = (
    click.option("--images", metavar="NAME|folder:DIR", help="Pictures of the image tasks; see sparsebench data."),
    click.option("--backgrounds", metavar="NAME|DIR|FILE.npz", help="Backgrounds of the image tasks."),
    click.option("--pretrain-images", metavar="NAME|folder:DIR", help="Pictures of pre-training. [the task's own]"),
    click.option("--data-root", type=click.Path(path_type=Path), help="Where official data sets lie. [./data]"),
    click.option("--download", is_flag=True, help="Fetch what torchvision can to --data-root if it is missing."),
)

checkpointed: Callable[[Any], Any] = click.option(
    "--checkpoint",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How often a training under way is saved, to be gone on with; 0 for never.",
)
"""Gives a command the option that says how often its trainings are saved."""

_LIMITS = (
    click.option(
        "--timeout",
        metavar="SECONDS|10m|1h",
        help="End a cell that takes longer; 0 for never.  [default: 6h; none with --jobs 0]",
    ),
    click.option(
        "--memory-limit",
        metavar="BYTES|4GiB",
        help="End a cell whose worker holds more, of which the libraries are 0.4 GiB.",
    ),
)

_DISTRIBUTED = (
    click.option("--shard", metavar="I/N", help="Only the I-th of N shares of the cells, from 0: for arrays of jobs."),
    click.option(
        "--engine",
        type=click.Choice(["local", "inline", "dask"]),
        default="local",
        show_default=True,
        help="Where cells run: worker processes here, this process, or a Dask cluster.",
    ),
    click.option(
        "--exclusive",
        is_flag=True,
        help="One cell at a time on a machine, or on each GPU, so that nothing is timed beside another cell.",
    ),
    click.option("--address", metavar="tcp://HOST:PORT", help="The Dask scheduler, if there is one."),
    click.option(
        "--cluster",
        type=click.Path(path_type=Path),
        metavar="FILE.yaml",
        help="Submit --jobs Dask workers to a batch system: dask-jobqueue's configuration.",
    ),
)

_PLUGINS = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="NAME|FILE.py|all[:PARAM=V,V...]",
    help="A strategy, a file that brings some, or all there are; words set its budget: macs=0.5, keep_rate=0.7, "
    "per_block=13, ratio=0.9 or counts=99+51,blocks=3+6 (see list --published). Repeatable.",
)
_SETTING = (
    click.option("--suite", default="quick", show_default=True, help="A suite's name, or a .toml file."),
    click.option(
        "--model", metavar="NAME[:PARAM=V...]", help="The model for every task that it fits, e.g. vit:depth=5."
    ),
    click.option("--pretrained", is_flag=True, help="Begin with the trained weights that timm fetches for the model."),
    click.option(
        "--weights", type=click.Path(path_type=Path), metavar="FILE.safetensors", help="Begin with a file's weights."
    ),
    click.option(
        "--networks",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="A run's folder with networks that were trained for the suite. [those of --out, then sparsebench's own]",
    ),
    *_PICTURES,
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:i."),
    click.option("--keep", type=_Numbers(float), default=(), help="Keep rates at every stage, in place of the budget."),
    click.option(
        "--macs", type=_Numbers(float), default=(), help="Fractions of the dense MACs, in place of the budget."
    ),
    click.option("--n-train", type=_Numbers(int), default=(), help="Training samples, in place of the suite's."),
)
_WHERE = click.option(
    "--where",
    type=click.Choice(["both", "train", "test"]),
    default="both",
    show_default=True,
    help="Remove tokens in training, in the test, or in both.",
)
_RUN = (
    click.option("--out", default=OUT, show_default=True, type=click.Path(path_type=Path), help="The run's folder."),
    click.option(
        "--rerun",
        type=click.Choice(["missing", "failed", "always"]),
        default="missing",
        show_default=True,
        help="What is run again of what the folder has.",
    ),
    checkpointed,
    *_LIMITS,
    click.option(
        "--jobs", type=click.IntRange(min=0), help="Worker processes; 0 runs in this one. [one a core, or GPU]"
    ),
)


def with_pictures(command: click.Command) -> click.Command:
    """Give a command that is there the options that say where pictures come from, after its own."""
    for option in _PICTURES:
        option(command)
    return command


def limited(command: click.Command) -> click.Command:
    """Give a command that is there the options that say what a cell may take, after its own."""
    for option in _LIMITS:
        option(command)
    return command


def distributed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say which machines run the cells."""
    for option in reversed(_DISTRIBUTED):
        command = option(command)
    return command


def request(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of a request, in the order above."""
    return _given(command, (_PLUGINS, *_SETTING, _WHERE, *_RUN))


def setting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command those of them that do not say which strategies there are and when they act."""
    return _given(command, (*_SETTING, *_RUN))


def _given(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return command


def trainer_of(options: dict[str, Any], out: Path, progress: Progress) -> Trainer:
    """Return what trains for a command; takes what says how out of its options, so that those of a request are left."""
    from sparsebench.look.training import Trainer
    from sparsebench.planning.planner import Files

    files = Files(**{field.name: options.pop(field.name) for field in fields(Files) if field.init})
    own = ("device", "jobs", "rerun", "checkpoint", "timeout", "memory_limit")
    how = {name: options.pop(name) for name in own}
    return Trainer(files, out, on_plan=progress.begin, on_record=progress.step, on_stop=progress.stopping, **how)
