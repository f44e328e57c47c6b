"""Expanding a request into jobs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, get_args

from sparsebench.errors import UserError, unknown
from sparsebench.models.base import Model
from sparsebench.plan.contenders import (
    Contender,
    closed_cost,
    contenders_of,
    draws_random,
    fit_budget,
    specs_of,
    testable,
    usual_budgets,
)
from sparsebench.plan.locate import networks_of, pictures_for
from sparsebench.plan.request import Files, Job, Request, Suite, SuiteTask, combinations, load, training_entry
from sparsebench.plugin.registry import PluginClass, Registry
from sparsebench.records.record import Cell, Part, Precision, Where, digest
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import AMOUNTS, FULL
from sparsebench.strategy.spec import fill, label, parse
from sparsebench.tasks.base import Locations, Recipe, Task, check_items
from sparsebench.tasks.sources.composites import LOCATED

log = logging.getLogger(__name__)

WEIGHTS_SEED = 0
OVERHEAD = 1e9
"""The fixed cost of a cell, as the MACs that a core computes in the same time."""
FIT_IMAGES = 256
"""The number of training images on which a strategy may fit, for a test of trained weights."""
ANY_NETWORK = 1e8
"""The assumed MACs of an image if they are unknown before the network is built."""


def expand(request: Request, registry: Registry, files: Files | None = None, suite: Suite | None = None) -> list[Job]:
    """Return the jobs of a request: networks that other cells start from first, then repetition by repetition.

    In this order the remaining work is like the finished work, and each strategy has a result after the first
    repetition. Files are located. Weights are read only to check that they fit, and for the classes of their head.
    """
    files = Files() if files is None else files
    suite = load(request.suite) if suite is None else suite
    settings = list(_settings(suite, request, registry, files))
    _check_files(suite, files, settings)
    _check_weights(list({repr((item.task, item.model)): item for item in settings}.values()), files.places)
    jobs, costs = dict[str, Job](), dict[str, float]()
    for repetition in range(max(setting.seeds for setting in settings)):
        for setting in (item for item in settings if repetition < item.seeds):
            for contender, n_train in product(setting.contenders, setting.n_train):
                for job in _jobs(setting, contender, n_train, repetition, registry, costs):
                    jobs.setdefault(job.cell.id, job)
                    for flag in ("requested", "keep_weights"):
                        if getattr(job, flag) and not getattr(jobs[job.cell.id], flag):
                            jobs[job.cell.id] = jobs[job.cell.id].model_copy(update={flag: True})
    return sorted(jobs.values(), key=lambda job: job.order)


@dataclass(frozen=True)
class _Setting:
    """A task with its model and strategies.

    Attributes:
        cell: a template of the setting's cells, without strategy, budget, n_train, repetition and init.
        training: the task and n_train of the trained network that the cells start from, or None.
    """

    task: Task
    model: Model
    cell: Cell
    contenders: tuple[Contender, ...]
    n_train: tuple[int, ...]
    seeds: int
    training: tuple[Task, int] | None
    keep_weights: bool


def _settings(
    suite: Suite, request: Request, registry: Registry, files: Files, names: Mapping[str, str] | None = None
) -> Iterator[_Setting]:
    """Yield the settings of a request: tasks of the suite or of the request, with their models and strategies.

    `names` are names of pictures in cells, by parameter. They replace the names of the located files.
    """
    plugins = [spec for text in request.plugins for spec in specs_of(text, registry)]  # files may bring tasks
    for entry, changes in _entries(suite, request, registry, files):
        contenders = tuple(contenders_of(suite, entry, plugins, request, registry))
        trained = training_entry(entry) if entry.network else None
        own_blocks = None if request.model else suite.budget.blocks
        cls = registry.task(entry.name)
        sets = [{key: names[key] for key in names if key in cls.model_fields}] if names else pictures_for(cls, files)
        for params, pictures in product(combinations(entry.params, entry.sweep), sets):
            base, varied = {} if trained is None else trained.params, params | changes
            task = _task(entry.name, base | varied | pictures, registry)
            if not entry.tests_weights:  # otherwise its sizes may follow from the model
                task.check()
            task, places = task.locate()
            files.places.update(places)
            for bare in _models(task, trained or entry, request, files, registry):
                model = bare.with_weights(files.places)
                fitted = task.with_cut(model.cut())
                if entry.tests_weights:
                    fitted = fitted.with_patch(model.patch_size())
                    fitted.check()
                model.check(fitted)
                if entry.tests_weights:
                    _check_head(fitted, model, files.places)
                if not task.trains:
                    fitted = _with_classes(fitted, model, files)
                cost = closed_cost(fitted, model)
                placed: tuple[Contender, ...] = tuple(
                    (strategy, registered, fit_budget(budget, strategy, own_blocks, cost), part)
                    for strategy, registered, budget, part in contenders
                )
                if not task.trains:
                    placed = testable(placed, suite, request, registry, cost)
                training = None
                if trained is not None:
                    first = _task(entry.name, base | pictures, registry).with_cut(model.cut())
                    first.check()
                    training = first, trained.n_train[0]
                sizes, where, precision = _choices(task, model, entry, request, varied)
                cell = _dense_cell(fitted, model, 0, 0, registry).model_copy(
                    update={"where": where, "track": entry.track, "precision": precision}
                )
                yield _Setting(
                    fitted, model, cell, placed, sizes, request.seeds or entry.seeds or suite.seeds, training,
                    suite.keep_weights or request.single,
                )  # fmt: skip


def _entries(
    suite: Suite, request: Request, registry: Registry, files: Files
) -> Iterator[tuple[SuiteTask, dict[str, Any]]]:
    """Yield the requested entries of the suite, or new entries for other tasks, with the requested parameters.

    A new entry trains networks if the request says on how many samples. Otherwise it tests the user's trained weights.
    """
    figures = sorted({entry.figure for entry in suite.task} - {""})
    if strange := sorted(set(request.figures) - set(figures)):
        raise unknown(f"figure of suite '{suite.name}'", strange[0], figures)
    of_suite = [entry for entry in suite.task if not request.figures or entry.figure in request.figures]
    changed = [entry for entry in of_suite if entry.network and _is_trained(entry, request, registry)]
    if changed and not request.tasks:  # a task that is named by --task is trained, and no longer the suite's
        raise UserError(
            f"suite '{suite.name}' only tests trained networks on {', '.join(entry.name for entry in changed)}",
            got="--n-train" if request.n_train else "--model", next_step="choose the task to train with --task",
        )  # fmt: skip
    if not request.tasks:
        yield from ((entry, {}) for entry in of_suite)
    for spec in map(parse, request.tasks):
        entries = [entry for entry in of_suite if entry.name == spec.name and entry not in changed]
        for entry in entries or [_new_entry(spec.name, suite, request, registry, bool(files.weights))]:
            yield from ((entry, params) for params in spec.combinations())


def _new_entry(name: str, suite: Suite, request: Request, registry: Registry, weights: bool) -> SuiteTask:
    """Return an entry for a task that the suite does not have, or has for other networks.

    Args:
        name: the name of the task.
        suite, request, registry: see `_entries`.
        weights: whether the user gives files of trained weights.

    Raises:
        UserError: neither a training nor trained weights are requested.
    """
    if request.n_train or not registry.task(name).trains:
        return SuiteTask(name=name, n_train=request.n_train or (0,))
    if weights or request.pretrained:
        return SuiteTask(name=name, n_train=(FIT_IMAGES,), track="frozen", seeds=1)
    raise UserError(
        f"suite '{suite.name}' trains no such network for task '{name}'",
        next_step="to train one, give the number of training samples with --n-train; to test trained weights, give "
        "--weights FILE",
    )


def _is_trained(entry: SuiteTask, request: Request, registry: Registry) -> bool:
    """Return whether a request with --n-train or --model trains a task for which its suite has trained networks."""
    if request.n_train or request.model is None:
        return bool(request.n_train)
    return registry.model(request.model.partition(":")[0]).inputs == registry.task(entry.name).inputs


def _task(name: str, params: dict[str, Any], registry: Registry) -> Task:
    task = fill(registry.task(name), params, f"task '{name}'")
    if not isinstance(recipe := task.recipe(), Recipe):
        raise UserError(f"`recipe` of task '{name}' must return a sparsebench.Recipe", got=recipe)
    return task


def _models(task: Task, entry: SuiteTask, request: Request, files: Files, registry: Registry) -> Iterator[Model]:
    """Yield the requested model if it takes the task's inputs, else the model of the suite or the task.

    There is one model for each variant of its parameters and each file of trained weights.
    """
    cls = registry.model(entry.model or task.default_model)
    variants = list(combinations(entry.model_params, entry.model_sweep))
    if request.model is not None:
        choice = registry.model(request.model.partition(":")[0])
        spec = parse(request.model, positional=choice.positional)
        if choice.inputs == task.inputs:
            cls, variants = choice, spec.combinations()
            if len(variants) > 1:
                raise UserError("--model takes one value for each parameter", got=request.model)
        elif request.tasks:
            raise UserError(f"model '{choice.name}' takes {choice.inputs}, and task '{task.name}' gives {task.inputs}")
    starts: list[dict[str, Any]] = [{}]
    if task.inputs == "images":
        starts = [{"pretrained": True}] if request.pretrained else starts
        key = {"weights_key": files.weights_key} if files.weights_key else {}
        starts = [starts[0] | {"weights": name} | key for name in networks_of(files)] or starts
    if len(starts) > 1 and task.trains and not entry.tests_weights:
        raise UserError(
            f"task '{task.name}' trains all networks from the same initial weights",
            got=f"{len(starts)} files of weights", allowed="one", next_step="run each file separately",
        )  # fmt: skip
    if unknown_start := starts[0].keys() - cls.model_fields:
        raise UserError(
            f"--{min(unknown_start).replace('_', '-')}: model '{cls.name}' has no trained weights",
            next_step="use another model, e.g. --model timm:NAME",
        )
    if entry.tests_weights and not starts[0]:
        raise UserError(
            f"task '{task.name}' tests trained weights here",
            next_step="give --weights FILE.safetensors or --pretrained",
        )
    for params, start in product(variants, starts):
        yield fill(cls, params | start, f"model '{cls.name}'")


def _with_classes(task: Task, model: Model, files: Files) -> Task:
    """Return the task with the classes of the model's head. With several files of weights, an error names the file."""
    try:
        return task.with_classes(model.classes(files.places), files.places)
    except UserError as error:
        if len(networks_of(files)) < 2:
            raise
        raise UserError(f"{files.places[model.model_dump()['weights']].name}: {error}") from error


