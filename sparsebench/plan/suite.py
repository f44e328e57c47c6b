"""Suites: named, versioned lists of cells, as TOML files."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from sparsebench.errors import UserError, unknown
from sparsebench.records.cell import Precision, Track, Where
from sparsebench.strategy.budget import Budget


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
    params: dict[str, Any] = Field(default_factory=dict)
    sweep: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    model: str | None = None
    model_params: dict[str, Any] = Field(default_factory=dict)
    model_sweep: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    n_train: tuple[NonNegativeInt, ...] = Field(min_length=1)
    seeds: PositiveInt | None = None
    budgets: tuple[Budget, ...] = ()
    strategies: tuple[str, ...] | None = None
    where: Where = "both"
    track: Track = "scratch"
    network: str = ""
    gpu_precision: Precision = "float32"
    figure: str = ""

    @model_validator(mode="after")
    def _has_a_network(self) -> Self:
        """Only what begins with trained networks names them, and their model is theirs."""
        if (self.track == "scratch") != (self.network == ""):
            raise ValueError("track = frozen or tuned goes with network, the suite of the trainings; scratch has none")
        if self.network and (self.model or self.model_params or self.model_sweep):
            raise ValueError(f"the model of track {self.track} is its network's; leave model out")
        if self.network and self.where != "both":
            raise ValueError(f"where strategies of track {self.track} act is the track's; leave where out")
        return self

    def task_params(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the task's parameters."""
        return _combinations(self.params, self.sweep)

    def all_model_params(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the model's parameters."""
        return _combinations(self.model_params, self.model_sweep)


def _combinations(fixed: dict[str, Any], swept: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
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
    seeds: int = Field(gt=0)
    budget: Budget
    keep_weights: bool = False
    own_pictures: bool = False
    main_task: str = ""
    sample_complexity: str = ""
    task: tuple[SuiteTask, ...] = Field(min_length=1)


def names() -> list[str]:
    """Return the names of the suites that come with sparsebench and with plugins."""
    return sorted({*_shipped(), *_brought()})


def _shipped() -> dict[str, Path | Traversable]:
    files = (resources.files(__package__) / "suites").iterdir()
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def _brought() -> dict[str, Path | Traversable]:
    from sparsebench.plugin.registry import Registry  # which loads plugins

    return Registry().suites()


def text(name: str) -> str:
    """Return the TOML of a suite by name, or from a path to a .toml file."""
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"suite file {name} cannot be read: {error.strerror}") from error
    files = _shipped()
    if name not in files:
        files |= _brought()
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
        place = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            owners: dict[str, type[BaseModel]] = {"task": SuiteTask, "budget": Budget, "budgets": Budget}
            owner: type[BaseModel] = Suite
            for part in first["loc"][:-1]:
                owner = owners.get(str(part), owner)
            raise unknown(f"key in suite '{name}'", place, owner.model_fields) from error
        raise UserError(f"suite '{name}': {place}: {first['msg']}", got=first.get("input")) from error


def training_entry(entry: SuiteTask) -> SuiteTask:
    """Return the task of a suite that says how the networks of another's task are trained.

    Raises:
        UserError: there is none of that name, or it is not one training.
    """
    suite = load(entry.network)
    same = [one for one in suite.task if one.name == entry.name]
    if len(same) != 1 or same[0].network or same[0].sweep or same[0].model_sweep or len(same[0].n_train) > 1:
        raise UserError(
            f"suite '{entry.network}' must have one training of task '{entry.name}'",
            got=f"{len(same)} tasks of that name" if len(same) != 1 else "several, or one of other networks",
            next_step="name the task once, with one value a parameter and one n_train",
        )
    return same[0]
