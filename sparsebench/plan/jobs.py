"""Jobs: the cells of a run with all data needed to run them, and with the cells that they start from."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sparsebench.models.base import Model
from sparsebench.plan.contenders import Contender, closed_cost, draws_random
from sparsebench.plugin.registry import PluginClass, Registry, ResolvedCell
from sparsebench.records.record import (
    ON_TRAINED,
    Cell,
    Failure,
    Origin,
    Part,
    Record,
    RecordSummary,
    Status,
    Where,
    digest,
)
from sparsebench.records.table import setting_text
from sparsebench.strategy.base import Kind, Strategy
from sparsebench.strategy.budget import FULL
from sparsebench.strategy.spec import label
from sparsebench.tasks.base import Task

WEIGHTS_SEED = 0
"""The repetition of the pre-training that all cells start from."""
OVERHEAD = 1e9
"""The fixed cost of a cell, as the MACs that a core computes in the same time."""
ANY_NETWORK = 1e8
"""The assumed MACs of an image if they are unknown before the network is built."""
SIZES_OF_PROBES = 6
"""The assumed number of cells that share the features of a probe."""
STEP_COST = 3
"""MACs of a training step on an image, as a multiple of those of its test."""


class Job(BaseModel):
    """A cell to run.

    Attributes:
        origin: the origin of its strategy.
        kind: the strategy's kind.
        label: the strategy's name in tables, with the parameters that differ from their defaults.
        files: the plugin files of its strategy, task and model, which a worker loads.
        code: names or paths of its plugins that do not come with sparsebench, and the name of its strategy; () if all
            come with sparsebench. Cells with different code run in different workers.
        after: id of the cell that must be done before, or "".
        network: id of the cell whose trained network this cell tests, or "" if it trains its own.
        requested: whether the cell belongs to the request. Otherwise it only runs because other cells start from it.
        keep_weights: whether its weights are stored.
        together: whether it can be trained in one program with others like it.
        cost: the estimated MACs of its training and its test without a strategy; see `JobMaker`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        """The kind of the job: task, model, whether it only tests, and n_train if it trains.

        Cells of one kind have the same ratio of time to cost.
        """
        return setting_text(self.cell), bool(self.network), 0 if self.network else self.cell.n_train

    @cached_property
    def features(self) -> str:
        """The name of the features that the cell's probe learns from, by content; "" on the other tracks."""
        return f"{self.cell.features}-{digest(self.origin.identity)}" if self.cell.probe else ""

    @property
    def weights(self) -> str:
        """Id of the cell whose trained weights are tested."""
        return self.network or self.cell.id

    @property
    def order(self) -> tuple[bool, int]:
        """A sort key: jobs begin in ascending order.

        Jobs that store weights come first, earlier trainings before later ones.
        """
        return not self.keep_weights, len(self.cell.inits) if self.keep_weights else 0

    def is_answered_by(self, summary: RecordSummary | Record) -> bool:
        """Return whether a record of this cell has the same revision and was not skipped."""
        return summary.status != "skipped" and summary.origin.identity == self.origin.identity

    def record_of_failure(self, status: Status, failure: Failure, started: str = "", seconds: float = 0.0) -> Record:
        """Return a record with a failure."""
        return Record(
            cell=self.cell,
            cell_id=self.cell.id,
            status=status,
            failure=failure,
            origin=self.origin,
            kind=self.kind,
            label=self.label,
            started=started,
            seconds=round(seconds, 3),
        )


@dataclass(frozen=True)
class Variant:
    """A task with a model and the strategies that act on it.

    Attributes:
        task, model: with all their parameters.
        places: the places of files by their names in cells.
        cell: a template of the cells, without strategy, budget, n_train, repetition and init.
        contenders: the strategies with their budgets.
        n_train: the numbers of training samples.
        seeds: the number of repetitions.
        training: the task and n_train of the trained network that the cells start from, or None.
        keep_weights: whether trained networks are stored.
    """

    task: Task
    model: Model
    places: Mapping[str, Path]
    cell: Cell
    contenders: tuple[Contender, ...]
    n_train: tuple[int, ...]
    seeds: int
    training: tuple[Task, int] | None
    keep_weights: bool