def _check_head(task: Task, model: Model, locations: Locations) -> None:
    """Raise UserError if the head of given weights has other classes than a task on which they are only tested."""
    from sparsebench.models.timm_models import head_error

    classes, head = task.known_classes(locations), model.classes(locations)
    if classes is not None and head != len(classes):
        owner = locations[weights].name if (weights := getattr(model, "weights", "")) else f"model '{model.name}'"
        raise head_error(owner, f"a head of {head} classes" if head else "no head", len(classes))


def _choices(
    task: Task, model: Model, entry: SuiteTask, request: Request, varied: dict[str, Any]
) -> tuple[tuple[int, ...], Where, Precision]:
    """Return the numbers of training samples, where strategies act, and the precision: the request's, else the suite's.

    Raises:
        UserError: the task or the model does not allow a choice, or a parameter of the training is `varied` although
            the network is already trained.
    """
    name, frozen = f"task '{task.name}'", entry.track == "frozen"
    decided = {*getattr(task, "training", ())} - {"spuriosity"}
    if entry.network:
        decided |= {"canvas", "patch", "permuted"}
    if frozen and (wrong := sorted(decided & varied.keys())):
        raise UserError(
            f"{name} tests trained networks", got=f"{', '.join(wrong)}, set by training",
            next_step="to train new networks, give the number of training samples with --n-train",
        )  # fmt: skip
    if not task.trains and request.n_train:
        raise UserError(f"{name} trains nothing", got="--n-train", next_step="leave --n-train out")
    sizes = (request.n_train or entry.n_train) if task.trains else (0,)
    if task.trains and min(sizes) < 1:
        raise UserError(f"n_train of {name}", got=list(sizes), allowed="1 or more")
    where: Where = entry.where if request.where == "both" else request.where
    tests = frozen or not task.trains
    possible = ("both", "test") if tests else ("both",) if entry.track == "tuned" else get_args(Where)
    if where not in possible:
        raise UserError(f"where strategies act on {name}, track {entry.track}", got=where, allowed=possible)
    precision: Precision = entry.gpu_precision if request.on_gpu and tests else "float32"
    if request.precision != "auto":
        precision = request.precision
        if tests and precision != getattr(model, "precision", precision) != "float32":
            raise UserError(
                f"model '{model.name}' has another precision", got=f"--precision {precision}",
                next_step="give only one of them",
            )  # fmt: skip
    if precision != "float32" and not tests:
        raise UserError(
            f"{name} trains networks; --precision is for tests of trained networks", got=f"--precision {precision}",
            next_step=f"if the model supports it, train in it with --model {model.name}:precision={precision}",
        )  # fmt: skip
    if precision != "float32":
        fill(type(model), model.model_dump() | {"precision": precision}, f"--precision: model '{model.name}'")
    return (max(sizes),) if request.single else sizes, where, precision


