"""Expanding the tasks of a request into jobs: tasks to variants, variants to jobs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

from sparsebench.errors import UserError
from sparsebench.measure.cost import CostModel
from sparsebench.measure.schedule import candidates
from sparsebench.models.base import Model
from sparsebench.plan.contenders import Contender, closed_cost, fit_budget, testable
from sparsebench.plan.jobs import Job, JobMaker, Variant, dense_cell
from sparsebench.plan.locate import Located
from sparsebench.plan.request import Files, Request
from sparsebench.plan.requested import RequestedTask, requested_tasks
from sparsebench.plan.suite import Suite, SuiteTask, combinations, load
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import ON_TRAINED, Precision, Probe, Where
from sparsebench.strategy.budget import AUTO
from sparsebench.strategy.spec import fill, parse
from sparsebench.tasks.base import Locations, Recipe, Task, check_items
from sparsebench.tasks.groups import LEAST_OF_CLASS
from sparsebench.tasks.patches import Patches
from sparsebench.tasks.sources.composites import LOCATED

log = logging.getLogger(__name__)

LEAST_CLASSES = 2
"""The number of classes of a task that does not say it before its data are drawn."""


def expand(
    request: Request, registry: Registry, located: Located | None = None, suite: Suite | None = None
) -> list[Job]:
    """Return the jobs of a request, see `jobs_of`. Nothing is located here: see `locate`."""
    suite = load(request.suite) if suite is None else suite
    located = Located() if located is None else located
    has_weights = bool(located.files.weights) or request.names_folder
    tasks = requested_tasks(suite, request, registry, has_weights=has_weights)
    return jobs_of(variants_of(tasks, suite, request, located, registry), registry)


def variants_of(
    tasks: Sequence[RequestedTask], suite: Suite, request: Request, located: Located, registry: Registry
) -> list[Variant]:
    """Return the tasks of a request with their models. Weights are read for their sizes and for whether they fit.

    Raises:
        UserError: task, model, budgets and files do not fit.
    """
    variants = [variant for task in tasks for variant in variants_of_task(task, suite, request, located, registry)]
    _check_files(suite, located.files, variants)
    _check_weights(variants)
    return variants


def jobs_of(variants: Sequence[Variant], registry: Registry) -> list[Job]:
    """Return the jobs of variants: networks that other cells start from first, then repetition by repetition.

    In this order the remaining work is like the finished work, and each strategy has a result after the first
    repetition.
    """
    maker = JobMaker(registry)
    jobs: dict[str, Job] = {}
    for repetition in range(max(variant.seeds for variant in variants)):
        for variant in variants:
            if repetition >= variant.seeds:
                continue
            for contender, n_train in product(variant.contenders, variant.n_train):
                for job in maker.jobs_of(variant, contender, n_train, repetition):
                    jobs[job.cell.id] = _both(jobs.get(job.cell.id), job)
    return sorted(jobs.values(), key=lambda job: job.order)


def _both(before: Job | None, job: Job) -> Job:
    """Return the job of a cell that several contenders need. It is requested, or keeps weights, if either job does."""
    if before is None:
        return job
    flags = {
        "requested": before.requested or job.requested,
        "keep_weights": before.keep_weights or job.keep_weights,
    }
    changed = flags != {name: getattr(before, name) for name in flags}
    return before.model_copy(update=flags) if changed else before


def variants_of_task(
    requested: RequestedTask, suite: Suite, request: Request, located: Located, registry: Registry
) -> Iterator[Variant]:
    """Yield a requested task with each combination of its parameters, pictures and models."""
    entry, training_entry = requested.entry, requested.entry.training
    training_params = {} if training_entry is None else {**training_entry.params, **entry.network_params}
    for params, pictures in product(combinations(entry.params, entry.sweep), located.sets(requested.cls)):
        # The task is as in the training of its networks, except for what the suite's entry and the request vary.
        varied = {**params, **requested.changes}
        task = _task(entry.name, {**training_params, **varied, **pictures}, registry)
        if not entry.tests_weights:  # otherwise its sizes may follow from the model
            task.check()
        if located.text_features and "classes" in type(task).model_fields and not getattr(task, "classes", ""):
            task = task.model_copy(update={"classes": str(located.files.text_features)})
        task, files_of_task = task.locate()
        places = {**located.places, **files_of_task}
        if entry.is_probe:
            task, training_pictures = task.for_probe(places, located.files.skip_bad)
            places |= training_pictures
        elif isinstance(task, Patches) and not request.single:  # pictures of kept tokens need no probe
            raise UserError(
                f"task '{task.name}' is for probes, which predict patches", next_step="choose --suite patches or probe"
            )
        elif not (task.trains or task.reads_head):
            raise UserError(
                f"task '{task.name}' sets pictures apart for probes only",
                got=", ".join(f"{name}={value}" for name, value in requested.changes.items()),
                next_step="leave split and train out, or choose --suite probe",
            )
        training = None
        if training_entry is not None and isinstance(task, Patches) and task.has_masks:
            raise UserError(
                "the networks of the suite learned composites, and none on pictures with masks",
                next_step="give a network with its weights, as --model timm:NAME --weights FILE",
            )
        if training_entry is not None:
            training = _task(training_entry.name, {**training_entry.params, **pictures}, registry)
        for model in _models(task, training_entry or entry, request, located, registry):
            yield _variant(requested, task, model, training, varied, places, suite, request, registry)


def _variant(
    requested: RequestedTask,
    task: Task,
    bare: Model,
    training: Task | None,
    varied: Mapping[str, Any],
    places: Mapping[str, Path],
    suite: Suite,
    request: Request,
    registry: Registry,
) -> Variant:
    """Return a task with a model, both with all parameters that follow from each other.

    Args:
        requested: the entry of the suite with its strategies.
        task, bare: the task and the model as they were requested.
        training: the task that trains the networks, or None.
        varied: the parameters of the task that differ from the training.
        places: the places of files by their names in cells.
        suite, request, registry: see `requested_tasks`.

    Raises:
        UserError: task, model and budgets do not fit.
    """
    entry = requested.entry
    model = bare.with_weights(places)
    task = _fitted_task(task, model, entry, places, for_pictures=request.single)
    where = _where(task, entry, request)
    contenders = _fitted_contenders(requested, task, model, where, suite, request, registry)
    if any(contender.budget.schedule == AUTO for contender in contenders):
        task.check_schedule_images(places)
    start = _start_of(entry, training, model)
    _check_varied(task, entry, varied)
    sizes = _sizes_of_probe(task, entry, request, places) if entry.is_probe else _sizes(task, entry, request)
    precision = _precision(task, model, entry, request)
    probe = _probe(task, model, max(sizes), request) if entry.is_probe else None
    cell = dense_cell(task, model, 0, 0, registry).model_copy(
        update={"where": where, "track": entry.track, "precision": precision, "probe": probe}
    )
    return Variant(
        task=task,
        model=model,
        places=places,
        cell=cell,
        contenders=contenders,
        n_train=sizes,
        seeds=request.seeds or entry.seeds or suite.seeds,
        training=start,
        keep_weights=suite.keep_weights or request.single,
    )


def _fitted_task(task: Task, model: Model, entry: SuiteTask, places: Mapping[str, Path], *, for_pictures: bool) -> Task:
    """Return the task with the parameters that follow from the model.

    Args:
        task, model: the task and the model.
        entry: the suite's entry of the task.
        places: the places of files by their names in cells.
        for_pictures: whether the network is not compared by its accuracy, so that it needs no head.

    Raises:
        UserError: task and model do not fit.
    """
    fitted = task.with_cut(model.cut())
    if entry.tests_weights:
        fitted = fitted.with_patch(model.patch_size())
        fitted.check()
    model.check(fitted)
    if task.reads_head:
        fitted = _with_classes(fitted, model, places)
    if entry.is_probe:  # a head is not used
        return fitted
    has_no_head = model.classes(places) == 0
    if has_no_head and for_pictures:
        return fitted
    if entry.tests_weights or (has_no_head and not task.trains):
        _check_head(fitted, model, places)
    return fitted


def _start_of(entry: SuiteTask, training: Task | None, model: Model) -> tuple[Task, int] | None:
    """Return the task and n_train of the trained network that cells start from, or None; see `Variant.training`.

    Raises:
        UserError: the task of the training and the model do not fit.
    """
    if training is None or entry.training is None:
        return None
    fitted = training.with_cut(model.cut())
    fitted.check()
    return fitted, entry.training.n_train[0]


def _fitted_contenders(
    requested: RequestedTask,
    task: Task,
    model: Model,
    where: Where,
    suite: Suite,
    request: Request,
    registry: Registry,
) -> tuple[Contender, ...]:
    """Return the strategies with their budgets, as they are used on a network.

    Args:
        requested: the entry of the suite with its strategies.
        task, model: with all their parameters.
        where: where strategies act.
        suite, request, registry: see `requested_tasks`.

    Raises:
        UserError: a budget does not fit the strategy or the network.
    """
    cost = closed_cost(task, model)
    suite_blocks = None if request.model else suite.budget.blocks
    contenders = tuple(
        contender._replace(budget=fit_budget(contender.budget, contender.strategy, suite_blocks, cost))
        for contender in requested.contenders
    )
    share = requested.entry.each_schedule_at
    if share is not None and cost is not None:
        contenders += tuple(_at_each_schedule(contenders, share, cost))
    from_first_step = requested.entry.track == "scratch" and task.trains and where != "test"
    if from_first_step and model.inputs == "images":
        _check_schedules(contenders)
    if task.trains and not requested.entry.is_probe:
        return contenders
    return testable(contenders, suite, request, registry, cost)


def _at_each_schedule(contenders: Sequence[Contender], share: float, cost: CostModel) -> Iterator[Contender]:
    """Yield the strategies that choose their schedule at a share of the MACs, with each schedule that they can have."""
    for contender in contenders:
        if contender.budget.schedule == AUTO and contender.budget.macs == share:
            for candidate in candidates(contender.budget, contender.strategy.traits(), cost):
                yield contender._replace(budget=candidate.schedule.budget)


def _check_schedules(contenders: Sequence[Contender]) -> None:
    """Raise UserError if a schedule would be chosen although strategies act from the first training step."""
    for contender in contenders:
        if contender.budget.schedule == AUTO:
            raise UserError(
                f"schedule=auto chooses the schedule of '{contender.strategy.name}' on a trained network, and here the "
                "strategy acts from the first training step",
                next_step="state the schedule, or test trained networks (track frozen, or --where test)",
            )


def _task(name: str, params: dict[str, Any], registry: Registry) -> Task:
    task = fill(registry.task(name), params, f"task '{name}'")
    if not isinstance(recipe := task.recipe(), Recipe):
        raise UserError(f"`recipe` of task '{name}' must return a sparsebench.Recipe", got=recipe)
    return task


def _models(task: Task, entry: SuiteTask, request: Request, located: Located, registry: Registry) -> Iterator[Model]:
    """Yield the requested model if it takes the task's inputs, else the model of the suite or the task.

    There is one model for each variant of its parameters and each file of trained weights.
    """
    cls, variants = _model_class(task, entry, request, registry)
    starts = _starts(task, request, located)
    if len(starts) > 1 and task.trains and not entry.tests_weights:
        raise UserError(
            f"task '{task.name}' trains all networks from the same initial weights",
            got=f"{len(starts)} files of weights",
            allowed="one",
            next_step="run each file separately",
        )
    unknown_start = starts[0].keys() - cls.model_fields
    if unknown_start:
        raise UserError(
            f"--{min(unknown_start).replace('_', '-')}: model '{cls.name}' has no trained weights",
            next_step="use another model, e.g. --model timm:NAME",
        )
    if entry.tests_weights and not starts[0] and not any("weights" in params for params in variants):
        raise UserError(
            f"task '{task.name}' tests trained weights here",
            next_step="give --weights FILE.safetensors or --pretrained",
        )
    for params, start in product(variants, starts):
        yield fill(cls, params | start, f"model '{cls.name}'")


def _model_class(
    task: Task, entry: SuiteTask, request: Request, registry: Registry
) -> tuple[type[Model], list[dict[str, Any]]]:
    """Return the class of the model of a task, and each combination of its parameters."""
    cls = registry.model(entry.model or task.default_model)
    variants = list(combinations(entry.model_params, entry.model_sweep))
    if request.model is None:
        return cls, variants
    choice = registry.model(request.model.partition(":")[0])
    spec = parse(request.model, positional=choice.positional)
    if choice.inputs == task.inputs:
        requested = spec.combinations()
        if len(requested) > 1:
            raise UserError("--model takes one value for each parameter", got=request.model)
        return choice, requested
    if request.tasks:
        raise UserError(f"model '{choice.name}' takes {choice.inputs}, and task '{task.name}' gives {task.inputs}")
    return cls, variants


def _starts(task: Task, request: Request, located: Located) -> list[dict[str, Any]]:
    """Return the parameters of a model that name its trained weights, one dictionary for each file."""
    if task.inputs != "images":
        return [{}]
    start: dict[str, Any] = {"pretrained": True} if request.pretrained else {}
    if located.text_features:
        start["text_features"] = located.text_features
    key = {"weights_key": located.files.weights_key} if located.files.weights_key else {}
    return [start | {"weights": name} | key for name in located.weights] or [start]


def _with_classes(task: Task, model: Model, places: Mapping[str, Path]) -> Task:
    """Return the task with the classes of the model's head. An error names the file of the weights, if there is one."""
    try:
        return task.with_classes(model.classes(places) or None, places)
    except UserError as error:
        weights = places.get(getattr(model, "weights", ""))
        if weights is None:
            raise
        raise UserError(f"{weights.name}: {error}") from error


