"""From a job to what its cell is made of: data, network, strategy, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from sparsebench import seeds
from sparsebench.errors import StrategyError, UserError
from sparsebench.models.acting import Actor
from sparsebench.models.base import Model, Network
from sparsebench.plugin.registry import Registry
from sparsebench.plugin.spec import fill
from sparsebench.strategy import Strategy
from sparsebench.sweep import store
from sparsebench.sweep.cell import Cell
from sparsebench.sweep.job import Job
from sparsebench.tasks.base import Data, Locations, Recipe, Split, Task
from sparsebench.training.steps import Samples


@dataclass(frozen=True)
class Context:
    """What a cell needs and its hash does not know: this machine.

    Attributes:
        out: the run's folder, for initial weights.
        device: "cpu" or "cuda:i".
        locations: where the image sets lie.
    """

    out: Path
    device: str
    locations: Locations


@dataclass(frozen=True)
class Prepared:
    """A cell that is ready to be trained.

    Attributes:
        actor: the strategy on this network, or None for one that spends no budget.
        train, test: the splits on the device.
        weights: which trained weights it starts from, or "".
    """

    cell: Cell
    task: Task
    data: Data
    network: Network
    actor: Actor | None
    train: Samples
    test: Samples
    weights: str = ""

    @property
    def recipe(self) -> Recipe:
        """The task's recipe."""
        return self.task.recipe()

    @property
    def order(self) -> tuple[object, ...]:
        """The dimensions that name the order of the training samples; every strategy has the same."""
        return "order", self.cell.task.name, self.cell.n_train, self.cell.repetition

    @property
    def in_training(self) -> Actor | None:
        """What acts in training."""
        return None if self.cell.where == "test" else self.actor

    @property
    def in_test(self) -> Actor | None:
        """What acts in the test."""
        return None if self.cell.where == "train" else self.actor


def prepare(job: Job, registry: Registry, context: Context) -> Prepared:
    """Draw the data of a job's cell and build its network.

    Raises:
        StrategyError, UnsupportedError, UserError: it cannot be done.
    """
    cell, strategy = job.cell, _strategy(job, registry)
    task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
    model = fill(registry.model(cell.model.name), cell.model.params, f"model '{cell.model.name}'")
    data = task.draw(cell.n_train, cell.repetition, context.locations)
    network, weights = _network(cell, model, task, data, context)
    train, test = (_on_device(split, network.grid, context.device) for split in (data.train, data.test))
    return Prepared(cell, task, data, network, _actor(cell, strategy, network), train, test, weights)


def _strategy(job: Job, registry: Registry) -> Strategy:
    """Return the job's strategy, whose source must be the one that the run began with."""
    for path in job.files:
        registry.load_file(Path(path))
    found = registry.strategy(job.cell.strategy.name)
    if failure := job.failure or found.failure:
        raise StrategyError(f"the plugin does not load: {failure}")
    if found.origin.sha256 != job.origin.sha256:
        raise StrategyError(f"the source of '{found.cls.name}' changed while the run was under way; run it again")
    return fill(found.cls, job.cell.strategy.params, f"strategy '{found.cls.name}'")


def _network(cell: Cell, model: Model, task: Task, data: Data, context: Context) -> tuple[Network, str]:
    """Return the network on its device: with the initial weights of the repetition, or those of `cell.init`.

    A pre-trained start gets a fresh output layer, as in Li et al. 2023. Trained weights that the model itself brings
    are named beside it.
    """
    network, weights = model.build(data, cell.repetition), ""
    if cell.init is None:
        weights = model.start(network, task, context.locations)
    if cell.init is not None:
        path = store.weights_path(context.out, cell.init.id)
        if not path.exists():
            raise UserError(f"the initial weights of this cell are missing ({path.name}): their cell did not succeed")
        state = {k: v for k, v in load_file(path).items() if not k.startswith(("head.", "head_dist."))}
        network.module.load_state_dict(state, strict=False)
    network.module.to(context.device)
    return network, weights


def _actor(cell: Cell, strategy: Strategy, network: Network) -> Actor | None:
    """Return what acts on the network, or None for a strategy that spends no budget."""
    if not strategy.budgeted:
        return None
    stream = seeds.seed_of("strategy", cell.task.name, cell.n_train, cell.repetition)
    return Actor(strategy, cell.budget, network.cost, network.grid, stream)


def _on_device(split: Split, grid: tuple[int, int] | None, device: str) -> Samples:
    inputs, labels, relevance = (
        None if x is None else torch.from_numpy(np.ascontiguousarray(x)).to(device)
        for x in (split.inputs, split.labels, split.relevance_on(grid))
    )
    assert inputs is not None and labels is not None
    return Samples(inputs, labels, relevance)