def _dense_cell(
    task: Task, model: Model, n_train: int, repetition: int, registry: Registry, init: Cell | None = None
) -> Cell:
    """Return the cell that trains a network on a task without a strategy."""
    return Cell(
        task=registry.part_of(task), model=registry.part_of(model), strategy=Part.of(registry.strategy("dense").cls()),
        budget=FULL, n_train=n_train, repetition=repetition, init=init,
    )  # fmt: skip


def _check_files(suite: Suite, files: Files, settings: Collection[_Setting]) -> None:
    """Raise UserError if no task uses the user's files, or if a suite for the user's pictures has none."""
    fields = {name for item in settings for part in (item.task, item.model) for name in type(part).model_fields}
    for name in (*LOCATED, "weights"):
        if getattr(files, name) and name not in fields:
            tasks = ", ".join(sorted({item.task.name for item in settings}))
            raise UserError(
                f"--{name.replace('_', '-')} is not used by any task of this run", got=tasks,
                next_step="leave it out, or choose another task with --task",
            )  # fmt: skip
    for task in (item.task for item in settings if suite.own_pictures and not files.images):
        field = type(task).model_fields.get("images")
        if field is not None and task.model_dump()["images"] == field.default:
            raise UserError(
                f"suite '{suite.name}' needs your pictures", got=f"none for task '{task.name}'",
                next_step="give --images folder:DIR, or a name that sparsebench data lists",
            )  # fmt: skip