def _check_head(task: Task, model: Model, locations: Locations) -> None:
    """Raise UserError if the head of given weights has other classes than a task on which they are only tested."""
    from sparsebench.models.timm_models import head_error

    classes, head = task.known_classes(locations), model.classes(locations)
    if classes is None or head == len(classes):
        return
    weights = getattr(model, "weights", "")
    owner = locations[weights].name if weights else f"model '{model.name}'"
    raise head_error(owner, head or 0, len(classes))


def _check_varied(task: Task, entry: SuiteTask, varied: Mapping[str, Any]) -> None:
    """Raise UserError if a parameter of the training is varied although the network is already trained."""
    if entry.track not in ON_TRAINED:
        return
    decided = {*getattr(task, "training", ())}
    decided.discard("spuriosity")  # measured in the test
    if entry.network:  # the network was built for these; users' weights may allow others, which their model checks
        decided |= {"canvas", "patch", "permuted"}
    wrong = sorted(decided & varied.keys())
    if wrong:
        raise UserError(
            f"task '{task.name}' tests trained networks",
            got=f"{', '.join(wrong)}, set by training",
            next_step="to train new networks, give the number of training samples with --n-train",
        )


def _sizes(task: Task, entry: SuiteTask, request: Request) -> tuple[int, ...]:
    """Return the numbers of training samples: the request's, else the suite's; 0 if the task trains nothing."""
    if not task.trains:
        if request.n_train:
            raise UserError(f"task '{task.name}' trains nothing", got="--n-train", next_step="leave --n-train out")
        return (0,)
    sizes = request.n_train or entry.n_train
    if min(sizes) < 1:
        raise UserError(f"n_train of task '{task.name}'", got=list(sizes), allowed="1 or more")
    return (max(sizes),) if request.single else sizes


