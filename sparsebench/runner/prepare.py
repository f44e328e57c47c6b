"""Preparing a cell: its data, network and strategy, on the device."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from sparsebench import seeds
from sparsebench.errors import NotReadyError, StrategyError, UnsupportedError, UserError, is_out_of_memory
from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.base import HEADS, Model, Network, Start
from sparsebench.plan.jobs import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records.record import ON_TRAINED, Cell, Probe, ScheduleChoice, digest
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.features import Probed, Unavailable
from sparsebench.runner.process import OnProgress
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import AUTO, Budget
from sparsebench.strategy.spec import fill
from sparsebench.strategy.view import Images
from sparsebench.tasks.base import Data, Recipe, Split, Task, check_data
from sparsebench.training.fit import Fitted, fit, modules_of, state_digest
from sparsebench.training.patches import Head
from sparsebench.training.schedules import MANY, choose
from sparsebench.training.steps import Augmentation, Samples, Teacher

MOST = 2**26
"""Most bytes of data that are kept for the next cell. Test data of the suites quick and embedded take up to a fifth."""
SHARE = 0.5
"""The share of a device's free memory that the images of one split may take."""
TRAINING = "training"
"""The key of a weight file's metadata that describes the training."""


class Context:
    """The state of a process that runs cells: the environment, and data that several cells use.

    Args:
        environment: the environment of the run, with the device of this process.
        alone: whether this is a worker process: Ctrl-C does not reach it, so a KeyboardInterrupt is a strategy's.
        on_progress: called with each cell that begins, and every second with the share of its training that is done,
            see `OnProgress`. If the training may end early there is no share; if nothing is trained, it is the share of
            the test.

    Attributes:
        trusted: strategies, with task and model, that passed the check for leaks.
        fitted: results of `Strategy.fit`, by the hash of all that they depend on.
        features: the features of the last probe, or why there are none.
        heads: heads that predict patches, learned without a strategy, by the hash of all that they depend on.
    """

    def __init__(
        self, environment: RunEnvironment, alone: bool = False, on_progress: OnProgress = lambda cells, share: None
    ):
        self.environment, self.alone, self.on_progress = environment, alone, on_progress
        self.trusted: set[tuple[str, ...]] = set()
        self.fitted: dict[str, Fitted] = {}
        self.features: Probed | Unavailable | None = None
        self.heads = dict[str, Head]()
        self._draw = ""
        self._data: Data | None = None
        self._images: dict[str, torch.Tensor] = {}

    def draw(self, task: Task, cell: Cell) -> Data:
        """Return a copy of a cell's data. The last drawn data are kept, for the next cell with the same data.

        Drawing takes up to a quarter of the time of a short cell on tokens, and a twentieth of the time of a test on
        pictures. Data mapped from a file are not kept, as a copy would read the whole file. torch's generator is seeded
        too, so a task that draws from it also gives equal cells equal data.
        """
        if self._data is not None and self._draw == cell.draw:
            return copy.deepcopy(self._data)
        self._data = None  # frees memory before the next draw
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.seed_of("draw", cell.draw))
            data = task.draw(cell.drawn, cell.repetition, self.environment.locations)
        splits = [split for split in (data.train, data.test, data.validation) if split is not None]
        arrays = [value for part in (data, *splits) for value in vars(part).values() if isinstance(value, np.ndarray)]
        if any(isinstance(array, np.memmap) for array in arrays) or sum(array.nbytes for array in arrays) > MOST:
            return data
        self._draw, self._data = cell.draw, data
        return copy.deepcopy(data)

    def samples(self, split: Split, grid: tuple[int, int] | None, augmentation: Augmentation | None = None) -> Samples:
        """Return a split as tensors on the device. Images that do not fit there are moved batch by batch.

        Images that are the whole content of a mapped file stay on a GPU for the next cell, as files of pixels never
        change. On a CPU images are not copied: they are the pages of the file.
        """
        device, inputs = self.environment.device, split.inputs
        file = _mapped_file(inputs)
        if file in self._images:
            tensor = self._images[file]
        else:
            tensor = torch.from_numpy(np.ascontiguousarray(inputs))
            if self._make_room(inputs):
                tensor = tensor.to(device)
                if file:
                    self._images[file] = tensor
        labels = torch.from_numpy(np.ascontiguousarray(split.labels)).to(device)
        relevance = split.relevance_on(grid)
        mask = None if relevance is None else torch.from_numpy(np.ascontiguousarray(relevance)).to(device)
        return Samples(tensor, labels, mask, augmentation)

    def _make_room(self, inputs: np.ndarray) -> bool:
        """Return whether inputs fit on the device. Images of earlier cells are dropped if this is needed.

        On a CPU the answer for images is no: they stay in the pages of their file, and none are kept.
        """
        is_images = inputs.ndim == 4
        if not is_images:  # tokens are small
            return True
        if inputs.nbytes > room(self.environment.device):
            self._images.clear()
        return inputs.nbytes <= room(self.environment.device)


