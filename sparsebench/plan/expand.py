"""How a run's request becomes cells."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

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
from sparsebench.plan.locate import LOCATED, files_from, networks_of, pictures_for
from sparsebench.plan.request import Files, Job, Request, Suite, SuiteTask, combinations, load, training_entry
from sparsebench.plugin.registry import Found, Registry
from sparsebench.records.record import Cell, Part, Precision, Track, Where, digest
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import AMOUNTS, FULL
from sparsebench.strategy.spec import fill, label, parse
from sparsebench.tasks.base import Locations, Task, check_items

log = logging.getLogger(__name__)

WEIGHTS_SEED = 0
OVERHEAD = 1e9
"""What a cell takes besides its images, in MACs of a core in that time."""
ANY_NETWORK = 1e8
"""The MACs of an image where they are not known before the network is built."""


def expand(request: Request, registry: Registry, files: Files | None = None, suite: Suite | None = None) -> list[Job]:
    """Return the jobs of a request: initial models first, then repetition by repetition.

    In that order the work left is always like the work done, and every strategy has a number after the first
    repetition. The files are located, and looked at only to say what trained weights are made for, whether they fit,
    and which class of their head is which. The suite is loaded unless it is given.
    """
    files = Files() if files is None else files
    if request.seeds is not None and request.seeds < 1:
        raise UserError("--seeds", got=request.seeds, allowed="1 or more")
    suite = load(request.suite) if suite is None else suite
    settings = list(_settings(suite, request, registry, files))
    _check_files(suite, files, settings)
    _check_weights(list({repr((item.task, item.model)): item for item in settings}.values()), files.places)
    jobs, costs = dict[str, Job](), dict[str, float]()
    for repetition in range(max(setting.seeds for setting in settings)):
        for setting in (item for item in settings if repetition < item.seeds):
            for contender, n_train in product(setting.contenders, setting.n_train):
                for job in _jobs(setting, contender, n_train, repetition, registry, costs):
                    old = jobs.setdefault(job.cell.id, job)
                    flags = {"asked": old.asked or job.asked, "keep_weights": old.keep_weights or job.keep_weights}
                    if flags != {"asked": old.asked, "keep_weights": old.keep_weights}:
                        jobs[job.cell.id] = old.model_copy(update=flags)
    return sorted(jobs.values(), key=lambda job: job.order)


def _check_weights(settings: Collection[_Setting], locations: Locations) -> None:
    """Say what becomes of trained weights for the tasks.

    Raises:
        UserError: weights do not fit, or are made for other data than others beside them, or there are too many items.
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
                "networks of one board take the same pictures and know the same classes",
                got=f"{locations[next(iter(needs))].name} for {min(usual)}, {locations[name].name} for {min(need)}",
                next_step="give each a run of its own, or say one size for all with canvas=SIDE of the task",
            )


def _check_files(suite: Suite, files: Files, settings: Collection[_Setting]) -> None:
    """Raise UserError if nothing takes files that the user named, or a suite for one's own pictures has none."""
    fields = {name for item in settings for part in (item.task, item.model) for name in type(part).model_fields}
    for name in (*LOCATED, "weights"):
        if getattr(files, name) and name not in fields:
            tasks = ", ".join(sorted({item.task.name for item in settings}))
            raise UserError(
                f"--{name.replace('_', '-')} is taken by no task of this run", got=tasks,
                next_step="leave it out, or name another with --task",
            )  # fmt: skip
    for task in (item.task for item in settings if suite.own_pictures and not files.images):
        field = type(task).model_fields.get("images")
        if field is not None and task.model_dump()["images"] == field.default:
            raise UserError(
                f"suite '{suite.name}' is for pictures of one's own", got=f"none for task '{task.name}'",
                next_step="give --images folder:DIR, or a name that sparsebench data lists",
            )  # fmt: skip