def _check_weights(settings: Collection[_Setting], locations: Locations) -> None:
    """Check that trained weights fit their tasks; log how they are used.

    Raises:
        UserError: weights do not fit, or they need images of another size or other classes than the other weights, or a
            test has too many items.
    """
    lines: dict[str, None] = {}
    for setting in settings:
        setting.task.check_located(locations)
        lines[setting.model.check_weights(setting.task, locations)] = None
        check_items(setting.task, getattr(setting.task, "test", 0))
    for line in filter(None, lines):
        log.warning("%s", line)
    needs: defaultdict[str, set[str]] = defaultdict(set)
    for task, model in ((setting.task, setting.model) for setting in settings):
        if (name := getattr(model, "weights", "")) in locations:
            side, channels = getattr(task, "canvas", "?"), getattr(model, "in_chans", "?")
            needs[name].add(f"{side} x {side} pixels of {channels} channels and {model.classes(locations)} classes")
    for name, need in needs.items():
        if need != (usual := next(iter(needs.values()))):
            raise UserError(
                "networks of one board need images of equal size and equally many classes",
                got=f"{locations[next(iter(needs))].name} for {min(usual)}, {locations[name].name} for {min(need)}",
                next_step="run each file separately, or set one size for all with the task's parameter canvas",
            )