class JobMaker:
    """Makes the jobs of cells, with their expected cost.

    The cost of a job is the estimated MACs of its training and its test without a strategy, and a fixed overhead.

    Args:
        registry: the registered strategies, tasks and models.
    """

    def __init__(self, registry: Registry):
        self.registry = registry
        self._costs: dict[str, float] = {}

    def jobs_of(self, variant: Variant, contender: Contender, n_train: int, repetition: int) -> Iterator[Job]:
        """Yield the jobs of the cells that a cell starts from, if any, then its own job.

        Nothing is yielded for a later repetition that must equal the first one: a test of given trained weights in
        which neither the task nor the strategy draws random numbers.
        """
        strategy, registered = contender.strategy, contender.registered
        starts = self._starts(variant, repetition)
        cell = variant.cell.model_copy(
            update={
                "strategy": contender.part,
                "budget": contender.budget,
                "n_train": n_train,
                "repetition": repetition,
                "where": _where(variant.cell, strategy),
                "init": starts[-1].cell if starts else None,
            }
        )
        if repetition and cell.network and not (variant.task.draws_test() or draws_random(registered)):
            return

        starts, cell, tested = self._with_network(cell, variant, strategy, starts)
        dense = self.registry.strategy("dense")
        for start in starts:
            yield self._job(start, dense, dense.cls(), requested=False, keep_weights=True)
        network = tested.cell.id if tested else ""
        keeps = variant.keep_weights and tested is None
        resolved = ResolvedCell(cell, variant.task, variant.model)
        yield self._job(resolved, registered, strategy, network, keep_weights=keeps)

    def _with_network(
        self, cell: Cell, variant: Variant, strategy: Strategy, starts: list[ResolvedCell]
    ) -> tuple[list[ResolvedCell], Cell, ResolvedCell | None]:
        """Return a cell with its network.

        Args:
            cell: the cell.
            variant, strategy: its task, model and strategy.
            starts: from `_starts`.

        Returns:
            The cells that must be trained before, in order; the cell; and the one of them whose network the cell tests,
            or None if it trains its own or has given weights.
        """
        task, model = variant.task, variant.model
        if variant.training is not None:  # a network of a suite: the cell tests or fine-tunes it
            return starts, cell, starts[-1] if cell.where == "test" else None
        trains_images = task.trains and model.inputs == "images" and cell.where != "test"
        if strategy.distils and trains_images:  # the strategy learns from a dense network, which the cell starts from
            teacher = self._without_strategy(cell, task, model)
            return [*starts, teacher], cell.model_copy(update={"init": teacher.cell}), None
        if strategy.trained:
            return starts, cell, None
        tested = self.training_of(ResolvedCell(cell, task, model))
        if tested is None:
            return starts, cell, None
        return [*starts, tested], cell, tested

    def _starts(self, variant: Variant, repetition: int) -> list[ResolvedCell]:
        """Return the cells that train the network from which a cell starts, in the order of training."""
        model = variant.model
        if variant.training is not None:
            task, samples = variant.training
            before = self._pretraining(task, model, repetition)
            init = before[-1].cell if before else None
            trained = dense_cell(task, model, samples, repetition, self.registry, init)
            return [*before, ResolvedCell(trained, task, model)]
        if variant.cell.track in ON_TRAINED:
            return []  # the model has trained weights
        return self._pretraining(variant.task, model, repetition)

    def _pretraining(self, task: Task, model: Model, repetition: int) -> list[ResolvedCell]:
        """Return the cell of a task's pre-training; [] if training starts from random weights."""
        pretraining = task.initial()
        if pretraining is None:
            return []
        first, samples = pretraining
        seed = repetition if getattr(task, "pretrain_each", False) else WEIGHTS_SEED
        first_model = model.first_model()
        return [ResolvedCell(dense_cell(first, first_model, samples, seed, self.registry), first, first_model)]

    def _without_strategy(self, cell: Cell, task: Task, model: Model) -> ResolvedCell:
        """Return the cell of the same network without a strategy."""
        dense = Part.of(self.registry.strategy("dense").cls())
        bare = cell.model_copy(update={"strategy": dense, "budget": FULL, "where": "both"})
        return ResolvedCell(bare, task, model)

    def training_of(self, resolved: ResolvedCell) -> ResolvedCell | None:
        """Return the cell whose trained network a cell tests, or None if it trains its own or has given weights.

        Cells share a network if their strategies act in the test only. There are two exceptions: on tokens, training
        takes less time than storing and reading weights; watching and early stopping test the strategy during training.
        """
        cell, task, model = resolved
        if cell.where != "test" or cell.track != "scratch" or not task.trains or model.inputs != "images":
            return None
        recipe = task.recipe()
        if recipe.watch or recipe.patience:
            return None
        return self._without_strategy(cell, task, model)

    def _job(
        self, resolved: ResolvedCell, registered: PluginClass, strategy: Strategy, network: str = "", **more: Any
    ) -> Job:
        cell = resolved.cell
        after = network or (cell.init.id if cell.init else "")
        params = strategy.model_dump(mode="json", exclude_defaults=True)
        return Job(
            cell=cell,
            origin=registered.origin,
            kind=registered.cls.kind,
            label=label(strategy.name, params),
            **plugins_of(cell, self.registry),
            after=after,
            network=network,
            together=resolved.model.together and not after,
            cost=self._cost(resolved, tests=bool(network)),
            **more,
        )

    def _cost(self, resolved: ResolvedCell, *, tests: bool) -> float:
        """Return the cost of a cell; with `tests` it tests a network that another cell trains."""
        cell, task, model = resolved
        trains = not tests and cell.track not in ON_TRAINED and cell.n_train > 0 and task.trains
        key = repr((cell.task, cell.model, cell.n_train, trains, cell.probe))
        if key not in self._costs:
            images = float(getattr(task, "test", 0))
            if cell.probe is not None:  # cells with other numbers of training images share their features
                images = (images + cell.probe.pool) / SIZES_OF_PROBES
            if trains:
                recipe = task.recipe()
                in_all_epochs = cell.n_train * recipe.epochs
                in_all_steps = (recipe.batch or cell.n_train) * recipe.steps
                images += STEP_COST * min(in_all_epochs, in_all_steps)
            cost = closed_cost(task, model)
            macs = ANY_NETWORK if cost is None else cost.macs(cost.dense())
            self._costs[key] = OVERHEAD + images * macs
        return self._costs[key]


def dense_cell(
    task: Task, model: Model, n_train: int, repetition: int, registry: Registry, init: Cell | None = None
) -> Cell:
    """Return the cell that trains a network on a task without a strategy."""
    return Cell(
        task=registry.part_of(task),
        model=registry.part_of(model),
        strategy=Part.of(registry.strategy("dense").cls()),
        budget=FULL,
        n_train=n_train,
        repetition=repetition,
        init=init,
    )


def _where(cell: Cell, strategy: Strategy) -> Where:
    """Return where the strategy acts: the requested choice, unless the track or the strategy determines it."""
    if cell.track in ON_TRAINED:
        return "test"
    if not strategy.budgeted:
        return "both"
    return "train" if strategy.trains_only else cell.where


def plugins_of(cell: Cell, registry: Registry) -> dict[str, tuple[str, ...]]:
    """Return `Job.files` and `Job.code` of a cell."""
    owners = registry.owners(cell.strategy.name, cell.task.name, cell.model.name)
    third_party = sorted({str(owner.file or owner.origin.plugin) for owner in owners if not owner.origin.is_shipped})
    files = sorted({str(owner.file) for owner in owners if owner.file is not None})
    return {"files": tuple(files), "code": (*third_party, cell.strategy.name) if third_party else ()}