def _jobs(
    setting: _Setting, contender: Contender, n_train: int, repetition: int, registry: Registry, costs: dict[str, float]
) -> Iterator[Job]:
    """Yield the job of one cell, after those of the cells it starts from, if there are any.

    None of a repetition that could not differ from the first: of trained weights that are tested where nothing draws.
    """
    dense = registry.strategy("dense")

    def job(cell: Cell, registered: Found, strategy: Strategy, network: str = "", **more: Any) -> Job:
        after = network or (cell.init.id if cell.init else "")
        changed = strategy.model_dump(mode="json", exclude_defaults=True)
        return Job(
            cell=cell, origin=registered.origin, kind=registered.cls.kind, label=label(strategy.name, changed),
            **plugins_of(cell, registry), after=after, network=network,
            together=setting.model.together and not after, cost=_cost_of(cell, bool(network), registry, costs), **more,
        )  # fmt: skip

    def first(cell: Cell) -> Job:
        return job(cell, dense, dense.cls(), asked=False, keep_weights=True)

    strategy, registered, budget, part = contender
    init = _pretraining(setting.task, setting.model, registry, repetition)
    if setting.training is not None:
        task, samples = setting.training
        init = Cell(
            task=registry.part_of(task), model=registry.part_of(setting.model), strategy=Part.of(dense.cls()),
            budget=FULL, n_train=samples, repetition=repetition,
            init=_pretraining(task, setting.model, registry, repetition),
        )  # fmt: skip
    cell = Cell(
        task=setting.parts[0], model=setting.parts[1], strategy=part, budget=budget, n_train=n_train,
        repetition=repetition, where=_where(setting, strategy), init=init, track=setting.track,
        precision=setting.precision,
    )  # fmt: skip
    if repetition and cell.network and not (setting.task.draws_test() or draws_random(registered)):
        return  # it could not come out otherwise
    for before in cell.inits:
        yield first(before)
    training = init if setting.training else None
    learns = setting.task.trains and setting.model.inputs == "images" and cell.where != "test"
    if training is None and strategy.distils and learns:
        teacher = cell.model_copy(update={"strategy": Part.of(dense.cls()), "budget": FULL, "where": "both"})
        yield first(teacher)
        cell = cell.model_copy(update={"init": teacher})
    if training is None and not strategy.trained:
        training = training_of(cell, setting.task, setting.model, registry)
        if training is not None:
            yield first(training)
    tested = training if cell.where == "test" else None
    keeps = setting.keep_weights and tested is None
    yield job(cell, registered, strategy, network=tested.id if tested else "", keep_weights=keeps)