def _mapped_file(array: np.ndarray) -> str:
    """Return the file whose whole content an array maps; "" if there is none."""
    if not isinstance(array, np.memmap) or array.filename is None or not array.flags.c_contiguous:
        return ""
    is_whole = os.path.getsize(array.filename) == array.offset + array.nbytes
    return str(array.filename) if is_whole else ""


def room(device: str) -> float:
    """Return the most bytes that images of a split may have to be kept on a device; 0 on a CPU."""
    if torch.device(device).type != "cuda":
        return 0.0
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return SHARE * (torch.cuda.mem_get_info(device)[0] + unused)


@dataclass(frozen=True)
class Prepared:
    """A cell that is ready to be trained.

    Attributes:
        actor: the strategy on this network, or None if the strategy has no budget.
        schedule: the choice of its schedule, or None if the budget or the strategy determines it.
        train, test, validation: the splits on the device; validation may be None.
        start: the trained weights that the network starts from.
        teacher: a copy of the initial network for a strategy that distils from it, otherwise None. It is also None if
            the initial output layer is not trained, as its outputs then mean nothing.
        outcome: the outcome of the training if the cell tests a network trained before, see `Training.outcome`.
    """

    cell: Cell
    task: Task
    data: Data
    network: Network
    actor: Actor | None
    schedule: ScheduleChoice | None
    train: Samples
    test: Samples
    validation: Samples | None
    start: Start
    teacher: Teacher | None
    outcome: dict[str, float] | None

    @property
    def is_trained(self) -> bool:
        """Whether the network is trained already, so that the cell only tests it."""
        trained_before = self.outcome is not None or self.cell.track in ON_TRAINED
        return trained_before or bool(self.cell.network) or not self.task.trains

    @property
    def recipe(self) -> Recipe:
        """The task's recipe."""
        return self.task.recipe()

    @property
    def order(self) -> tuple[object, ...]:
        """The dimensions that seed the order of the training samples. All strategies have the same order."""
        return "order", self.cell.task.name, self.cell.drawn, self.cell.repetition

    @property
    def in_training(self) -> Actor | None:
        """The actor in training, if any."""
        return None if self.cell.where == "test" else self.actor

    @property
    def in_test(self) -> Actor | None:
        """The actor in the test, if any."""
        return None if self.cell.where == "train" else self.actor


def prepare(job: Job, registry: Registry, context: Context, *, head: bool = True) -> Prepared:
    """Draw the data of a job's cell and build its network.

    Args:
        job, registry, context: the job, the plugins, and the state of the process.
        head: whether the network has an output layer for the classes of the data. Without one, its outputs are the
            pooled features.

    Raises:
        StrategyError, UnsupportedError, UserError: the cell cannot be run.
    """
    cell = job.cell
    strategy = strategy_of(job, registry)
    _, task, model = registry.resolve(cell)
    registry.check_revision(task, cell.task)
    registry.check_revision(model, cell.model)
    model = model.located(context.environment.locations)

    data = _data(task, cell, context)
    network = model.build(data if head else replace(data, classes=()), cell.repetition)
    start, outcome = _load_start(job, network, task, model, data, context)
    if cell.probe is not None:
        _prepare_for_probe(cell.probe, network, strategy)
    network.module.to(context.environment.device)

    train, test, validation = _splits(cell, task, data, network, context)
    teacher = _teacher_of(network, strategy) if strategy.distils and start.head else None
    budget, choice = cell.budget, None
    if budget.schedule == AUTO:
        budget, choice = choose_schedule(cell, strategy, network, train, task, context, head=head)
    actor = _actor(cell, strategy, budget, network, task)
    return Prepared(cell, task, data, network, actor, choice, train, test, validation, start, teacher, outcome)


def _load_start(
    job: Job, network: Network, task: Task, model: Model, data: Data, context: Context
) -> tuple[Start, dict[str, float] | None]:
    """Load the weights that a cell starts from into its network.

    Returns:
        The start, and the outcome of the training if the job tests a network that another cell trained.

    Raises:
        NotReadyError: weights of another cell are missing or damaged.
        UserError: trained weights do not fit the task.
    """
    cell = job.cell
    if job.network:
        initial, outcome = load_trained(network, context.environment.weights(job.network))
        return Start(initial), outcome
    if cell.init is None:
        start = model.start(network, task, context.environment.locations)
        if cell.network and not start.head:
            raise UserError(
                f"the trained weights have no head for the {len(data.classes)} classes of task '{task.name}'"
            )
        return start, None
    same_task = cell.track == "tuned" or cell.init.task == cell.task
    fresh = () if same_task else HEADS  # the head of another task is not used (Li et al. 2023)
    content = _load_file(network, context.environment.weights(cell.init.id), fresh, "first network")
    return Start(hashlib.sha256(content).hexdigest(), head=same_task), None


