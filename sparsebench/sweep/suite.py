"""Suites: named, versioned lists of cells, and how a run's request becomes cells."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from sparsebench.budget import FULL, Budget
from sparsebench.errors import UserError, unknown
from sparsebench.models.base import Model
from sparsebench.plugin.registry import Found, Registry
from sparsebench.plugin.spec import Spec, fill, parse
from sparsebench.strategy import Strategy
from sparsebench.sweep.cell import Cell, Part, Where
from sparsebench.sweep.job import Job
from sparsebench.tasks.base import Task

BUDGET_KEYS = ("keep_rate", "macs")
WEIGHTS_SEED = 0


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SuiteTask(_Model):
    """One task of a suite with its model and its numbers of training samples; empty means the task's own."""

    name: str
    params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    model_params: dict[str, Any] = Field(default_factory=dict)
    n_train: tuple[PositiveInt, ...] = Field(min_length=1)


class Suite(_Model):
    """A named, versioned list of tasks with the baselines that are always on."""

    name: str
    version: int
    title: str
    baselines: tuple[str, ...]
    seeds: int = Field(gt=0)
    budget: Budget
    task: tuple[SuiteTask, ...] = Field(min_length=1)


def names() -> list[str]:
    """Return the names of the suites that come with sparsebench."""
    return sorted(f.name.removesuffix(".toml") for f in _folder().iterdir() if f.name.endswith(".toml"))


def _folder() -> Any:
    return resources.files("sparsebench") / "suites"


def text(name: str) -> str:
    """Return the TOML of a suite by name, or from a path to a .toml file."""
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise UserError(f"suite file {name} does not exist")
        try:
            return Path(name).read_text()
        except OSError as error:
            raise UserError(f"suite file {name} cannot be read: {error.strerror}") from error
    if name not in names():
        raise unknown("suite", name, names())
    return (_folder() / f"{name}.toml").read_text()


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
            owner = SuiteTask if first["loc"][0] == "task" else Budget if first["loc"][0] == "budget" else Suite
            raise unknown(f"key in suite '{name}'", place, owner.model_fields) from error
        raise UserError(f"suite '{name}': {place}: {first['msg']}", got=first.get("input")) from error


@dataclass(frozen=True)
class Request:
    """What a run was asked for, on top of its suite; None and () leave the suite's own.

    Attributes:
        plugins, tasks: NAME, NAME:param=v1,v2, and for plugins a path to a .py file.
        model: NAME or NAME:param=v, for every task it fits.
        keep, macs: budgets to sweep over, in place of the suite's.
        images, backgrounds: names of located image sets, for every image task.
        where: whether tokens are removed in training, in the test, or in both.
    """

    plugins: tuple[str, ...] = ()
    suite: str = "quick"
    tasks: tuple[str, ...] = ()
    model: str | None = None
    images: str | None = None
    backgrounds: str | None = None
    seeds: int | None = None
    keep: tuple[float, ...] = ()
    macs: tuple[float, ...] = ()
    n_train: tuple[int, ...] = ()
    where: Where = "both"


def expand(request: Request, registry: Registry) -> list[Job]:
    """Return the jobs of a request: initial models first, then repetition by repetition.

    In that order the work left is always like the work done, and every strategy has a number after the first
    repetition.
    """
    if request.where not in get_args(Where):
        raise UserError("where", got=f"'{request.where}'", allowed=get_args(Where))
    suite = load(request.suite)
    seeds = suite.seeds if request.seeds is None else request.seeds
    if seeds < 1:
        raise UserError("--seeds", got=seeds, allowed="1 or more")
    contenders = list(_contenders(suite, request, registry))
    settings = list(_settings(suite, request, registry))
    jobs: dict[str, Job] = {}
    for repetition in range(seeds):
        for setting in settings:
            for contender in contenders:
                for n_train in setting.n_train:
                    for job in _jobs(setting, contender, n_train, repetition, request.where, registry):
                        jobs.setdefault(job.cell.id, job)
    return sorted(jobs.values(), key=lambda job: not job.keep_weights)


def _jobs(
    setting: _Setting, contender: _Contender, n_train: int, repetition: int, where: Where, registry: Registry
) -> Iterator[Job]:
    """Yield the job of one cell, after that of the cell it starts from, if there is one."""
    model, files = Part.of(setting.model), tuple(map(str, registry.files))
    init = None
    if (start := setting.task.initial()) is not None:
        task, samples = start
        dense = registry.strategy("dense")
        init = Cell(
            task=Part.of(task), model=model, strategy=Part.of(dense.cls()), budget=FULL, n_train=samples,
            repetition=WEIGHTS_SEED,
        )  # fmt: skip
        yield Job(cell=init, origin=dense.origin, kind=dense.cls.kind, label="dense", files=files, keep_weights=True)
    strategy, found, budget = contender
    cell = Cell(
        task=Part.of(setting.task), model=model, strategy=Part.of(strategy), budget=budget, n_train=n_train,
        repetition=repetition, where=where if strategy.budgeted else "both", init=init,
    )  # fmt: skip
    yield Job(
        cell=cell, origin=found.origin, kind=found.cls.kind, label=_label(strategy), files=files, failure=found.failure,
        after=init.id if init else "",
    )  # fmt: skip