def _sizes_of_probe(task: Task, entry: SuiteTask, request: Request, locations: Locations) -> tuple[int, ...]:
    """Return the numbers of training images of a probe: the request's, else the suite's as far as they are possible.

    Possible are two images of each class up to all training images that there are.

    Raises:
        UserError: a requested number is not possible.
    """
    counts = task.training_counts(locations)
    classes = task.known_classes(locations)
    n_classes = LEAST_CLASSES if classes is None else len(classes)
    least = LEAST_OF_CLASS * n_classes
    most = None if counts is None else int(counts.sum())
    sizes = request.n_train or entry.n_train
    possible = sorted({max(least, n if most is None else min(n, most)) for n in sizes})
    if request.n_train and possible != sorted(set(sizes)):
        limit = "or more" if most is None else f"to {most} (all training pictures)"
        raise UserError(
            f"--n-train: training images of a probe on task '{task.name}'",
            got=", ".join(map(str, sizes)),
            allowed=f"{least} ({LEAST_OF_CLASS} of each class) {limit}",
        )
    return (max(possible),) if request.single else tuple(possible)


def _probe(task: Task, model: Model, pool: int, request: Request) -> Probe:
    """Return how the probe of a task is measured, with this number of training images.

    Raises:
        UserError: patches are predicted, and the request pools them, or a record does not hold that many.
    """
    if not isinstance(task, Patches):
        return Probe(pool=pool, pooling=request.pooling)
    if request.pooling != "model":
        raise UserError(
            f"task '{task.name}' predicts each patch", got=f"--pooling {request.pooling}", next_step="leave it out"
        )
    cost = closed_cost(task, model)
    if cost is not None:
        check_items(task, task.test, cost.tokens)
    return Probe(pool=pool, pooling="none")


