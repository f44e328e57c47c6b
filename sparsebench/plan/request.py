"""What a user asks of a run: which cells, with which files, and how they are run.

Options of commands and keywords of `sparsebench.run` are the fields here that have a help text. Imports nothing large.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from sparsebench.errors import UserError, unknown
from sparsebench.records.cell import Precision, Where

Rerun = Literal["missing", "failed", "always"]
PrecisionChoice = Literal["auto", Precision]
"""A precision, or that which the suite has on the device."""
T = TypeVar("T")


def option(default: Any, about: str, **words: Any) -> Any:
    """Return a field that users may set.

    Args:
        default: unless they do.
        about: the help text.
        words: `name` of the option where it is not the field's, `metavar`, and `least`, the smallest number allowed.
    """
    return field(default=default, metadata={"help": about, **words})


@dataclass(frozen=True)
class Request:
    """Which cells a run is asked for, on top of its suite; None and () leave the suite's own.

    Attributes:
        figures: only what the suite has for these figures of a paper.
        single: whether a task with several budgets has its suite's one: two strategies are to be looked at, not judged.
        alone: whether the plugins are all, without the suite's baselines and its tasks' own strategies.
        on_gpu: whether cells run on one, for which a suite may have another precision.
    """

    plugins: tuple[str, ...] = option(
        (),
        "A strategy, a plugin file, or all strategies. The budget may follow: macs=0.5, keep_rate=0.7, per_block=13, "
        "ratio=0.9 or counts=99+51,blocks=3+6 (see sparsebench list --published). Repeatable.",
        name="plugin",
        metavar="NAME|FILE.py|all[:PARAM=V,V...]",
    )
    suite: str = option("quick", "Name of a suite, or a .toml file.")
    tasks: tuple[str, ...] = option((), "Run only this task. Repeatable.", name="task", metavar="NAME[:PARAM=V...]")
    model: str | None = option(None, "Model for all tasks that it fits, e.g. vit:depth=5.", metavar="NAME[:PARAM=V...]")
    pretrained: bool = option(False, "Start from timm's trained weights.")
    seeds: int | None = option(
        None, "Number of repetitions of each cell, instead of the suite's; deterministic cells run once."
    )
    keep: tuple[float, ...] = option((), "Budgets as keep rates at each stage; overrides the suite's budgets.")
    macs: tuple[float, ...] = option((), "Budgets as shares of the dense MACs; overrides the suite's budgets.")
    n_train: tuple[int, ...] = option((), "Numbers of training samples, instead of the suite's.")
    where: Where = option("both", "Whether tokens are removed in training, in the test, or in both.")
    precision: PrecisionChoice = option(
        "auto",
        "Precision of tests of trained networks. auto: the suite's, usually float32. bfloat16 uses autocast.",
    )
    figures: tuple[str, ...] = ()
    single: bool = False
    alone: bool = False
    on_gpu: bool = False


@dataclass(frozen=True)
class Files:
    """Where pictures and trained weights come from; None leaves the suite's.

    Attributes:
        dry: whether nothing is to be fetched or decoded.
        places: where files lie that were looked at, by the names that cells have for them; see `locate`.
        pictures: names of pictures by parameter, whether they are only tested on, and what the user gave.
        trained: names of files of trained weights.
    """

    images: tuple[str, ...] = option(
        (),
        "Pictures for the image tasks; see sparsebench data. Repeatable for tests of trained weights.",
        metavar="NAME|folder:DIR",
    )
    backgrounds: str | None = option(None, "Backgrounds for the image tasks.", metavar="NAME|DIR|FILE.npz")
    pretrain_images: str | None = option(None, "Pictures for pre-training. [the task's own]", metavar="NAME|folder:DIR")
    data_root: Path | None = option(None, "Folder with the official data sets. [./data]")
    download: bool = option(False, "Download missing data sets to --data-root, where torchvision can.")
    skip_bad: bool = option(False, "Leave out unreadable pictures; the board says how many.")
    weights: tuple[Path, ...] = option(
        (),
        "Start from trained weights: a file, a folder of files, or a quoted pattern. Each file is a network. "
        "Repeatable.",
        metavar="FILE|DIR|PATTERN",
    )
    weights_key: str | None = option(
        None, "The state dict to use if a checkpoint has several, e.g. model_ema. [state_dict, else model]",
        metavar="NAME",
    )  # fmt: skip
    networks: Path | None = option(
        None,
        "Folder of a run that trained the suite's networks. [--out, then the networks in the package]",
        metavar="DIR",
    )
    dry: bool = False
    places: dict[str, Path] = field(default_factory=dict, init=False, compare=False, repr=False)
    pictures: dict[tuple[str, bool, str], str] = field(default_factory=dict, init=False, compare=False, repr=False)
    trained: list[str] = field(default_factory=list, init=False, compare=False, repr=False)


@dataclass(frozen=True)
class How:
    """How cells are run, and which of them here and now; no record depends on it but by its device."""

    device: str = option("auto", "auto, cpu, cuda or cuda:i.")
    rerun: Rerun = option("missing", "Which existing results to compute again.")
    checkpoint: float = option(
        60.0,
        "Seconds between training checkpoints; 0 for none.",
        metavar="SECONDS",
        least=0,
    )
    timeout: float | str | None = option(
        None,
        "Stop a cell that takes longer; 0 for no limit.  [default: 6h; none with --jobs 0]",
        metavar="SECONDS|10m|1h",
    )
    memory_limit: float | str | None = option(
        None, "Stop a cell if its worker uses more memory. The libraries alone need 0.4 GiB.", metavar="BYTES|4GiB"
    )
    jobs: int | None = option(
        None, "Number of worker processes; 0 runs in the main process. [one per core, or GPU]", least=0
    )
    shard: str | None = option(None, "Run only shard I of N, counted from 0, for job arrays.", metavar="I/N")
    batch: int | None = option(None, "Test batch size; halved until it fits in memory. [up to 200]", least=1)
    exclusive: bool = option(False, "Run one cell at a time on each machine or GPU, for exact speeds.")
    dask: str | None = option(None, "Run cells on the workers of this Dask scheduler.", metavar="tcp://HOST:PORT")
    observe: tuple[str, ...] = option(
        (),
        "Send each record to an observer: tensorboard[:dir=DIR], mlflow[:uri=URI], or your own. Repeatable.",
        metavar="NAME|FILE.py[:PARAM=V]",
    )


class Option(NamedTuple):
    """A field that users may set: its name, type, default, and what `option` was given."""

    name: str
    type: Any
    default: Any
    words: Mapping[str, Any]

    def value(self, given: Any) -> Any:
        """Return what a user gave as the field has it; None is 0 of a number, and else what the option is unless given.

        Raises:
            UserError: it is of another type.
        """
        several = get_origin(self.type) is tuple
        if given is None:
            return 0.0 if self.type is float else self.default if several else None
        many = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
        try:
            return TypeAdapter(self.type).validate_python(many if several else given)
        except ValidationError as error:
            raise UserError(f"{self.name}: {error.errors()[0]['msg']}", got=repr(given)) from error


def _options(value: type) -> dict[str, Option]:
    types = get_type_hints(value)
    return {
        one.name: Option(one.name, types[one.name], one.default, one.metadata) for one in fields(value) if one.metadata
    }


OPTIONS: Mapping[type, Mapping[str, Option]] = {value: _options(value) for value in (Request, Files, How)}
"""The fields of each value that users may set; no two have the same name."""


def values_of(keywords: Mapping[str, Any]) -> tuple[Request, Files, How]:
    """Return the three values of what a user gave by the names of their fields.

    Raises:
        UserError: there is no such field for users.
    """
    names = {name for options in OPTIONS.values() for name in options}
    if others := keywords.keys() - names:
        raise unknown("argument", min(others), names)

    def new(value: type[T]) -> T:
        return value(**{name: one.value(keywords[name]) for name, one in OPTIONS[value].items() if name in keywords})

    return new(Request), new(Files), new(How)