def _cost_of(cell: Cell, tests: bool, registry: Registry, costs: dict[str, float]) -> float:
    """Return about the MACs of the training and the test of a cell without a strategy, as `costs` for its kind.

    With `tests` it tests a network that another cell trains.
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
    """Return `Job.files` and `Job.code` of a cell, whose code it runs."""
    owners = registry.owners(cell.strategy.name, cell.task.name, cell.model.name)
    strangers = sorted({str(owner.file or owner.origin.plugin) for owner in owners if not owner.origin.is_shipped})
    files = sorted({str(owner.file) for owner in owners if owner.file is not None})
    return {"files": tuple(files), "code": (*strangers, cell.strategy.name) if strangers else ()}


def training_of(cell: Cell, task: Task, model: Model, registry: Registry) -> Cell | None:
    """Return the cell whose trained network a cell tests that acts in the test only; None if it is trained itself.

    Networks of tokens are trained in less time than their weights take to be kept and read. A training that is watched,
    or ends by a validation result, is tested with the strategy on its way, and so is each strategy's own.
    """
    if cell.where != "test" or cell.track != "scratch" or not task.trains or model.inputs != "images":
        return None
    recipe = task.recipe()
    if recipe.watch or recipe.patience:
        return None
    dense = Part.of(registry.strategy("dense").cls())
    return cell.model_copy(update={"strategy": dense, "budget": FULL, "where": "both"})


def _pretraining(task: Task, model: Model, registry: Registry, repetition: int) -> Cell | None:
    """Return the cell that is trained before those of a task, or None for random weights."""
    if (start := task.initial()) is None:
        return None
    plain, samples = start
    return Cell(
        task=registry.part_of(plain), model=registry.part_of(model.first_model()),
        strategy=Part.of(registry.strategy("dense").cls()), budget=FULL, n_train=samples,
        repetition=repetition if getattr(task, "pretrain_each", False) else WEIGHTS_SEED,
    )  # fmt: skip


def _where(setting: _Setting, strategy: Strategy) -> Where:
    """Return where the strategy acts: as asked for, unless it leaves no choice."""
    if setting.track == "frozen":
        return "test"
    if not strategy.budgeted:
        return "both"
    return "train" if strategy.trains_only else setting.where


def _question(cell: Cell) -> tuple[str, str]:
    """Return which setting of a suite a cell answers, and where and at which amount of budget.

    What a suite lets users choose is left out: of a task that trains nothing, all but its name.
    """
    params = {key: value for key, value in cell.task.params.items() if key not in LOCATED}
    about: list[Any] = [params, cell.model.model_dump(mode="json")] if cell.n_train else []
    about += [cell.precision] if about and cell.precision != "float32" else []
    amount = next(f"{key} {value}" for key in AMOUNTS if (value := getattr(cell.budget, key)) is not None)
    acts: Where = "test" if cell.where == "test" and cell.track == "scratch" else "both"
    return digest([cell.task.name, cell.n_train, cell.repetition, cell.track, *about]), f"{acts} {amount}"


def gaps(suite: Suite, cells: Collection[Cell], registry: Registry, *, any_budget: bool) -> list[str]:
    """Return what a suite asks of every strategy and some cells do not answer, in words.

    Pictures are the user's, and so are networks and labels where nothing is trained. With `any_budget` the cells need
    not have the suite's budgets.
    """
    compared = slice(1 if any_budget else 2)
    answered = {_question(cell)[compared] for cell in cells}
    files = files_from({
        key: str(name) for cell in cells for key in LOCATED if (name := cell.task.params.get(key)) and cell.n_train
    })  # fmt: skip
    request, missing = Request(), list[str]()
    for entry in suite.task:
        alone, task = suite.model_copy(update={"task": (entry,)}), Part(name=entry.name)
        cases: Iterable[tuple[Part, Part, Where]] = [(task, task, entry.where)]
        if registry.task(entry.name).trains:
            try:
                cases = [(*setting.parts, setting.where) for setting in _settings(alone, request, registry, files)]
            except UserError as error:  # it needs other pictures than any of the cells have
                return [str(error)]
        seeds, budgets = range(entry.seeds or suite.seeds), usual_budgets(suite, entry, request)
        for (task, model, where), n_train, repetition, budget in product(cases, entry.n_train, seeds, budgets):
            cell = Cell(
                task=task, model=model, strategy=Part(name="dense"), budget=budget, n_train=n_train,
                repetition=repetition, where=where, track=entry.track,
            )  # fmt: skip
            if _question(cell)[compared] not in answered:
                missing.append(f"{entry.name} with {n_train} samples, repetition {repetition}, {budget.label}")
    return missing


@dataclass(frozen=True)
class _Setting:
    """A task with its model and strategies.

    Attributes:
        parts: the task and the model as all its cells have them.
        training: the task and the n_train of the network that its cells begin with.
    """

    task: Task
    model: Model
    parts: tuple[Part, Part]
    contenders: tuple[Contender, ...]
    n_train: tuple[int, ...]
    seeds: int
    where: Where
    track: Track = "scratch"
    training: tuple[Task, int] | None = None
    keep_weights: bool = False
    precision: Precision = "float32"


def _settings(suite: Suite, request: Request, registry: Registry, files: Files) -> Iterator[_Setting]:
    """Yield every task with its model and strategies: the suite's, or those of the request."""
    if any(n < 1 for n in request.n_train):
        raise UserError("--n-train", got=list(request.n_train), allowed="1 or more")
    plugins = [spec for text in request.plugins for spec in specs_of(text, registry)]  # files may bring tasks
    networks = networks_of(files)
    for entry, params in _entries(suite, request, registry):
        contenders = tuple(contenders_of(suite, entry, plugins, request, registry))
        trained = training_entry(entry) if entry.network else None
        for varied, pictures in product(
            combinations(entry.params, entry.sweep), pictures_for(registry.task(entry.name), files)
        ):
            base = {} if trained is None else trained.params
            _check_changed(entry, varied | params, registry)
            task, places = _task(entry.name, base | varied | params | pictures, registry).located()
            files.places.update(places)
            for bare in _models(task, trained or entry, request, registry, networks, files.weights_key):
                model = bare.with_weights(files.places)
                fitted = task.with_cut(model.cut())
                model.check(fitted)
                if not task.trains:
                    fitted = _with_classes(fitted, model, files)
                seeds, blocks = request.seeds or entry.seeds or suite.seeds, suite.budget.blocks
                cost = closed_cost(fitted, model)
                placed: tuple[Contender, ...] = tuple(
                    (strategy, registered, fit_budget(budget, strategy, None if request.model else blocks, cost), part)
                    for strategy, registered, budget, part in contenders
                )
                if not task.trains:
                    placed = testable(placed, suite, request, registry, cost)
                training = None
                if trained is not None:
                    first = _task(entry.name, trained.params | pictures, registry).with_cut(model.cut())
                    training = first, trained.n_train[0]
                yield _Setting(
                    fitted, model, (registry.part_of(fitted), registry.part_of(model)), placed,
                    _sizes(task, entry, request), seeds, _entry_where(task, entry, request), entry.track, training,
                    suite.keep_weights or request.single, _precision(task, model, entry, request),
                )  # fmt: skip


