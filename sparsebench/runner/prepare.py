"""From a job to what its cell is made of: data, network, strategy, on the device."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from sparsebench import seeds
from sparsebench.errors import NotReadyError, StrategyError, UnsupportedError, UserError
from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.base import HEADS, Network, Start
from sparsebench.plan.request import Job, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import Cell, digest
from sparsebench.runner.process import OnBegin
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.spec import fill
from sparsebench.strategy.view import Images
from sparsebench.tasks.base import Data, Recipe, Split, Task, check_items
from sparsebench.training.fit import Fitted, fit, modules_of, state_digest
from sparsebench.training.steps import Augmentation, Samples, Teacher

MOST = 2**26
"""Bytes of data that are kept; the largest tests of the suites quick and embedded are a fifth of that."""
SHARE = 0.5
"""Of a device's free memory that the images of one split may take."""
TRAINING = "training"
"""The name under which a file of weights says how they were trained."""


class Context:
    """What a process needs for its cells that their hashes do not know, and what it keeps from one to the next.

    Args:
        setting: what all cells of the run have in common; the device is this process's.
        alone: whether nobody interrupts this process, so that a KeyboardInterrupt is a strategy's own.
        begin: told of each cell, and every second of the share of its training, unless that may end sooner, or, if it
            trains nothing, of its test.

    Attributes:
        trusted: which strategies, on which task and model, were seen not to depend on labels or masks.
        fitted: what strategies learned from training images, by all that it depends on.
    """

    def __init__(self, setting: Setting, alone: bool = False, begin: OnBegin = lambda cells, share: None):
        self.setting, self.alone, self.begin = setting, alone, begin
        self.trusted, self.fitted = set[tuple[str, ...]](), dict[str, Fitted]()
        self._draw = ""
        self._data: Data | None = None
        self._images: dict[str, torch.Tensor] = {}

    def draw(self, task: Task, cell: Cell) -> Data:
        """Return the data of a cell, a copy of its own; the data drawn last are kept for the next cell that has them.

        Drawing is up to a quarter of a short cell of tokens, and a twentieth of a test of a trained network on
        pictures. What is mapped from a file is not kept: a copy would have to read all of it. A task that draws from
        torch's own generator gives each cell the same, too.
        """
        if self._data is not None and self._draw == cell.draw:
            return copy.deepcopy(self._data)
        self._data = None  # its memory, before there is more
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of("draw", cell.draw))
            data = task.draw(cell.n_train, cell.repetition, self.setting.locations)
        splits = [split for split in (data.train, data.test, data.validation) if split is not None]
        arrays = [value for part in (data, *splits) for value in vars(part).values() if isinstance(value, np.ndarray)]
        if any(isinstance(array, np.memmap) for array in arrays) or sum(array.nbytes for array in arrays) > MOST:
            return data
        self._draw, self._data = cell.draw, data
        return copy.deepcopy(data)

    def samples(self, split: Split, grid: tuple[int, int] | None, augmentation: Augmentation | None = None) -> Samples:
        """Return a split as tensors on the device; images for which that has no room go there batch by batch.

        Images that are all that a file holds stay on the device for the next cell: what is in a file of pixels never
        changes. On a CPU they are the file's pages.
        """
        device, inputs = self.setting.device, split.inputs
        file, tensor = "", torch.from_numpy(np.ascontiguousarray(inputs))
        if isinstance(inputs, np.memmap) and inputs.filename is not None and inputs.flags.c_contiguous:
            whole = os.path.getsize(inputs.filename) == inputs.offset + inputs.nbytes
            file = str(inputs.filename) if whole else ""
        if file in self._images:
            tensor = self._images[file]
        else:
            if large := inputs.ndim == 4 and inputs.nbytes > room(device):
                self._images.clear()
                large = inputs.nbytes > room(device)
            if not large:
                tensor = tensor.to(device)
                if file:
                    self._images[file] = tensor
        labels, relevance = torch.from_numpy(np.ascontiguousarray(split.labels)).to(device), split.relevance_on(grid)
        known = None if relevance is None else torch.from_numpy(np.ascontiguousarray(relevance)).to(device)
        return Samples(tensor, labels, known, augmentation)


def room(device: str) -> float:
    """Return how many bytes the images of a split may have to be kept on a device."""
    if torch.device(device).type != "cuda":
        return 0.0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return SHARE * (torch.cuda.mem_get_info(device)[0] + unused)


