"""The tasks of a request: entries of its suite, or new entries for other tasks, with their strategies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsebench.errors import UserError, unknown
from sparsebench.plan.contenders import Contender, contenders_of, specs_of
from sparsebench.plan.request import Request
from sparsebench.plan.suite import Suite, SuiteTask
from sparsebench.plugin.registry import Registry
from sparsebench.strategy.spec import parse
from sparsebench.tasks.base import Task
from sparsebench.tasks.patches import Patches

CANVAS = "canvas"
"""The parameter of image tasks that is the side of their images in pixels."""
FIT_IMAGES = 256
"""The number of training images on which a strategy may fit, for a test of trained weights."""


@dataclass(frozen=True)
class RequestedTask:
    """A task that a request runs.

    Attributes:
        entry: the entry of the suite, or a new one.
        cls: the class of the task.
        changes: parameters that the request sets.
        contenders: the strategies with their budgets.
    """

    entry: SuiteTask
    cls: type[Task]
    changes: Mapping[str, Any]
    contenders: tuple[Contender, ...]


def requested_tasks(suite: Suite, request: Request, registry: Registry, *, has_weights: bool) -> list[RequestedTask]:
    """Return the tasks of a request: entries of the suite, or new entries for other tasks, with their strategies.

    Args:
        suite, request, registry: the suite, the changes to it, and what is installed.
        has_weights: whether the user gives files of trained weights.
    """
    plugins = [spec for text in request.plugins for spec in specs_of(text, registry)]  # files may bring tasks
    tasks = []
    for entry, changes in _sized(_entries(suite, request, registry, has_weights), request, registry):
        if entry.is_probe:
            entry = _probe_of(entry, request, has_weights)
        contenders = tuple(contenders_of(suite, entry, plugins, request, registry))
        tasks.append(RequestedTask(entry, registry.task(entry.name), changes, contenders))
    return tasks


def _entries(
    suite: Suite, request: Request, registry: Registry, has_weights: bool
) -> Iterator[tuple[SuiteTask, dict[str, Any]]]:
    """Yield the requested entries of the suite, or new entries for other tasks, with the requested parameters.

    A new entry trains networks if the request says on how many samples. Otherwise it tests the user's trained weights.
    In a suite of probes a new entry is a probe too, with the numbers of images and the budgets of the first entry.
    """
    of_suite = _entries_of_figures(suite, request.figures)
    retrained = [entry for entry in of_suite if entry.network and _trains_anew(entry, request, registry)]
    if not request.tasks:
        if retrained:
            raise UserError(
                f"suite '{suite.name}' only tests trained networks on {', '.join(entry.name for entry in retrained)}",
                got="--n-train" if request.n_train else "--model",
                next_step="choose the task to train with --task",
            )
        for entry in of_suite:
            yield entry, {}
        return
    for spec in map(parse, request.tasks):
        # A task that is retrained has a new entry, as that of the suite tests the suite's network.
        entries = [entry for entry in of_suite if entry.name == spec.name and entry not in retrained]
        if not entries:
            entries = [_new_entry(spec.name, suite, request, registry, has_weights)]
        for entry in entries:
            for params in spec.combinations():
                yield entry, params


def _sized(
    entries: Iterable[tuple[SuiteTask, dict[str, Any]]], request: Request, registry: Registry
) -> Iterator[tuple[SuiteTask, dict[str, Any]]]:
    """Yield entries with their parameters, and with the requested size of the images where they have images.

    Raises:
        UserError: no entry has images, or the parameters of one have another size.
    """
    size, has_images = request.image_size, False
    for entry, params in entries:
        if size is not None and CANVAS in registry.task(entry.name).model_fields:
            if params.get(CANVAS, size) != size:
                raise UserError(
                    "two sizes of images",
                    got=f"--image-size {size}, and canvas={params[CANVAS]} of task '{entry.name}'",
                    next_step="give only one of them",
                )
            params, has_images = params | {CANVAS: size}, True
        yield entry, params
    if size is not None and not has_images:
        raise UserError(
            "no task of this run has images of a size",
            got=f"--image-size {size}",
            next_step="leave --image-size out, or choose another task with --task",
        )


def _entries_of_figures(suite: Suite, requested: Sequence[str]) -> list[SuiteTask]:
    """Return the entries of a suite for the requested figures of a paper; all entries if none is requested."""
    figures = sorted({entry.figure for entry in suite.task} - {""})
    if strange := sorted(set(requested) - set(figures)):
        raise unknown(f"figure of suite '{suite.name}'", strange[0], figures)
    return [entry for entry in suite.task if not requested or entry.figure in requested]


def _new_entry(name: str, suite: Suite, request: Request, registry: Registry, has_weights: bool) -> SuiteTask:
    """Return an entry for a task that the suite does not have, or has for other networks.

    Args:
        name: the name of the task.
        suite, request, registry: see `_entries`.
        has_weights: whether the user gives files of trained weights.

    Raises:
        UserError: neither a training nor trained weights are requested.
    """
    if all(entry.is_probe for entry in suite.task) and not request.single:
        usual = suite.task[0]
        return SuiteTask(name=name, n_train=usual.n_train, budgets=usual.budgets, model="timm", track="probe")
    is_for_probes = issubclass(registry.task(name), Patches)  # refused later, with the reason
    if request.n_train or not registry.task(name).trains or is_for_probes:
        return SuiteTask(name=name, n_train=request.n_train or (0,))
    if has_weights or request.pretrained:
        return SuiteTask(name=name, n_train=(FIT_IMAGES,), track="frozen", seeds=1)
    raise UserError(
        f"suite '{suite.name}' trains no such network for task '{name}'",
        next_step="to train one, give the number of training samples with --n-train; to test trained weights, give "
        "--weights FILE",
    )


def _probe_of(entry: SuiteTask, request: Request, has_weights: bool) -> SuiteTask:
    """Return the entry of a probe on the user's network, if weights are given, else on the suite's networks.

    For pictures it is the entry of the network itself, on whose features probes would be learned.

    Raises:
        UserError: a model is named without its weights.
    """
    if request.single:
        entry = entry.model_copy(update={"track": "frozen", "n_train": (FIT_IMAGES,)})
    if has_weights or request.pretrained:
        return entry.model_copy(update={"network": ""})
    if entry.network and request.model is not None:
        raise UserError(
            "a probe is learned on the features of trained weights",
            got=f"--model {request.model} without weights",
            next_step="give --weights FILE or --pretrained, or leave --model out",
        )
    return entry


def _trains_anew(entry: SuiteTask, request: Request, registry: Registry) -> bool:
    """Return whether a request with --n-train or --model trains a task for which its suite has trained networks."""
    if entry.is_probe:
        return False
    if request.n_train:
        return True
    if request.model is None:
        return False
    # A model that does not take the task's inputs leaves the task with the suite's networks.
    model = registry.model(request.model.partition(":")[0])
    return model.inputs == registry.task(entry.name).inputs
