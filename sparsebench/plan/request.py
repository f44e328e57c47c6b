"""The input of a run: the requested cells, the user's files, and how cells are run. Each option is defined once."""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    ValidationError,
)
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from sparsebench.errors import UserError, unknown
from sparsebench.models.base import TRANSFORMERS
from sparsebench.records.record import Pooling, Precision, Where

TIMEOUT = 6 * 3600.0
"""The default time limit of a cell in seconds: many times that of any cell of the shipped suites, but a strategy that
hangs does not block the run."""
GIB = 2**30
LEAST_MEMORY = GIB // 2
"""The lowest memory limit in bytes. The libraries alone need most of it."""

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": GIB,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": GIB,
    "t": 2**40,
}

Rerun = Literal["missing", "failed", "always"]
PrecisionChoice = Literal["auto", Precision]
"""A precision, or "auto" for the suite's precision on the device."""
T = TypeVar("T")


def _several(value: Any) -> tuple[Any, ...]:
    """Return a value, an iterable of values, or None as a tuple."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable):
        return tuple(value)
    return (value,)


Several = Annotated[tuple[T, ...], BeforeValidator(_several)]


def option(default: Any, about: str, **more: Any) -> Any:
    """Return a field that users can set.

    `about` is its help text, and `title` is the placeholder for the value in the help text.
    """
    return Field(default, description=about, **more)


@dataclass(frozen=True)
class Request:
    """The requested cells of a run: a suite and changes to it. None and () change nothing.

    Attributes:
        figures: figures of a paper; if given, only the suite's cells for them are run.
        single: whether the networks are for pictures, not for a comparison. A task with several budgets then has the
            suite's one budget, only the largest n_train is used, and weights are stored.
        alone: whether only the plugins are run, without baselines and the tasks' own strategies.
        on_gpu: whether cells run on a GPU, for which a suite may have another precision.
    """

    plugins: Several[str] = option(
        (),
        "A strategy, a plugin file, or all strategies. The budget may follow: macs=0.5, keep_rate=0.7, per_block=13, "
        "ratio=0.9 or counts=99+51,blocks=3+6 (see sparsebench list --published). Repeatable.",
        title="NAME|FILE.py|all[:PARAM=V,V...]",
    )
    suite: str = option("quick", "Name of a suite, or a .toml file.")
    tasks: Several[str] = option((), "Run only this task. Repeatable.", title="NAME[:PARAM=V...]")
    model: str | None = option(
        None,
        "Model for all tasks that it fits: vit:depth=5, timm:NAME, or hf:FOLDER, a folder of the transformers library.",
        title="NAME[:PARAM=V...]",
    )
    pretrained: bool = option(False, "Start from timm's trained weights.")
    image_size: PositiveInt | None = option(
        None,
        "Side of the images in pixels, the parameter canvas of image tasks; position embeddings are resampled. [that "
        "of the weights or the task]",
        title="SIDE",
    )
    seeds: PositiveInt | None = option(
        None, "Number of repetitions of each cell, instead of the suite's; deterministic cells run once."
    )
    keep: Several[float] = option((), "Budgets as keep rates at each stage; overrides the suite's budgets.")
    macs: Several[float] = option((), "Budgets as shares of the dense MACs; overrides the suite's budgets.")
    n_train: Several[PositiveInt] = option((), "Numbers of training samples, instead of the suite's.")
    where: Where = option("both", "Whether tokens are removed in training, in the test, or in both.")
    precision: PrecisionChoice = option(
        "auto",
        "Precision of tests of trained networks. auto: the suite's, usually float32. bfloat16 uses autocast.",
    )
    pooling: Pooling = option("model", "Features of probes: as the model pools its tokens, or the mean of its patches.")
    figures: tuple[str, ...] = ()
    single: bool = False
    alone: bool = False
    on_gpu: bool = False

    @property
    def changes_suite(self) -> bool:
        """Whether it asks for other cells than those that its suite has for each strategy."""
        whole = Request(plugins=self.plugins, suite=self.suite, alone=self.alone, on_gpu=self.on_gpu)
        return self != whole

    @property
    def names_folder(self) -> bool:
        """Whether the model is a folder of the transformers library, which has the weights."""
        return self.model is not None and self.model.startswith(TRANSFORMERS)


@dataclass(frozen=True)
class Files:
    """The user's pictures and trained weights, see `locate.locate`. None uses those of the suite."""

    images: Several[str] = option(
        (),
        "Pictures for the image tasks; see sparsebench data. Repeatable for tests of trained weights.",
        title="NAME|folder:DIR",
    )
    backgrounds: str | None = option(None, "Backgrounds for the image tasks.", title="NAME|DIR|FILE.npz")
    pretrain_images: str | None = option(None, "Pictures for pre-training. [the task's own]", title="NAME|folder:DIR")
    data_root: Path | None = option(None, "Folder with the official data sets. [./data]")
    download: bool = option(False, "Download missing data sets to --data-root, where torchvision can.")
    skip_bad: bool = option(False, "Leave out unreadable pictures; the board says how many.")
    weights: Several[Path] = option(
        (),
        "Start from trained weights: a file, a folder of files, or a quoted pattern. Each file is a network. "
        "Repeatable.",
        title="FILE|DIR|PATTERN",
    )
    weights_key: str | None = option(
        None,
        "The state dict to use if a checkpoint has several, e.g. model_ema. [state_dict, else model]",
        title="NAME",
    )
    text_features: Path | None = option(
        None, "Classes of hf:FOLDER as features of texts, without training.", title="FILE.npz"
    )
    networks: Path | None = option(
        None,
        "Folder of a run that trained the suite's networks. [--out, then the networks in the package]",
        title="DIR",
    )


