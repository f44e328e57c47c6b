"""Suites, which are TOML files that list tasks, models, budgets and baselines."""

import itertools
import tomllib
from collections.abc import Iterator, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, PrivateAttr, ValidationError

from sparsebench.errors import UserError, reason_of, unknown
from sparsebench.records.record import ON_TRAINED, Precision, Track, Where
from sparsebench.strategy.budget import Budget


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SuiteTask(_Model):
    """One task of a suite with its model.

    Attributes:
        params, model_params: parameters of task and model; others have their defaults.
        sweep, model_sweep: parameters with several values each; all combinations are run.
        n_train: numbers of training samples; 0 for a task that only tests.
        seeds: the number of repetitions, in place of the suite's.
        budgets: budgets in place of the suite's; the blocks are the suite's.
        each_schedule_at: a share of the MACs. A strategy that chooses its schedule at this budget also runs with each
            schedule that it can choose, so that boards show how much depends on the choice.
        strategies: strategies as NAME[:PARAM=V,V...], in place of the suite's baselines.
        track: see `record.Track`. All tracks but "scratch" start from trained networks.
        network: the suite whose task of the same name trains these networks, with its own parameters, model and
            n_train. This task's parameters change them for the test or the fine-tuning. Its n_train is the number of
            images to fine-tune on, or for "frozen" the number of images that a strategy may fit on. "" on the tracks
            "frozen" and "probe": the user gives trained weights of the model. Weights that the user gives replace the
            suite's networks on the track "probe".
        network_task: the task of the suite `network` that trains these networks, if it has another name.
        network_params: parameters of the task with these networks, and not with weights that the user gives.
        gpu_precision: the precision of tests on a GPU, see `record.Cell`; on a CPU it is float32.
        figure: the figure of a paper that uses these cells, so that they can be run separately.
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
    each_schedule_at: float | None = None
    strategies: tuple[str, ...] | None = None
    where: Where = "both"
    track: Track = "scratch"
    network: str = ""
    network_task: str = ""
    network_params: dict[str, Any] = {}
    gpu_precision: Precision = "float32"
    figure: str = ""
    _training: "SuiteTask | None" = PrivateAttr(None)

    @pydantic.model_validator(mode="after")
    def _has_a_network(self) -> Self:
        """Check that `network` is given where the track needs it, and that no model is given beside it."""
        if self.track == "scratch" and self.network:
            raise ValueError("track scratch has no network")
        if self.track == "tuned" and not self.network:
            raise ValueError("track tuned needs network, a suite that trains")
        if (self.network_task or self.network_params) and not self.network:
            raise ValueError("network_task and network_params need network, a suite that trains")
        if self.network and (self.model or self.model_params or self.model_sweep):
            raise ValueError(f"the model of track {self.track} is its network's; leave model out")
        return self

    @property
    def training(self) -> "SuiteTask | None":
        """The task of the suite `network` that trains the networks; None without a network. `load` finds it."""
        return self._training if self.network else None  # a copy without a network keeps the private attribute

    @property
    def is_probe(self) -> bool:
        """Whether probes are learned on the features of its networks."""
        return self.track == "probe"

    @property
    def tests_weights(self) -> bool:
        """Whether it tests trained weights that the user gives."""
        return self.track in ON_TRAINED and not self.network


def combinations(fixed: dict[str, Any], swept: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Yield the fixed parameters with each combination of the values of swept parameters."""
    for values in itertools.product(*swept.values()):
        yield fixed | dict(zip(swept, values, strict=True))


class Suite(_Model):
    """A named, versioned list of tasks, with baselines that are always run.

    Attributes:
        keep_weights: whether trained networks are stored, so that other suites can start from them.
        own_pictures: whether users must give the pictures of its tasks.
        main_task: the task whose accuracy comes first on boards; "" for the first task.
        sample_complexity: the metric that tells whether a training succeeded, from which sample complexity is computed;
            "" for none.
        target: the accuracy of probes for which boards say how many training images it needs; 0 for none.
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
    target: float = Field(0.0, ge=0, le=1)
    task: tuple[SuiteTask, ...] = Field(min_length=1)


def names() -> list[str]:
    """Return the names of the suites that come with sparsebench and with plugins."""
    return sorted({*_suite_files(), *_from_plugins()})


def exists(name: str) -> bool:
    """Return whether a suite comes with sparsebench or with a plugin. Plugins are loaded only if they may have it."""
    return name in _suite_files() or name in _from_plugins()


def _suite_files() -> dict[str, Path | Traversable]:
    files = (resources.files(__package__) / "suites").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def _from_plugins() -> dict[str, Path | Traversable]:
    from sparsebench.plugin.registry import Registry  # imported here, as it loads plugins

    return Registry().suites()


def text(name: str) -> str:
    """Return the TOML text of a suite, by name or by the path of a .toml file."""
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
    """Return a suite, by name or by the path of a .toml file, with the trainings of its networks.

    Raises:
        UserError: the suite does not exist, or has an unknown key or an invalid value, or so does the suite that trains
            its networks.
    """
    suite = _read(name)
    trained = {network: _read(network) for network in {entry.network for entry in suite.task} - {""}}
    for entry in suite.task:
        if entry.network:
            entry._training = _training_of(entry, trained[entry.network])
    return suite


def _read(name: str) -> Suite:
    """Return a suite without the trainings of its networks.

    Raises:
        UserError: the suite does not exist, or has an unknown key or an invalid value.
    """
    try:
        return Suite.model_validate(tomllib.loads(text(name)))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"suite '{name}' is not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        *parts, key = map(str, first["loc"])
        if first["type"] == "extra_forbidden":
            allowed = _class_of_table(parts).model_fields
            raise unknown(f"key in suite '{name}'", ".".join([*parts, key]), allowed) from error
        got = None if first["type"] == "missing" else first["input"]  # of a missing key, the input is the whole table
        raise UserError(f"suite '{name}': {reason_of(error)}", got=got) from error


def _class_of_table(path: Sequence[str]) -> type[BaseModel]:
    """Return the class of a table of a suite, which the keys and numbers of `path` lead to."""
    if "budget" in path or "budgets" in path:
        return Budget
    if "task" in path:
        return SuiteTask
    return Suite


def _is_single(task: SuiteTask) -> bool:
    """Return whether a task of a suite is one training."""
    return not (task.network or task.sweep or task.model_sweep or len(task.n_train) > 1)


def _training_of(entry: SuiteTask, trained: Suite) -> SuiteTask:
    """Return the task of the suite `trained` that trains the networks of an entry.

    Raises:
        UserError: the suite has no such task, or the task is not a single training.
    """
    name = entry.network_task or entry.name
    tasks = [task for task in trained.task if task.name == name]
    if len(tasks) != 1 or not _is_single(tasks[0]):
        raise UserError(
            f"suite '{entry.network}' must have one training of task '{name}'",
            next_step="list the task once, with one value for each parameter and one n_train",
        )
    return tasks[0]
