"""What a user asks of a run: suites, which are named lists of cells as TOML files, and options; and what comes of it:
limits, and jobs, which are cells to run with what their hashes do not know.
"""

import itertools
import math
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, cast

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from sparsebench.errors import UserError, reason_of, unknown
from sparsebench.records import store
from sparsebench.records.record import Cell, Failure, Head, Origin, Precision, Record, Status, Track, Where
from sparsebench.records.table import setting_text
from sparsebench.strategy.base import Kind
from sparsebench.strategy.budget import Budget

TIMEOUT = 6 * 3600.0
"""Seconds that a cell may take unless told otherwise: many times what any cell of the suites here does, and a strategy
that hangs costs a worker's night rather than the run."""
GIB = 2**30
LEAST_MEMORY = GIB // 2
"""Bytes; a worker that has loaded the libraries has most of it."""

_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": GIB,
          "tib": 2**40, "k": 2**10, "m": 2**20, "g": GIB, "t": 2**40}  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SuiteTask(_Model):
    """One task of a suite with its model.

    Attributes:
        params, model_params: as on the command line; what is not named is the task's, or the model's, own.
        sweep, model_sweep: parameters with several values each, every combination of which is run.
        n_train: numbers of training samples; 0 for a task that only tests.
        seeds: repetitions, in place of the suite's.
        budgets: one or several, in place of the suite's; blocks are the suite's.
        strategies: NAME[:PARAM=V,V...] each, in place of the suite's baselines.
        track: see `cell.Track`; "frozen" and "tuned" begin with trained networks.
        network: the suite whose task of this name says how those are trained. Its parameters, model and n_train are
            theirs; those of this task say how it is tested, and n_train how many images a strategy may look at before.
        gpu_precision: of tests on a GPU, see `cell.Cell`; on a CPU it is float32.
        figure: the figure of a paper that these cells are for, so that they can be run alone.
    """

    name: str
    params: dict[str, Any] = {}
    sweep: dict[str, tuple[Any, ...]] = {}
    model: str | None = None
    model_params: dict[str, Any] = {}
    model_sweep: dict[str, tuple[Any, ...]] = {}
    n_train: tuple[NonNegativeInt, ...] = Field(min_length=1)
    seeds: PositiveInt | None = None
    budgets: tuple[Budget, ...] = ()
    strategies: tuple[str, ...] | None = None
    where: Where = "both"
    track: Track = "scratch"
    network: str = ""
    gpu_precision: Precision = "float32"
    figure: str = ""

    @pydantic.model_validator(mode="after")
    def _has_a_network(self) -> Self:
        """Only what begins with trained networks names them, and their model is theirs."""
        if (self.track == "scratch") != (self.network == ""):
            raise ValueError("track = frozen or tuned goes with network, the suite of the trainings; scratch has none")
        if self.network and (self.model or self.model_params or self.model_sweep):
            raise ValueError(f"the model of track {self.track} is its network's; leave model out")
        if self.network and self.where != "both":
            raise ValueError(f"where strategies of track {self.track} act is the track's; leave where out")
        return self