def _with_classes(task: Task, model: Model, files: Files) -> Task:
    """Return the task with the classes of the model's head; of several files of weights an error names the one."""
    try:
        return task.with_classes(model.classes(files.places), files.places)
    except UserError as error:
        if len(networks_of(files)) < 2:
            raise
        raise UserError(f"{files.places[model.model_dump()['weights']].name}: {error}") from error


def _check_changed(entry: SuiteTask, params: dict[str, Any], registry: Registry) -> None:
    """Raise UserError if parameters that a trained network has decided are to be others in its test."""
    if entry.track != "frozen":
        return
    decided = {"canvas", "patch", "permuted", *getattr(registry.task(entry.name), "training", ())} - {"spuriosity"}
    if wrong := sorted(decided & params.keys()):
        raise UserError(
            f"task '{entry.name}' tests networks that are trained", got=f"{', '.join(wrong)}, which training decides",
            next_step="say on how many images it is to be trained anew with --n-train",
        )  # fmt: skip


def _entry_where(task: Task, entry: SuiteTask, request: Request) -> Where:
    """Return where strategies act: as asked for, else as the suite has it.

    Raises:
        UserError: it cannot be there.
    """
    where = entry.where if request.where == "both" else request.where
    if where == "train" and not task.trains:
        raise UserError(f"task '{task.name}' trains nothing", got="where: train", allowed=("both", "test"))
    if request.where != "both" and entry.track != "scratch" and (request.where, entry.track) != ("test", "frozen"):
        acts = "in the test only" if entry.track == "frozen" else "in training and test"
        raise UserError(
            f"strategies of track {entry.track} act {acts}", got=f"--where {request.where}",
            next_step="leave --where out, or name another suite",
        )  # fmt: skip
    return where


def _precision(task: Task, model: Model, entry: SuiteTask, request: Request) -> Precision:
    """Return the precision of tests: as asked for, else as the suite has it.

    Raises:
        UserError: another than the model's own is asked for where a network is trained, or of one that has no other.
    """
    tests = not task.trains or entry.track == "frozen"
    of_suite = entry.gpu_precision if request.on_gpu and tests else "float32"
    precision = of_suite if request.precision == "auto" else request.precision
    if precision != "float32" and not tests:
        raise UserError(
            f"task '{task.name}' trains networks, and --precision is of tests of trained ones",
            got=f"--precision {precision}",
            next_step=f"train in it, too: --model {model.name}:precision={precision}, where it can",
        )
    if precision != "float32":
        fill(type(model), model.model_dump() | {"precision": precision}, f"--precision: model '{model.name}'")
    elif tests and request.precision != "auto" and (native := getattr(model, "precision", precision)) != precision:
        raise UserError(
            f"model '{model.name}' is asked for in another precision than its test",
            got=f"precision={native}, and --precision {precision}", next_step="say one of them",
        )  # fmt: skip
    return precision


def _sizes(task: Task, entry: SuiteTask, request: Request) -> tuple[int, ...]:
    """Return the numbers of training samples: 0 where nothing is trained, else as asked, else the suite's."""
    if not task.trains:
        if request.n_train:
            raise UserError(f"task '{task.name}' trains nothing", got="--n-train", next_step="leave --n-train out")
        return (0,)
    sizes = request.n_train or entry.n_train
    if min(sizes) < 1:
        raise UserError(f"n_train of task '{task.name}'", got=list(sizes), allowed="1 or more")
    return (max(sizes),) if request.single else sizes