def _prepare_for_probe(probe: Probe, network: Network, strategy: Strategy) -> None:
    """Make features the outputs of a network.

    Raises:
        UnsupportedError: the network gives no features, or the strategy reads labels or the outputs of a head.
    """
    if strategy.fits() and strategy.fit_labels:
        raise UnsupportedError(
            f"'{strategy.name}' learns from labels of training images, which a probe with few labels would not count"
        )
    if "outputs" in strategy.reads():
        raise UnsupportedError(f"'{strategy.name}' reads the outputs of a head, and a probe has features alone")
    drop_head = getattr(network, "drop_head", None)
    if drop_head is None:
        raise UnsupportedError("this model does not give the features that a probe needs: drop_head is missing")
    # If patches are predicted, what compares outputs, such as the choice of a schedule, compares what the model pools.
    drop_head("model" if probe.pooling == "none" else probe.pooling)


def _splits(
    cell: Cell, task: Task, data: Data, network: Network, context: Context
) -> tuple[Samples, Samples, Samples | None]:
    """Return training, test and validation data on the device; without labels for a cell with a probe."""
    device = context.environment.device
    augmentation = _augmentation(cell, task.recipe(), data.train, network, device)
    train = context.samples(data.train, network.grid, augmentation)
    test = context.samples(data.test, network.grid)
    test.absent = _absent_classes(data, device)
    validation = None if data.validation is None else context.samples(data.validation, network.grid)
    if cell.probe is not None:  # nothing that acts needs labels: only the probe itself learns them, from `data`
        train.labels = torch.zeros_like(train.labels)
        test.labels = torch.zeros_like(test.labels)
    return train, test, validation


def _absent_classes(data: Data, device: str) -> torch.Tensor | None:
    """Return (classes,) booleans, the classes that a test may not predict; None for none."""
    if data.among is None:
        return None
    absent = torch.ones(len(data.classes), dtype=torch.bool, device=device)
    absent[torch.from_numpy(data.among).to(device)] = False
    return absent


def _teacher_of(network: Network, strategy: Strategy) -> Any:
    """Return a copy of the initial network whose outputs a strategy learns from.

    Raises:
        UnsupportedError: the network does not give its outputs to strategies.
    """
    if not hasattr(network, "tell"):
        raise UnsupportedError(
            f"'{strategy.name}' needs the dense network's outputs, which this model does not provide: it must have "
            "tell(inputs), ModelOutputs without gradients"
        )
    teacher = copy.deepcopy(network)
    teacher.module.eval().requires_grad_(False)
    return teacher


def choose_schedule(
    cell: Cell,
    strategy: Strategy,
    network: Network,
    train: Samples,
    task: Task,
    context: Context,
    *,
    head: bool = True,
) -> tuple[Budget, ScheduleChoice]:
    """Choose the schedule of a strategy on training images, or on those of `Task.schedule_images`.

    The images and the strategy's random numbers are drawn for this purpose, independently of the test. `head` is as in
    `prepare`.

    Raises:
        UnsupportedError: there are no training images.
    """
    samples, source = train, "training images"
    separate = task.schedule_images(MANY, cell.repetition, context.environment.locations)
    if separate is not None:
        split, source = separate
        samples = context.samples(split, network.grid)
    if not len(samples.labels):
        raise UnsupportedError(
            f"the schedule of '{strategy.name}' is chosen on training images, and there are none here: state the "
            "schedule instead of schedule=auto"
        )
    dimensions = "schedule", cell.task.name, cell.drawn, cell.repetition
    order = seeds.generator(*dimensions).permutation(len(samples.labels))[:MANY]
    rows = torch.from_numpy(order).to(samples.labels.device)
    chosen = choose(
        network,
        strategy,
        cell.budget,
        samples,
        rows,
        stream=seeds.seed_of(*dimensions, strategy.name),
        classifies=head and cell.probe is None and task.recipe().loss == "cross-entropy",
        source=source,
    )
    return chosen.budget, chosen.choice


def _data(task: Task, cell: Cell, context: Context) -> Data:
    """Draw the data, and split off validation data if the recipe asks for it and the task draws none."""
    data = context.draw(task, cell)
    recipe = task.recipe()
    check_data(task, data)
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
        PluginError: the strategy does not load any more.
        StrategyError: its kind or revision differs from the job's.
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
    """Return the content of a safetensors file with a network's weights, and its start and outcome as metadata."""
    state = {name: value.cpu().contiguous() for name, value in network.module.state_dict().items()}
    return save(state, {TRAINING: json.dumps({"initial": initial, "outcome": dict(outcome)}, sort_keys=True)})