def _only_tests(task: Task, entry: SuiteTask) -> bool:
    """Return whether cells test trained networks, and train none."""
    return entry.track in ON_TRAINED or not task.trains


def _where(task: Task, entry: SuiteTask, request: Request) -> Where:
    """Return where strategies act: the request's choice, else the suite's. Raise UserError if it is not possible."""
    where: Where = entry.where if request.where == "both" else request.where
    possible: tuple[str, ...] = get_args(Where)
    if _only_tests(task, entry):
        possible = ("both", "test")
    elif entry.track == "tuned":
        possible = ("both",)
    if where not in possible:
        about = f"where strategies act on task '{task.name}', track {entry.track}"
        raise UserError(about, got=where, allowed=possible)
    return where


def _precision(task: Task, model: Model, entry: SuiteTask, request: Request) -> Precision:
    """Return the precision: the request's, else the suite's on the device.

    Raises:
        UserError: it is not float32, and the cells train, or the model has another precision or does not support it.
    """
    tests = _only_tests(task, entry)
    precision: Precision = entry.gpu_precision if request.on_gpu and tests else "float32"
    if request.precision != "auto":
        precision = request.precision
        # Models have float32 by default. Another precision was chosen with the model, and must be the requested one.
        of_model = getattr(model, "precision", "float32")
        if tests and of_model not in ("float32", precision):
            raise UserError(
                f"model '{model.name}' has another precision",
                got=f"--precision {precision}",
                next_step="give only one of them",
            )
    if precision == "float32":
        return precision
    if not tests:
        raise UserError(
            f"task '{task.name}' trains networks; --precision is for tests of trained networks",
            got=f"--precision {precision}",
            next_step=f"if the model supports it, train in it with --model {model.name}:precision={precision}",
        )
    # This raises an error if the model does not support it.
    fill(type(model), model.model_dump() | {"precision": precision}, f"--precision: model '{model.name}'")
    return precision