@dataclass(frozen=True)
class Prepared:
    """A cell that is ready to be trained.

    Attributes:
        actor: the strategy on this network, or None for one that spends no budget.
        train, test, validation: the splits on the device; there may be none to validate on.
        start: which trained weights it starts from.
        teacher: the network as it begins, for a strategy that learns from it, or None; only where its output layer
            too is trained when it begins, without which it says nothing.
        outcome: how the training came out of the network that it tests, see `Training.outcome`; None where it is
            trained itself.
    """

    cell: Cell
    task: Task
    data: Data
    network: Network
    actor: Actor | None
    train: Samples
    test: Samples
    validation: Samples | None
    start: Start
    teacher: Teacher | None
    outcome: dict[str, float] | None

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
    cell, strategy = job.cell, strategy_of(job, registry)
    task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
    model = fill(registry.model(cell.model.name), cell.model_params, f"model '{cell.model.name}'")
    registry.check_revision(task, cell.task)
    registry.check_revision(model, cell.model)
    data = _data(task, cell, context)
    network = model.build(data, cell.repetition)
    outcome = None
    if job.network:
        initial, outcome = load_trained(network, context.setting.weights(job.network))
        start = Start(initial)
    elif cell.init is None:
        start = model.start(network, task, context.setting.locations)
    else:
        same_task = cell.track == "tuned" or cell.init.task == cell.task
        fresh = () if same_task else HEADS  # those of another task are not taken (Li et al. 2023)
        content = _put(network, context.setting.weights(cell.init.id), fresh, "first network")
        start = Start(hashlib.sha256(content).hexdigest(), head=same_task)
    network.module.to(context.setting.device)
    augmentation = _augmentation(cell, task.recipe(), data.train, network, context.setting.device)
    train, test = context.samples(data.train, network.grid, augmentation), context.samples(data.test, network.grid)
    validation = None if data.validation is None else context.samples(data.validation, network.grid)
    if data.among is not None:
        test.absent = torch.ones(len(data.classes), dtype=torch.bool, device=context.setting.device)
        test.absent[torch.from_numpy(data.among).to(context.setting.device)] = False
    teacher: Any = None
    if strategy.distils and start.head:
        if not hasattr(network, "tell"):
            raise UnsupportedError(
                f"'{strategy.name}' needs the dense network's outputs, which this model does not provide: it must have "
                "tell(inputs), ModelOutputs without gradients"
            )
        teacher = copy.deepcopy(network)
        teacher.module.eval().requires_grad_(False)
    actor = _actor(cell, strategy, network, task)
    return Prepared(cell, task, data, network, actor, train, test, validation, start, teacher, outcome)


def _data(task: Task, cell: Cell, context: Context) -> Data:
    """Draw the data, with a validation split if the recipe asks for one and none is drawn."""
    data, recipe = context.draw(task, cell), task.recipe()
    check_items(task, len(data.test.labels))
    if recipe.validation and data.validation is None:
        data = data.hold_back(recipe.validation)
    if recipe.patience and data.validation is None:
        raise UserError(
            f"task '{task.name}': patience needs a validation split, and these images have none",
            got=f"patience={recipe.patience}, validation=0",
            next_step="hold some training images back, as in validation=0.1",
        )
    if recipe.patience and recipe.validate_by == "worst_group" and len(data.group_names) == 1:
        raise UserError(f"task '{task.name}' has no groups", got="validate_by=worst_group", allowed="accuracy")
    return data


def strategy_of(job: Job, registry: Registry) -> Strategy:
    """Return the job's strategy.

    Raises:
        PluginError: it does not load any more.
        StrategyError: it has another revision than the run began with.
    """
    for path in job.files:
        registry.load_file(Path(path))
    registered = registry.strategy(job.cell.strategy.name)
    if registered.cls.kind != job.kind:
        raise StrategyError(f"'{registered.cls.name}' is {registered.cls.kind} here, and {job.kind} in its job")
    if registered.origin.identity != job.origin.identity:
        raise StrategyError(f"'{registered.cls.name}' got another revision while the run was under way; run it again")
    return fill(registered.cls, job.cell.strategy.params, f"strategy '{registered.cls.name}'")


def weights_file(network: Network, initial: str, outcome: Mapping[str, float]) -> bytes:
    """Return a file of a trained network's weights, which says what it began with and how its training came out."""
    state = {name: value.cpu().contiguous() for name, value in network.module.state_dict().items()}
    return save(state, {TRAINING: json.dumps({"initial": initial, "outcome": dict(outcome)}, sort_keys=True)})


def load_trained(network: Network, path: Path) -> tuple[str, dict[str, float]]:
    """Put the weights of a file into the network; return what it began with, and how its training came out.

    Raises:
        NotReadyError: the file is missing or torn, or holds another network.
        UserError: it says nothing of a training.
    """
    _put(network, path, (), "trained network")
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if TRAINING not in metadata:
        what = f"the trained weights of this cell say nothing of their training ({path.name})"
        raise UserError(what, next_step="remove the file and run again: they are made anew")
    training = json.loads(metadata[TRAINING])
    return training["initial"], training["outcome"]