def _jobs(
    setting: _Setting, contender: Contender, n_train: int, repetition: int, registry: Registry, costs: dict[str, float]
) -> Iterator[Job]:
    """Yield the jobs of the cells that a cell starts from, if any, then its own job.

    Nothing is yielded for a later repetition that must equal the first one: a test of given trained weights in which
    neither the task nor the strategy draws random numbers.
    """
    strategy, registered, budget, part = contender
    task, model, dense = setting.task, setting.model, registry.strategy("dense")
    init = None
    if setting.cell.track == "scratch":
        init = _pretraining(task, model, registry, repetition)
    elif setting.training is not None:
        first, samples = setting.training
        init = _dense_cell(
            first, model, samples, repetition, registry, _pretraining(first, model, registry, repetition)
        )
    where = _where(setting.cell, strategy)
    cell = setting.cell.model_copy(update={
        "strategy": part, "budget": budget, "n_train": n_train, "repetition": repetition, "where": where, "init": init,
    })  # fmt: skip
    if repetition and cell.network and not (task.draws_test() or draws_random(registered)):
        return
    starts, tested = list(cell.inits), None
    if setting.training is not None:
        tested = init if where == "test" else None
    elif strategy.distils and task.trains and model.inputs == "images" and cell.where != "test":
        teacher = _without_strategy(cell, registry)
        starts.append(teacher)
        cell = cell.model_copy(update={"init": teacher})
    elif not strategy.trained:
        tested = training_of(cell, task, model, registry)
        starts += [tested] if tested else []

    def job(cell: Cell, registered: PluginClass, strategy: Strategy, network: str = "", **more: Any) -> Job:
        after = network or (cell.init.id if cell.init else "")
        params = strategy.model_dump(mode="json", exclude_defaults=True)
        return Job(
            cell=cell, origin=registered.origin, kind=registered.cls.kind, label=label(strategy.name, params),
            **plugins_of(cell, registry), after=after, network=network, together=model.together and not after,
            cost=_cost_of(cell, bool(network), registry, costs), **more,
        )  # fmt: skip

    yield from (job(start, dense, dense.cls(), requested=False, keep_weights=True) for start in starts)
    network = tested.id if tested else ""
    yield job(cell, registered, strategy, network, keep_weights=setting.keep_weights and tested is None)


def _where(cell: Cell, strategy: Strategy) -> Where:
    """Return where the strategy acts: the requested choice, unless the track or the strategy determines it."""
    if cell.track == "frozen":
        return "test"
    if not strategy.budgeted:
        return "both"
    return "train" if strategy.trains_only else cell.where


def _cost_of(cell: Cell, tests: bool, registry: Registry, costs: dict[str, float]) -> float:
    """Estimate the MACs of a cell's training and test without a strategy; `costs` caches the results.

    With `tests`, the cell tests a network that another cell trains.
    """
    trains = not tests and cell.track != "frozen" and cell.n_train > 0
    if (key := repr((cell.task, cell.model, cell.n_train, trains))) not in costs:
        task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
        model = fill(registry.model(cell.model.name), cell.model.params, f"model '{cell.model.name}'")
        cost, images = closed_cost(task, model), float(getattr(task, "test", 0))
        if trains and task.trains:
            recipe = task.recipe()
            images += 3 * min(cell.n_train * recipe.epochs, (recipe.batch or cell.n_train) * recipe.steps)
        costs[key] = OVERHEAD + images * (ANY_NETWORK if cost is None else cost.macs(cost.dense()))
    return costs[key]