def _check_files(suite: Suite, files: Files, variants: Collection[Variant]) -> None:
    """Raise UserError if no task uses the user's files, or if a suite for the user's pictures has none."""
    parts = [part for variant in variants for part in (variant.task, variant.model)]
    fields = {name for part in parts for name in type(part).model_fields}
    for name in (*LOCATED, "weights"):
        if getattr(files, name) and name not in fields:
            raise UserError(
                f"--{name.replace('_', '-')} is not used by any task of this run",
                got=", ".join(sorted({variant.task.name for variant in variants})),
                next_step="leave it out, or choose another task with --task",
            )
    if not suite.own_pictures or files.images:
        return
    for task in (variant.task for variant in variants):
        field = type(task).model_fields.get("images")
        if field is not None and task.model_dump()["images"] == field.default:
            raise UserError(
                f"suite '{suite.name}' needs your pictures",
                got=f"none for task '{task.name}'",
                next_step="give --images folder:DIR, or a name that sparsebench data lists",
            )


def _check_weights(variants: Sequence[Variant]) -> None:
    """Check that trained weights fit their tasks and each other; log how they are used.

    Raises:
        UserError: weights do not fit, or they need images of another size or other classes than the other weights, or a
            test has too many items.
    """
    different = list({repr((variant.task, variant.model)): variant for variant in variants}.values())
    notes: dict[str, None] = {}  # each once, in order
    for variant in different:
        variant.task.check_located(variant.places)
        notes[variant.model.check_weights(variant.task, variant.places)] = None
        check_items(variant.task, getattr(variant.task, "test", 0))
    for note in filter(None, notes):
        log.warning("%s", note)
    # Probes are compared on one network at a time.
    _check_equal_needs(variant for variant in different if variant.cell.probe is None)


def _check_equal_needs(variants: Iterable[Variant]) -> None:
    """Raise UserError if weight files of one board need images of different sizes, or have other numbers of classes."""
    needs: dict[str, set[str]] = {}
    files: dict[str, Path] = {}
    for variant in variants:
        name = getattr(variant.model, "weights", "")
        if name not in variant.places:  # the weights are not of a file
            continue
        side, channels = getattr(variant.task, "canvas", "?"), getattr(variant.model, "in_chans", "?")
        classes = variant.model.classes(variant.places)
        need = f"{side} x {side} pixels of {channels} channels and {classes} classes"
        needs.setdefault(name, set()).add(need)
        files[name] = variant.places[name]
    first = next(iter(needs), "")
    for name, need_of_file in needs.items():
        if need_of_file != needs[first]:
            raise UserError(
                "networks of one board need images of equal size and equally many classes",
                got=f"{files[first].name} for {min(needs[first])}, {files[name].name} for {min(need_of_file)}",
                next_step="run each file separately, or set one size for all with --image-size SIDE",
            )