def _label(strategy: Strategy) -> str:
    """Return the strategy's name, with the parameters that are not its defaults."""
    own = strategy.model_dump(mode="json", exclude_defaults=True)
    return strategy.name + (f"({', '.join(f'{k}={v}' for k, v in own.items())})" if own else "")


_Contender = tuple[Strategy, Found, Budget]


@dataclass(frozen=True)
class _Setting:
    task: Task
    model: Model
    n_train: tuple[int, ...] = field(default=())


def _settings(suite: Suite, request: Request, registry: Registry) -> Iterator[_Setting]:
    """Yield every task with its model: the suite's, or those of the request."""
    asked = [parse(text) for text in request.tasks]
    for spec in asked:
        registry.task(spec.name)
    of_suite = {t.name: t for t in suite.task}
    chosen = asked or [Spec(name) for name in of_suite]
    if any(n < 1 for n in request.n_train):
        raise UserError("--n-train", got=list(request.n_train), allowed="1 or more")
    for spec in chosen:
        given = of_suite.get(spec.name)
        if given is None and not request.n_train:
            raise UserError(
                f"task '{spec.name}' is not in suite '{suite.name}'", next_step="say how much with --n-train"
            )
        base = {} if given is None else given.params
        for params in spec.combinations():
            task = _task(spec.name, base | params, request, registry)
            model = _model(task, given, request, registry)
            model.check(task)
            yield _Setting(task, model, request.n_train or (given.n_train if given else ()))


def _task(name: str, params: dict[str, Any], request: Request, registry: Registry) -> Task:
    cls = registry.task(name)
    for key in ("images", "backgrounds"):
        if getattr(request, key) is not None and key in cls.model_fields:
            params = params | {key: getattr(request, key)}
    task = fill(cls, params, f"task '{name}'")
    task.check()
    return task


def _model(task: Task, given: SuiteTask | None, request: Request, registry: Registry) -> Model:
    """Return the model asked for if it takes the task's inputs, else the suite's or the task's own."""
    if request.model is not None:
        name = request.model.partition(":")[0]
        cls = registry.model(name)
        spec = parse(request.model, positional=cls.positional)
        if cls.inputs == task.inputs:
            (params, *more) = spec.combinations()
            if more:
                raise UserError("--model takes one value a parameter", got=request.model)
            return fill(cls, params, f"model '{name}'")
        if request.tasks:
            raise UserError(f"model '{name}' takes {cls.inputs}, and task '{task.name}' gives {task.inputs}")
    name = (given.model if given else None) or task.default_model
    return fill(registry.model(name), given.model_params if given else {}, f"model '{name}'")


def _contenders(suite: Suite, request: Request, registry: Registry) -> Iterator[_Contender]:
    """Yield every strategy with its parameters and each of its budgets: the plugins asked for and the baselines.

    A plugin that names budgets of its own is run at those; the baselines are run at every budget that occurs.
    """
    specs = [spec for text in request.plugins for spec in _named(text, registry)]
    shared = [Budget(keep_rate=rate) for rate in request.keep] + [Budget(macs=share) for share in request.macs]
    budgets = [_own_budgets(spec) or shared or [suite.budget] for spec in specs]
    every = list(dict.fromkeys(budget for some in budgets for budget in some)) or shared or [suite.budget]
    baselines = [(Spec(name), every) for name in suite.baselines]
    for spec, some in [*zip(specs, budgets, strict=True), *baselines]:
        found = registry.strategy(spec.name)
        for params in spec.combinations(without=BUDGET_KEYS):
            strategy = found.cls() if found.failure else fill(found.cls, params, f"strategy '{spec.name}'")
            for budget in some if strategy.budgeted else [FULL]:
                yield strategy, found, _placed(budget, strategy, None if request.model else suite.budget.blocks)


def _own_budgets(spec: Spec) -> list[Budget]:
    return [Budget(**{key: value}) for key in BUDGET_KEYS for value in spec.params.get(key, ())]


def _placed(budget: Budget, strategy: Strategy, blocks: tuple[int, ...] | None) -> Budget:
    """Return the budget with these stages, or none where the strategy acts at the input or spends nothing.

    A suite's stages are made for its own models; with another model the budget's default is taken.
    """
    inside = strategy.budgeted and strategy.site != "input"
    return budget.model_copy(update={"blocks": blocks if inside else None})


def _named(text: str, registry: Registry) -> list[Spec]:
    """Return the specifications of a plugin argument: one, or one for each strategy of a file."""
    spec = parse(text)
    if not spec.name.endswith(".py"):
        return [spec]
    return [Spec(name, spec.params) for name in registry.load_file(Path(spec.name))]