def combinations(fixed: dict[str, Any], swept: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield every combination of the values of parameters that are swept over, with those that are fixed."""
    for values in itertools.product(*swept.values()):
        yield fixed | dict(zip(swept, values, strict=True))


class Suite(_Model):
    """A named, versioned list of tasks with the baselines that are always on.

    Attributes:
        keep_weights: whether the networks that are trained are kept: other suites may begin with them.
        own_pictures: whether users must say which pictures its tasks are made of.
        main_task: the one whose accuracy stands first on boards; its first one unless it is said.
        sample_complexity: the metric that says whether a training succeeded, where sample complexity is counted; "" for
            none.
    """

    name: str
    version: int
    title: str
    baselines: tuple[str, ...]
    seeds: PositiveInt
    budget: Budget
    keep_weights: bool = False
    own_pictures: bool = False
    main_task: str = ""
    sample_complexity: str = ""
    task: tuple[SuiteTask, ...] = Field(min_length=1)


def names() -> list[str]:
    """Return the names of the suites that come with sparsebench and with plugins."""
    return sorted({*_suite_files(), *_from_plugins()})


def _suite_files() -> dict[str, Path | Traversable]:
    files = (resources.files(__package__) / "suites").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def _from_plugins() -> dict[str, Path | Traversable]:
    from sparsebench.plugin.registry import Registry  # which loads plugins

    return Registry().suites()


def text(name: str) -> str:
    """Return the TOML of a suite by name, or from a path to a .toml file."""
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"suite file {name} cannot be read: {error.strerror}") from error
    files = _suite_files()
    if name not in files:
        files |= _from_plugins()
    if name not in files:
        raise unknown("suite", name, files)
    return files[name].read_text(encoding="utf-8")


def load(name: str) -> Suite:
    """Return a suite by name, or from a path to a .toml file.

    Raises:
        UserError: no such suite, or a file with an unknown key or a wrong value.
    """
    try:
        return Suite.model_validate(tomllib.loads(text(name)))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"suite '{name}' is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        *parts, key = map(str, first["loc"])
        if first["type"] == "extra_forbidden":
            kind = Budget if {"budget", "budgets"} & {*parts} else SuiteTask if parts else Suite
            raise unknown(f"key in suite '{name}'", ".".join([*parts, key]), kind.model_fields) from error
        got = None if first["type"] == "missing" else first["input"]  # which would be all that is there
        raise UserError(f"suite '{name}': {reason_of(error)}", got=got) from error


def training_entry(entry: SuiteTask) -> SuiteTask:
    """Return the task of a suite that says how the networks of another's task are trained.

    Raises:
        UserError: there is none of that name, or it is not one training.
    """
    tasks = [task for task in load(entry.network).task if task.name == entry.name]
    if len(tasks) != 1 or tasks[0].network or tasks[0].sweep or tasks[0].model_sweep or len(tasks[0].n_train) > 1:
        raise UserError(
            f"suite '{entry.network}' must have one training of task '{entry.name}'",
            next_step="name the task once, with one value a parameter and one n_train",
        )
    return tasks[0]


Rerun = Literal["missing", "failed", "always"]
PrecisionChoice = Literal["auto", Precision]
"""A precision, or that which the suite has on the device."""
T = TypeVar("T")


def _several(value: Any) -> tuple[Any, ...]:
    """Return the values that one value, several or None stand for."""
    many = isinstance(value, Iterable) and not isinstance(value, str)
    return () if value is None else tuple(value) if many else (value,)


Several = Annotated[tuple[T, ...], BeforeValidator(_several)]


def option(default: Any, about: str, **more: Any) -> Any:
    """Return a field that users may set, with its help text; a `title` stands there for the value."""
    return Field(default, description=about, **more)


@dataclass(frozen=True)
class Request:
    """Which cells a run is asked for, on top of its suite; None and () leave the suite's own.

    Attributes:
        figures: only what the suite has for these figures of a paper.
        single: whether networks are to be looked at, not judged: a task with several budgets has its suite's one, only
            the largest number of training samples counts, and weights are kept.
        alone: whether the plugins are all, without the suite's baselines and its tasks' own strategies.
        on_gpu: whether cells run on one, for which a suite may have another precision.
    """

    plugins: Several[str] = option(
        (),
        "A strategy, a plugin file, or all strategies. The budget may follow: macs=0.5, keep_rate=0.7, per_block=13, "
        "ratio=0.9 or counts=99+51,blocks=3+6 (see sparsebench list --published). Repeatable.",
        title="NAME|FILE.py|all[:PARAM=V,V...]",
    )
    suite: str = option("quick", "Name of a suite, or a .toml file.")
    tasks: Several[str] = option((), "Run only this task. Repeatable.", title="NAME[:PARAM=V...]")
    model: str | None = option(None, "Model for all tasks that it fits, e.g. vit:depth=5.", title="NAME[:PARAM=V...]")
    pretrained: bool = option(False, "Start from timm's trained weights.")
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
    figures: tuple[str, ...] = ()
    single: bool = False
    alone: bool = False
    on_gpu: bool = False


@dataclass(frozen=True)
class Files:
    """Where pictures and trained weights come from; None leaves the suite's.

    Attributes:
        places: where files lie that were looked at, by the names that cells have for them; see `locate`.
        pictures: names of pictures by parameter, whether they are only tested on, and what the user gave.
    """

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
        None, "The state dict to use if a checkpoint has several, e.g. model_ema. [state_dict, else model]",
        title="NAME",
    )  # fmt: skip
    networks: Path | None = option(
        None,
        "Folder of a run that trained the suite's networks. [--out, then the networks in the package]",
        title="DIR",
    )
    places: dict[str, Path] = field(default_factory=dict, init=False, compare=False, repr=False)
    pictures: dict[tuple[str, bool, str], str] = field(default_factory=dict, init=False, compare=False, repr=False)


def _number(option: str, value: float | str, units: dict[str, int], allowed: str) -> float:
    """Return a number with its unit as a number of seconds or bytes."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", str(value).strip().lower(), re.ASCII)
    if match is None or match[2] not in units or not math.isfinite(number := float(match[1]) * units[match[2]]):
        raise UserError(option, got=f"'{value}'", allowed=allowed)
    return number