def load_trained(network: Network, path: Path) -> tuple[str, dict[str, float]]:
    """Load the weights of a file into the network; return the name of the start and the outcome of the training.

    Raises:
        NotReadyError: the file is missing or damaged, or holds the weights of another network.
        UserError: the metadata of the file do not describe a training.
    """
    _load_file(network, path, (), "trained network")
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
    if TRAINING not in metadata:
        what = f"the trained weights of this cell say nothing of their training ({path.name})"
        raise UserError(what, next_step="remove the file and run again: they are made anew")
    training = json.loads(metadata[TRAINING])
    return training["initial"], training["outcome"]


def _load_file(network: Network, path: Path, fresh: tuple[str, ...], label: str) -> bytes:
    """Load the weights of a file into the network, except those with prefixes `fresh`; return the content of the file.

    Raises:
        NotReadyError: the file is missing or damaged, or holds the weights of another network.
    """
    again = "the same command makes it and goes on"
    try:
        content = path.read_bytes()
        state = {name: value for name, value in load(content).items() if not name.startswith(fresh)}
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise MemoryError(f"{path.name} does not fit the memory") from error
        what = f"the {label} of this cell is torn, or the cell that makes it did not succeed ({path.name})"
        raise NotReadyError(what, next_step=again) from error
    shapes = {name: value.shape for name, value in network.module.state_dict().items() if not name.startswith(fresh)}
    if shapes != {name: value.shape for name, value in state.items()}:
        raise NotReadyError(f"the {label} of this cell is another network's ({path.name})", next_step=again)
    network.module.load_state_dict(state, strict=False)  # names were compared above; fresh weights stay as they are
    return content


def _actor(cell: Cell, strategy: Strategy, budget: Budget, network: Network, task: Task) -> Actor | None:
    """Return the actor of a strategy with its budget on the network, or None if the strategy has no budget.

    The strategy's modules become a part of the network: they are trained, moved, stored and loaded with its weights.
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
    stream = seeds.seed_of("strategy", cell.task.name, cell.drawn, cell.repetition)
    actor = Actor(strategy, budget, network.cost, network.grid, stream)
    if actor.learned:
        device = next(network.module.parameters()).device
        network.module.add_module(LEARNED, modules_of(actor).to(device))
    return actor


def _augmentation(cell: Cell, recipe: Recipe, train: Split, network: Network, device: str) -> Augmentation | None:
    """Return the augmentation of the training images, or None. All strategies have the same flips and shifts."""
    if not (recipe.flip or recipe.shift):
        return None
    assert network.grid is not None
    stream = seeds.seed_of("augment", cell.task.name, cell.drawn, cell.repetition)
    boxes = None if train.boxes is None else torch.from_numpy(np.ascontiguousarray(train.boxes)).to(device)
    return Augmentation(stream, recipe.flip, recipe.shift, boxes, network.grid)


def wants_images(actor: Actor) -> bool:
    """Return whether a strategy acts and fits on training images first."""
    return actor.strategy.fits() and actor.acts


def fit_on(prepared: Prepared, actor: Actor, fitted: dict[str, Fitted]) -> str:
    """Fit an actor on training images of a cell whose network is trained; return the note for the record.

    The images are drawn from the training images only, seeded by task, number of training samples and repetition.

    Args:
        prepared: the cell.
        actor: the strategy on the cell's network.
        fitted: results of earlier fits, which this extends. Budgets that act in the same blocks share a result.

    Raises:
        UserError: the strategy's `fit` failed, see `training.fit.fit`.
        UnsupportedError: there are no training images.
    """
    strategy, train, cell = actor.strategy, prepared.train, prepared.cell
    if not len(train.labels):
        raise UnsupportedError(f"'{strategy.name}' looks at training images before the test, and there are none here")
    dimensions = cell.task.name, cell.drawn, cell.repetition
    order = seeds.generator("fit", *dimensions).permutation(len(train.labels))
    rows = torch.from_numpy(order[: strategy.fit_images]).sort().values.to(train.labels.device)
    # The images of a probe are drawn from its pool, whatever n_train is.
    determines = {"task", "model", "strategy", "n_train", "repetition", "precision", "probe"}
    identity = cell.model_dump(mode="json", include=determines)
    key = digest([identity, list(actor.keep), state_digest(prepared.network.module.state_dict())])
    if key in fitted:
        modules_of(actor).load_state_dict(fitted[key][0])
    else:
        images = Images(train.take(rows), rows, train.labels[rows] if strategy.fit_labels else None)
        seed = seeds.seed_of("fit", *dimensions, strategy.name)
        fitted[key] = fit(prepared.network, actor, images, prepared.recipe, seed, train.relevance)
    learned, count = fitted[key]
    return f"{len(rows)} training images, {count} shown to the network, learned {state_digest(learned)[:16]}"