def _number(option: str, value: float | str, units: dict[str, int], allowed: str) -> float:
    """Return a number with a unit in seconds or bytes."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", str(value).strip().lower(), re.ASCII)
    number = math.nan
    if match is not None and match[2] in units:
        number = float(match[1]) * units[match[2]]
    if not math.isfinite(number):
        raise UserError(option, got=f"'{value}'", allowed=allowed)
    return number


@dataclass(frozen=True)
class Execution:
    """How cells are run, and which of them are run now. Of these options, results depend on the device only."""

    device: str = option("auto", "auto, cpu, cuda or cuda:i.")
    rerun: Rerun = option("missing", "Which existing results to compute again.")
    checkpoint: Annotated[float, BeforeValidator(lambda seconds: seconds or 0)] = option(
        60.0, "Seconds between training checkpoints; 0 for none.", title="SECONDS", ge=0
    )
    timeout: float | str | None = option(
        None,
        "Stop a cell that takes longer; 0 for no limit.  [default: 6h; none with --jobs 0]",
        title="SECONDS|10m|1h",
    )
    memory_limit: float | str | None = option(
        None, "Stop a cell if its worker uses more memory. The libraries alone need 0.4 GiB.", title="BYTES|4GiB"
    )
    jobs: int | None = option(
        None, "Number of worker processes; 0 runs in the main process. [one per core, or GPU]", ge=0
    )
    shard: str | None = option(None, "Run only shard I of N, counted from 0, for job arrays.", title="I/N")
    batch: int | None = option(None, "Test batch size; halved until it fits in memory. [up to 200]", ge=1)
    exclusive: bool = option(False, "Run one cell at a time on each machine or GPU, for exact speeds.")
    dask: str | None = option(None, "Run cells on the workers of this Dask scheduler.", title="tcp://HOST:PORT")
    keep_features: bool = option(
        False, "Keep the features of probes in the run's folder, for other sizes with the same largest one."
    )
    observe: Several[str] = option(
        (),
        "Send each record to an observer: tensorboard[:dir=DIR], mlflow[:uri=URI], or your own. Repeatable.",
        title="NAME|FILE.py[:PARAM=V]",
    )

    def limits(self) -> tuple[float, float]:
        """Return the limits of a cell in seconds, and in bytes for its worker and all its processes; 0 for no limit.

        Raises:
            UserError: a limit is invalid, or is given although cells run in the main process, which cannot be killed.
        """
        for option, value in (("--timeout", self.timeout), ("--memory-limit", self.memory_limit)):
            if value is not None and self.jobs == 0:
                raise UserError(
                    f"{option} needs a worker process, which can be killed", next_step="give --jobs 1 or more"
                )
        timeout = TIMEOUT if self.timeout is None else self.timeout
        memory = self.memory_limit
        seconds = _number("--timeout", timeout, _SECONDS, "30, 10m, 1.5h, 0 for none")
        size = _number("--memory-limit", 0 if memory is None else memory, _BYTES, "4GiB, 800MB, 0 for none")
        if 0 < size < LEAST_MEMORY:
            raise UserError("--memory-limit", got=str(memory), allowed=f"{LEAST_MEMORY / GIB:g}GiB or more, or 0")
        if size and sys.platform != "linux":
            raise UserError("--memory-limit: only Linux reports the memory of processes", next_step="leave it out")
        return seconds, size


OPTIONS: Mapping[type, Mapping[str, FieldInfo]] = {
    value: {name: info for name, info in value.__pydantic_fields__.items() if info.description}
    for value in cast(Any, (Request, Files, Execution))  # mypy does not know what pydantic adds
}
"""The fields of each class that users can set, by name. No name occurs in two classes."""


def option_of(name: str) -> str:
    """Return the name of a field's option on the command line."""
    return "--" + {"plugins": "plugin", "tasks": "task"}.get(name, name.replace("_", "-"))


def values_of(keywords: Mapping[str, Any]) -> tuple[Request, Files, Execution]:
    """Return the request, files and execution from the user's arguments, by field name.

    A single value is accepted for fields with several values.

    Raises:
        UserError: an argument is unknown or has a wrong type.
    """
    names = {name for options in OPTIONS.values() for name in options}
    if others := keywords.keys() - names:
        raise unknown("argument", min(others), names)

    def new(kind: type[T]) -> T:
        return kind(**{name: keywords[name] for name in OPTIONS[kind] if name in keywords})

    try:
        return new(Request), new(Files), new(Execution)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{option_of(str(first['loc'][0]))}: {first['msg']}", got=repr(first["input"])) from error