@dataclass(frozen=True)
class Execution:
    """How cells are run, and which of them here and now; no record depends on it but by its device."""

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
    observe: Several[str] = option(
        (),
        "Send each record to an observer: tensorboard[:dir=DIR], mlflow[:uri=URI], or your own. Repeatable.",
        title="NAME|FILE.py[:PARAM=V]",
    )

    def limits(self) -> tuple[float, float]:
        """Return the seconds that a cell may take, and the bytes that its worker and what it started may; 0 for any.

        Raises:
            UserError: no such number, or a limit without a worker process, which alone can be killed.
        """
        for option, value in (("--timeout", self.timeout), ("--memory-limit", self.memory_limit)):
            if value is not None and self.jobs == 0:
                raise UserError(
                    f"{option} needs a worker process: only that can be killed", next_step="give --jobs 1 or more"
                )
        timeout, memory = (TIMEOUT if self.timeout is None else self.timeout), self.memory_limit
        seconds = _number("--timeout", timeout, _SECONDS, "30, 10m, 1.5h, 0 for none")
        size = _number("--memory-limit", 0 if memory is None else memory, _BYTES, "4GiB, 800MB, 0 for none")
        if 0 < size < LEAST_MEMORY:
            raise UserError("--memory-limit", got=str(memory), allowed=f"{LEAST_MEMORY / GIB:g}GiB or more, or 0")
        if size and sys.platform != "linux":
            raise UserError("--memory-limit: only Linux says what processes take", next_step="leave it out")
        return seconds, size


OPTIONS: Mapping[type, Mapping[str, FieldInfo]] = {
    value: {name: info for name, info in value.__pydantic_fields__.items() if info.description}
    for value in cast(Any, (Request, Files, Execution))  # mypy does not know what pydantic adds
}
"""The fields of each value that users may set, with help texts and titles of values; no two have the same name."""


def option_of(name: str) -> str:
    """Return what the option of a field is called on the command line, where the field is what it comes to."""
    return "--" + {"plugins": "plugin", "tasks": "task"}.get(name, name.replace("_", "-"))


def values_of(keywords: Mapping[str, Any]) -> tuple[Request, Files, Execution]:
    """Return the three values of what a user gave by the names of their fields. One value may stand for several.

    Raises:
        UserError: there is no such field for users, or what is given is of another type.
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


class Job(_Model):
    """A cell to run.

    Attributes:
        origin: where its strategy comes from.
        kind: the strategy's kind.
        label: what tables call it: its name, with the parameters that are not its defaults.
        files: the plugin files that bring its strategy, task or model: what a worker loads for it.
        code: the plugins whose code it runs and that do not come with sparsebench, by name or path, and its strategy;
            () if there are none. Cells with other code have other workers.
        after: id of the cell that must be done before, or "".
        network: id of the cell whose trained network this one tests, or "" where it trains its own.
        requested: whether the cell is one of the request; else it is there only because others start from it.
        keep_weights: whether its weights are kept: others start from them, or they are looked at.
        together: whether several like it may be trained in one program, where that is faster.
        cost: about the MACs of its training and its test, without a strategy; see `expand`.
    """

    cell: Cell
    origin: Origin
    kind: Kind
    label: str
    files: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    after: str = ""
    network: str = ""
    requested: bool = True
    keep_weights: bool = False
    together: bool = False
    cost: float = 1.0

    @cached_property
    def alike(self) -> tuple[str, bool, int]:
        """What it has in common with those that take as long for what they cost.

        That is its task and model with all their parameters, whether it only tests a network, and the training samples.
        """
        return setting_text(self.cell), bool(self.network), 0 if self.network else self.cell.n_train

    @property
    def weights(self) -> str:
        """Id of the cell whose trained weights it is tested with."""
        return self.network or self.cell.id

    @property
    def order(self) -> tuple[bool, int]:
        """Rises in the order in which jobs are begun: those that others start from first, as they start from others."""
        return not self.keep_weights, len(self.cell.inits) if self.keep_weights else 0

    def is_answered_by(self, head: Head | Record) -> bool:
        """Say whether a record of its cell is one of its revision that was not skipped."""
        return head.status != "skipped" and head.origin.identity == self.origin.identity

    def record_of_failure(self, status: Status, failure: Failure, started: str = "", seconds: float = 0.0) -> Record:
        """Return a record that says why there is no result."""
        return Record(
            cell=self.cell, cell_id=self.cell.id, status=status, failure=failure, origin=self.origin, kind=self.kind,
            label=self.label, started=started, seconds=round(seconds, 3),
        )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What all cells of a run have in common.

    Attributes:
        out: the run's folder.
        device: "cpu", "cuda" or "cuda:i".
        locations: where the image sets lie, and by their cells trained weights that are not in the run's folder.
        execution: how they are run.
    """

    out: Path
    device: str
    locations: Mapping[str, Path] = field(default_factory=dict)
    execution: Execution = Execution()

    def weights(self, cell_id: str) -> Path:
        """Return the file of a cell's trained weights."""
        return self.locations.get(cell_id) or store.weights_path(self.out, cell_id)
