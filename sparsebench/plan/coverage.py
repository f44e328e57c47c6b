"""Which cells of a suite a strategy lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any, NamedTuple

from sparsebench.errors import UserError
from sparsebench.plan.contenders import usual_budgets
from sparsebench.plan.expand import variants_of_task
from sparsebench.plan.locate import Located
from sparsebench.plan.request import Request
from sparsebench.plan.requested import RequestedTask
from sparsebench.plan.suite import Suite, SuiteTask, combinations
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell, Part, Where, digest
from sparsebench.strategy.budget import FULL
from sparsebench.strategy.spec import fill
from sparsebench.tasks.sources.composites import LOCATED


class Question(NamedTuple):
    """What a cell answers of a suite, without choices that the suite leaves to the user.

    Attributes:
        setting: hash of task, model, training samples, repetition and track. For a task that trains nothing, the
            parameters of task and model are the user's choice. The network is, where the user gives its weights.
        budget: where the strategy acts, and the amount of the budget.
    """

    setting: str
    budget: str

    @classmethod
    def of(cls, cell: Cell) -> Question:
        """Return the question that a cell answers."""
        about: list[Any] = []
        if cell.n_train:  # else nothing is trained, and users choose their own images and networks
            params = {key: value for key, value in cell.task.params.items() if key not in LOCATED}
            has_given_weights = bool(cell.model.params.get("weights") or cell.model.params.get("pretrained"))
            about = [params] if has_given_weights else [params, cell.model.model_dump(mode="json"), cell.precision]
        setting = digest([cell.task.name, cell.n_train, cell.repetition, cell.track, *about])
        # Only on the track scratch may a suite choose between "both" and "test". Otherwise the track or the strategy
        # decides where it acts, and its cells answer "both".
        acts: Where = "test" if cell.where == "test" and cell.track == "scratch" else "both"
        amount = cell.budget.amount
        return cls(setting, f"{acts} {amount} {getattr(cell.budget, amount)}")


def missing_cells(suite: Suite, cells: Collection[Cell], registry: Registry, *, any_budget: bool) -> list[str]:
    """Return descriptions of the cells that a suite needs for each strategy and that are not among `cells`.

    Pictures may differ from the suite's, and also networks and labels if nothing is trained. With `any_budget`, budgets
    may differ too.
    """

    def key(cell: Cell) -> object:
        question = Question.of(cell)
        return question.setting if any_budget else question

    answered = {key(cell) for cell in cells}
    pictures = _pictures_of(cells)
    request = Request()
    missing: list[str] = []
    for entry in suite.task:
        try:
            templates = _templates(suite, entry, registry, pictures)
        except UserError as error:  # it needs pictures that none of the cells have
            return [str(error)]
        repetitions = range(entry.seeds or suite.seeds)
        budgets = usual_budgets(suite, entry, request)
        for template, n_train, repetition, budget in product(templates, entry.n_train, repetitions, budgets):
            update = {"n_train": n_train, "repetition": repetition, "budget": budget, "track": entry.track}
            if key(template.model_copy(update=update)) not in answered:
                missing.append(f"{entry.name} with {n_train} samples, repetition {repetition}, {budget.label}")
    return missing


def _pictures_of(cells: Iterable[Cell]) -> dict[str, str]:
    """Return the parameters that name the pictures of trained networks, with the names."""
    pictures: dict[str, str] = {}
    for cell in cells:
        if not cell.n_train:
            continue
        for parameter in LOCATED:
            name = cell.task.params.get(parameter)
            if name:
                pictures[parameter] = str(name)
    return pictures


def _templates(suite: Suite, entry: SuiteTask, registry: Registry, pictures: Mapping[str, str]) -> list[Cell]:
    """Return a cell for each variant of an entry's task and model, with the pictures of these names."""
    if entry.tests_weights:
        # `Question` has no model here, so any part that has weights is one.
        model = Part(name="given", params={"weights": "given"})
        cls = registry.task(entry.name)
        variants = [fill(cls, params, f"task '{entry.name}'") for params in combinations(entry.params, entry.sweep)]
        return [_template(registry.part_of(task), model, entry) for task in variants]
    if registry.task(entry.name).trains:
        cls = registry.task(entry.name)
        taken = {key: name for key, name in pictures.items() if key in cls.model_fields}
        located = Located(pictures={entry.name: [taken]})
        task = RequestedTask(entry, cls, changes={}, contenders=())
        return [variant.cell for variant in variants_of_task(task, suite, Request(), located, registry)]
    # `Question` has no parameters of a task that trains nothing, and no model. So names suffice, and no file is needed.
    part = Part(name=entry.name)
    return [_template(part, part, entry)]


def _template(task: Part, model: Part, entry: SuiteTask) -> Cell:
    """Return a cell of a task and a model, whose strategy, size and repetition are placeholders."""
    strategy = Part(name="dense")
    return Cell(task=task, model=model, strategy=strategy, budget=FULL, n_train=0, repetition=0, where=entry.where)