def _put(network: Network, path: Path, fresh: tuple[str, ...], label: str) -> bytes:
    """Put the weights of a file into the network, but for those whose names begin so; return its content.

    `label` is what an error calls them.

    Raises:
        NotReadyError: the file is missing, torn, or holds the weights of another network.
    """
    again = "the same command makes it and goes on"
    try:
        content = path.read_bytes()
        state = {k: v for k, v in load(content).items() if not k.startswith(fresh)}
    except (OSError, SafetensorError) as error:
        what = f"the {label} of this cell is torn, or the cell that makes it did not succeed ({path.name})"
        raise NotReadyError(what, next_step=again) from error
    shapes = {name: value.shape for name, value in network.module.state_dict().items() if not name.startswith(fresh)}
    if shapes != {name: value.shape for name, value in state.items()}:
        raise NotReadyError(f"the {label} of this cell is another network's ({path.name})", next_step=again)
    network.module.load_state_dict(state, strict=False)
    return content


def _actor(cell: Cell, strategy: Strategy, network: Network, task: Task) -> Actor | None:
    """Return what acts on the network, or None for a strategy that spends no budget.

    What it learns becomes a part of the network: it is trained, moved, kept and loaded as the network's own weights.
    """
    if not strategy.budgeted:
        return None
    if strategy.trains_only and cell.where == "test":
        raise UnsupportedError(f"'{strategy.name}' acts in training only: it belongs to the tracks tuned and scratch")
    if strategy.trained and (cell.where == "test" or not task.trains):
        raise UnsupportedError(
            f"'{strategy.name}' must be trained with the network, and here it acts in the test only: it belongs to the "
            "tracks tuned and scratch"
        )
    stream = seeds.seed_of("strategy", cell.task.name, cell.n_train, cell.repetition)
    actor = Actor(strategy, cell.budget, network.cost, network.grid, stream)
    if actor.learned:
        device = next(network.module.parameters()).device
        learned = modules_of(actor).to(device)
        network.module.add_module(LEARNED, learned)
    return actor


def _augmentation(cell: Cell, recipe: Recipe, train: Split, network: Network, device: str) -> Augmentation | None:
    """Return how the training images are flipped and shifted, the same for every strategy, or None if they are not."""
    if not (recipe.flip or recipe.shift):
        return None
    assert network.grid is not None
    stream = seeds.seed_of("augment", cell.task.name, cell.n_train, cell.repetition)
    boxes = None if train.boxes is None else torch.from_numpy(np.ascontiguousarray(train.boxes)).to(device)
    return Augmentation(stream, recipe.flip, recipe.shift, boxes, network.grid)


def wants_images(actor: Actor) -> bool:
    """Say whether a strategy looks at training images before it acts."""
    return actor.strategy.fits() and actor.acts


def fit_on(cell: Prepared, actor: Actor, fitted: dict[str, Fitted]) -> str:
    """Fit an actor on training images of a cell, whose network is trained; return what a record is to say of it.

    The images are drawn from the training images alone, by seeds of the task, the number of these and the repetition.

    Args:
        cell: its images and its network.
        actor: the strategy on this network.
        fitted: what was learned before; other budgets that act in the same blocks learn the same.

    Raises:
        UserError: what the strategy did wrong, see `fit`.
        UnsupportedError: there are no training images.
    """
    strategy, train, spec = actor.strategy, cell.train, cell.cell
    if not len(train.labels):
        raise UnsupportedError(f"'{strategy.name}' looks at training images before the test, and there are none here")
    dims = spec.task.name, spec.n_train, spec.repetition
    order = seeds.generator("fit", *dims).permutation(len(train.labels))
    rows = torch.from_numpy(order[: strategy.fit_images]).sort().values.to(train.labels.device)
    known = spec.model_dump(mode="json", include={"task", "model", "strategy", "n_train", "repetition", "precision"})
    key = digest([known, list(actor.keep), state_digest(cell.network.module.state_dict())])
    if key in fitted:
        modules_of(actor).load_state_dict(fitted[key][0])
    else:
        images = Images(train.take(rows), rows, train.labels[rows] if strategy.fit_labels else None)
        seed = seeds.seed_of("fit", *dims, strategy.name)
        fitted[key] = fit(cell.network, actor, images, cell.recipe, seed, train.relevance)
    learned, count = fitted[key]
    return f"{len(rows)} training images, {count} shown to the network, learned {state_digest(learned)[:16]}"