def _entries(suite: Suite, request: Request, registry: Registry) -> Iterator[tuple[SuiteTask, dict[str, Any]]]:
    """Yield the suite's entries that were asked for, with the parameters that were."""
    figures = sorted({entry.figure for entry in suite.task} - {""})
    if strange := sorted(set(request.figures) - set(figures)):
        raise unknown(f"figure of suite '{suite.name}'", strange[0], figures)
    of_suite = [entry for entry in suite.task if not request.figures or entry.figure in request.figures]
    for entry in of_suite if not request.tasks else ():
        try:
            registry.task(entry.name)
        except UserError as error:
            raise UserError(
                f"suite '{suite.name}' needs a task that no installed plugin has: {error}",
                next_step="install the plugin, or name tasks that are there with --task",
            ) from error
    if request.n_train or request.model:
        changed = [entry for entry in of_suite if entry.network and _is_trained(entry, request, registry)]
        if changed and not request.tasks:  # one that is named is trained as asked: it is none of the suite's then
            raise UserError(
                f"suite '{suite.name}' tests trained networks on {', '.join(entry.name for entry in changed)}",
                got="--n-train" if request.n_train else "--model", next_step="name what is to be trained with --task",
            )  # fmt: skip
        of_suite = [entry for entry in of_suite if entry not in changed]
    if not request.tasks:
        yield from ((entry, {}) for entry in of_suite)
    for spec in map(parse, request.tasks):
        needs = registry.task(spec.name).trains
        entries = [entry for entry in of_suite if entry.name == spec.name]
        if not entries and needs and not request.n_train:
            tested = any(entry.name == spec.name and entry.network for entry in suite.task)
            raise UserError(
                f"task '{spec.name}' of suite '{suite.name}' tests trained networks, and another model is to be trained"
                if tested else f"task '{spec.name}' is not in suite '{suite.name}'",
                next_step="say on how many images with --n-train",
            )  # fmt: skip
        for entry in entries or [SuiteTask(name=spec.name, n_train=request.n_train or (0,))]:
            yield from ((entry, params) for params in spec.combinations())


def _is_trained(entry: SuiteTask, request: Request, registry: Registry) -> bool:
    """Say whether a request trains a task for which its suite has networks: it says how much, or another model."""
    if request.n_train or request.model is None:
        return bool(request.n_train)
    return registry.model(request.model.partition(":")[0]).inputs == registry.task(entry.name).inputs


def _task(name: str, params: dict[str, Any], registry: Registry) -> Task:
    task = fill(registry.task(name), params, f"task '{name}'")
    task.check()
    return task


def _models(
    task: Task, entry: SuiteTask, request: Request, registry: Registry, networks: Sequence[str], key: str | None
) -> Iterator[Model]:
    """Yield the model asked for if it takes the task's inputs, else the suite's or the task's own; see `_starts`."""
    cls, variants = (
        registry.model(entry.model or task.default_model),
        list(combinations(entry.model_params, entry.model_sweep)),
    )
    if request.model is not None:
        choice = registry.model(request.model.partition(":")[0])
        spec = parse(request.model, positional=choice.positional)
        if choice.inputs == task.inputs:
            cls, variants = choice, list(spec.combinations())
            if len(variants) > 1:
                raise UserError("--model takes one value a parameter", got=request.model)
        elif request.tasks:
            raise UserError(f"model '{choice.name}' takes {choice.inputs}, and task '{task.name}' gives {task.inputs}")
    for params, start in product(variants, _starts(task, request, networks, key)):
        for name in start:
            if name not in cls.model_fields:
                raise UserError(
                    f"--{name.replace('_', '-')}: model '{cls.name}' has no trained weights",
                    next_step="name one that has, as --model timm:NAME",
                )
        yield fill(cls, params | start, f"model '{cls.name}'")


def _starts(task: Task, request: Request, networks: Sequence[str], key: str | None) -> Iterator[dict[str, Any]]:
    """Yield the parameters of models that say what trained weights they begin with, one for each network.

    Args:
        task: what they are tested on.
        request: says whether they begin with timm's weights.
        networks: names of files of weights.
        key: which of several state dicts in these.
    """
    fetched: dict[str, Any] = {"pretrained": True} if request.pretrained and task.inputs == "images" else {}
    if not networks or task.inputs != "images":
        yield fetched
        return
    if len(networks) > 1 and task.trains:
        raise UserError(
            f"task '{task.name}' trains networks, all of which begin with the same weights",
            got=f"{len(networks)} files of weights", allowed="one", next_step="give each a run of its own",
        )  # fmt: skip
    of_file = {"weights_key": key} if key else {}
    yield from (fetched | {"weights": name} | of_file for name in networks)