def plugins_of(cell: Cell, registry: Registry) -> dict[str, tuple[str, ...]]:
    """Return `Job.files` and `Job.code` of a cell."""
    owners = registry.owners(cell.strategy.name, cell.task.name, cell.model.name)
    third_party = sorted({str(owner.file or owner.origin.plugin) for owner in owners if not owner.origin.is_shipped})
    files = sorted({str(owner.file) for owner in owners if owner.file is not None})
    return {"files": tuple(files), "code": (*third_party, cell.strategy.name) if third_party else ()}


def training_of(cell: Cell, task: Task, model: Model, registry: Registry) -> Cell | None:
    """Return the cell whose trained network a cell tests, or None if the cell trains its own network.

    Cells share a network if their strategies act in the test only. There are two exceptions: on tokens, training takes
    less time than storing and reading weights; watching and early stopping test the strategy during training.
    """
    if cell.where != "test" or cell.track != "scratch" or not task.trains or model.inputs != "images":
        return None
    recipe = task.recipe()
    return None if recipe.watch or recipe.patience else _without_strategy(cell, registry)


def _without_strategy(cell: Cell, registry: Registry) -> Cell:
    """Return the cell of the same network without a strategy."""
    dense = Part.of(registry.strategy("dense").cls())
    return cell.model_copy(update={"strategy": dense, "budget": FULL, "where": "both"})


def _pretraining(task: Task, model: Model, registry: Registry, repetition: int) -> Cell | None:
    """Return the cell of a task's pre-training, or None if training starts from random weights."""
    if (start := task.initial()) is None:
        return None
    repetition = repetition if getattr(task, "pretrain_each", False) else WEIGHTS_SEED
    return _dense_cell(start[0], model.first_model(), start[1], repetition, registry)


def _question(cell: Cell) -> tuple[str, str]:
    """Return two keys of a cell for comparisons with a suite: its setting, and where it acts with its budget's amount.

    Choices that a suite leaves to the user are not part of the keys. For a task that trains nothing, these are all
    parameters of task and model.
    """
    params = {key: value for key, value in cell.task.params.items() if key not in LOCATED}
    about: list[Any] = [params, cell.model.model_dump(mode="json")] if cell.n_train else []
    about += [cell.precision] if about and cell.precision != "float32" else []
    amount = next(f"{key} {value}" for key in AMOUNTS if (value := getattr(cell.budget, key)) is not None)
    acts: Where = "test" if cell.where == "test" and cell.track == "scratch" else "both"
    return digest([cell.task.name, cell.n_train, cell.repetition, cell.track, *about]), f"{acts} {amount}"


def gaps(suite: Suite, cells: Collection[Cell], registry: Registry, *, any_budget: bool) -> list[str]:
    """Return descriptions of the cells that a suite needs for each strategy and that are not among `cells`.

    Pictures may differ from the suite's, and also networks and labels if nothing is trained. With `any_budget`, budgets
    may differ too.
    """
    compared = slice(1 if any_budget else 2)
    answered = {_question(cell)[compared] for cell in cells}
    names = {
        key: str(name) for cell in cells for key in LOCATED if (name := cell.task.params.get(key)) and cell.n_train
    }
    request, missing = Request(), list[str]()
    for entry in suite.task:
        task = Part(name=entry.name)
        cases = [Cell(task=task, model=task, strategy=task, budget=FULL, n_train=0, repetition=0, where=entry.where)]
        if registry.task(entry.name).trains:
            alone = suite.model_copy(update={"task": (entry,)})
            try:
                cases = [setting.cell for setting in _settings(alone, request, registry, Files(), names)]
            except UserError as error:  # it needs pictures that none of the cells have
                return [str(error)]
        seeds, budgets = range(entry.seeds or suite.seeds), usual_budgets(suite, entry, request)
        for cell, n_train, repetition, budget in product(cases, entry.n_train, seeds, budgets):
            update = {"n_train": n_train, "repetition": repetition, "budget": budget, "track": entry.track}
            if _question(cell.model_copy(update=update))[compared] not in answered:
                missing.append(f"{entry.name} with {n_train} samples, repetition {repetition}, {budget.label}")
    return missing
