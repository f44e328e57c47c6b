"""From a cell to its record: draw the data, build the network, train it, test it, measure."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save
from scipy.stats import binomtest

from sparsebench import seeds
from sparsebench.errors import DivergedError, StrategyError, UnsupportedError, UserError
from sparsebench.measure import groups, selection
from sparsebench.models.acting import Actor
from sparsebench.models.base import Model, Network
from sparsebench.models.shallow import ShallowViT
from sparsebench.plugin.registry import Registry
from sparsebench.plugin.spec import fill
from sparsebench.strategy import Strategy
from sparsebench.sweep import environment, store
from sparsebench.sweep.cell import Cell
from sparsebench.sweep.job import Job
from sparsebench.sweep.record import Failure, Metric, Outcomes, Record, Status, TokenStep, pack
from sparsebench.tasks.base import Data, Locations, Split, Task
from sparsebench.tasks.theory import Theory
from sparsebench.training.evaluate import Evaluation, evaluate, seconds_per_batch
from sparsebench.training.loop import steps_for, train
from sparsebench.training.steps import Samples, Steps

if TYPE_CHECKING:
    from sparsebench.training.watch import Watch

RELEVANT = 0.5
"""A patch counts as relevant when at least this share of it matters (theory tokens are 0 or 1)."""


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


def run_cell(job: Job, registry: Registry, context: Context) -> Record:
    """Return the job's record, whatever happens: what a strategy does wrong is in the record, not raised."""
    started, clock = datetime.now(UTC).isoformat(), time.perf_counter()
    result, failure = _Result(), None
    status: Status = "ok"
    try:
        torch.manual_seed(seeds.seed_of("cell", job.cell.id))
        result = _measure(job.cell, _strategy(job, registry), registry, context)
        if job.keep_weights:
            store.write_whole(store.weights_path(context.out, job.cell.id), save(result.weights))
    except (torch.OutOfMemoryError, MemoryError) as error:
        status, failure = "oom", _failure(error)
    except UnsupportedError as error:
        status, failure = "unsupported", _failure(error)
    except (StrategyError, DivergedError, UserError) as error:
        status, failure = "failed", _failure(error)
    except (Exception, SystemExit) as error:  # a strategy is a stranger's code and may raise anything
        status, failure = "failed", _failure(error)
    seconds = time.perf_counter() - clock
    if failure is not None:
        return job.record_of_failure(status, failure, started, seconds)
    return Record(
        cell=job.cell,
        cell_id=job.cell.id,
        status=status,
        metrics=result.metrics,
        trajectory=result.trajectory,
        samples=result.samples,
        outcomes=result.outcomes,
        notes=result.notes,
        origin=job.origin,
        kind=job.kind,
        label=job.label,
        environment=environment.digest(environment.describe()),
        device=_device_name(context.device),
        started=started,
        seconds=round(seconds, 3),
    )


def _device_name(device: str) -> str:
    return device if device == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


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


KNOWN = (StrategyError, DivergedError, UnsupportedError, UserError)
"""Errors whose text says all; others are shown with their type and kept with their traceback."""


def _failure(error: BaseException) -> Failure:
    kind = type(error).__name__
    text = str(error) if isinstance(error, KNOWN) else f"{kind}: {error}"
    trace = "" if isinstance(error, KNOWN) else "".join(traceback.format_exception(error))[-4000:]
    return Failure(reason=" ".join(text.split())[:500], kind=kind, traceback=trace)


class _Result:
    """What is filled in while a cell runs."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.trajectory: tuple[TokenStep, ...] = ()
        self.samples: dict[str, tuple[float, ...]] = {}
        self.outcomes: Outcomes | None = None
        self.notes: dict[str, str] = {}
        self.weights: dict[str, torch.Tensor] = {}

    def add(self, name: str, value: float | None, unit: str, n: int) -> None:
        """Add one metric; NaN becomes None."""
        value = None if value is None or np.isnan(value) else float(value)
        self.metrics[name] = Metric(value=value, unit=unit, n=n)

    def add_share(self, name: str, outcomes: np.ndarray) -> None:
        """Add the share of true outcomes, with its Wilson interval over the items."""
        n, hits = len(outcomes), int(outcomes.sum())
        if n == 0:
            self.add(name, None, "fraction", 0)
            return
        low, high = binomtest(hits, n).proportion_ci(method="wilson")
        self.metrics[name] = Metric(value=hits / n, unit="fraction", n=n, low=low, high=high, method="Wilson 95 %")


def _measure(cell: Cell, strategy: Strategy, registry: Registry, context: Context) -> _Result:
    task = fill(registry.task(cell.task.name), cell.task.params, f"task '{cell.task.name}'")
    model = fill(registry.model(cell.model.name), cell.model.params, f"model '{cell.model.name}'")
    data = task.draw(cell.n_train, cell.repetition, context.locations)
    network = _network(cell, model, data, context)
    actor = _actor(cell, strategy, network)
    recipe = task.recipe()
    splits = [_on_device(split, network.grid, context.device) for split in (data.train, data.test)]
    order = ("order", cell.task.name, cell.n_train, cell.repetition)
    result = _Result()
    steps = steps_for(network, actor if cell.where != "test" else None, splits[0], recipe)
    tested = actor if cell.where != "train" else None
    watch = _watch(task, steps, network, tested, splits[1])
    trained = train(steps, cell.n_train, recipe, order, on_step=watch)
    steps.store()
    if not all(bool(p.isfinite().all()) for p in network.module.parameters()):
        raise DivergedError("training diverged: the weights after the last step are not finite")
    if watch is not None:
        _add_watched(result, watch, int(trained["steps"]))
    evaluation = evaluate(network, tested, splits[1], recipe)
    if not np.isfinite(evaluation.loss):
        raise DivergedError(f"training diverged: the test loss is {evaluation.loss}")
    _add_training(result, trained, cell.n_train)
    _add_outcomes(result, task, data, evaluation)
    _add_selection(result, evaluation, splits[1])
    _add_cost(result, network, actor, evaluation)
    if task.inputs == "images":
        _add_timing(result, network, tested, splits[1])
    if actor is not None and (scoring := network.cost.scoring(actor.requires)):
        result.notes["attention"] = "received" if scoring == "received" else network.attention_source
    result.weights = {name: value.cpu().contiguous() for name, value in network.module.state_dict().items()}
    return result


def _network(cell: Cell, model: Model, data: Data, context: Context) -> Network:
    """Return the network on its device: with the initial weights of the repetition, or those of `cell.init`.

    A pre-trained start gets a fresh output layer, as in Li et al. 2023.
    """
    network = model.build(data, cell.repetition)
    if cell.init is not None:
        path = store.weights_path(context.out, cell.init.id)
        if not path.exists():
            raise UserError(f"the initial weights of this cell are missing ({path.name}): their cell did not succeed")
        state = {k: v for k, v in load_file(path).items() if not k.startswith(("head.", "head_dist."))}
        network.module.load_state_dict(state, strict=False)
    network.module.to(context.device)
    return network


def _actor(cell: Cell, strategy: Strategy, network: Network) -> Actor | None:
    """Return what acts on the network, or None for a strategy that spends no budget."""
    if not strategy.budgeted:
        return None
    stream = seeds.seed_of("strategy", cell.task.name, cell.n_train, cell.repetition)
    return Actor(strategy, cell.budget, network.cost, network.grid, stream)


def _on_device(split: Split, grid: tuple[int, int] | None, device: str) -> Samples:
    inputs, labels, relevance = (
        torch.from_numpy(np.ascontiguousarray(x)).to(device)
        for x in (split.inputs, split.labels, split.relevance_on(grid))
    )
    return Samples(inputs, labels, relevance)


def _watch(task: Task, steps: Steps, network: Network, actor: Actor | None, test: Samples) -> Watch | None:
    """Return what looks at the test split while training, if the task asks for it."""
    if not (isinstance(task, Theory) and task.watch):
        return None
    if not isinstance(network, ShallowViT):
        raise UnsupportedError("watch=... is for the shallow model: others have no attention on relevant tokens")
    from sparsebench.training.watch import Watch

    return Watch(task, steps, network, actor, test)


def _add_watched(result: _Result, watch: Watch, steps: int) -> None:
    """Add what was seen while training, to the last step."""
    watch.look(steps)
    n = len(watch.samples.labels)
    result.samples |= {
        "watched_steps": tuple(map(float, watch.at)),
        "watched_test_loss": tuple(watch.losses),
        "watched_attention": tuple(watch.masses),
    }
    result.add("attention_on_relevant", watch.masses[-1], "fraction", n)
    result.add("iterations", watch.iterations(), "steps", n)


def _add_training(result: _Result, trained: dict[str, float], n: int) -> None:
    for name, value in trained.items():
        result.add(name, value, "loss" if name == "train_loss" else name, n)


def _add_outcomes(result: _Result, task: Task, data: Data, evaluation: Evaluation) -> None:
    """Add accuracy, loss, success and group metrics, and each item's outcome."""
    test = data.test
    n, correct = len(test.labels), evaluation.predicted == test.labels
    accuracy = float(correct.mean())
    result.add_share("accuracy", correct)
    result.add("test_loss", evaluation.loss, "loss", n)
    success = task.success(evaluation.loss, accuracy)
    if success is not None:
        result.add("success", float(success), "0 or 1", 1)
    if len(data.group_names) > 1:
        for number, name in enumerate(data.group_names):
            result.add_share(f"accuracy: {name}", correct[test.groups == number])
        for name, value in groups.summary(correct, test.groups, data.train.groups, len(data.group_names)).items():
            result.add(name, value, "fraction", n)
    result.outcomes = Outcomes(
        n=n, predicted=pack(evaluation.predicted), label=pack(test.labels), group=pack(test.groups)
    )


def _add_selection(result: _Result, evaluation: Evaluation, samples: Samples) -> None:
    relevant = samples.relevance.cpu().numpy() >= RELEVANT
    precision, recall = selection.precision_recall(evaluation.kept, relevant)
    n = len(relevant)
    result.add("selection_precision", precision, "fraction", n)
    result.add("selection_recall", recall, "fraction", n)
    result.add("selection_auroc", selection.auroc(evaluation.scores, relevant), "fraction", n)


def _add_cost(result: _Result, network: Network, actor: Actor | None, evaluation: Evaluation) -> None:
    """Add the MACs of the realised trajectory, of the dense model, and of what was asked for."""
    cost, n = network.cost, len(evaluation.predicted)
    full = cost.steps("input", (), (cost.tokens,), ())
    steps = evaluation.steps or full
    result.trajectory = tuple(TokenStep(**vars(step)) for step in steps)
    dense, macs = cost.macs(full), cost.macs(steps)
    planned = dense if actor is None else cost.macs(actor.planned)
    result.add("macs", macs, "MACs", n)
    result.add("macs_dense", dense, "MACs", n)
    result.add("macs_ratio", macs / dense, "fraction", n)
    result.add("macs_ratio_planned", planned / dense, "fraction", n)


def _add_timing(result: _Result, network: Network, actor: Actor | None, samples: Samples) -> None:
    batch, seconds = seconds_per_batch(network, actor, samples)
    result.samples["seconds_per_batch"] = tuple(round(s, 6) for s in seconds)
    result.add("images_per_s", batch / float(np.median(seconds)), "images/s", len(seconds))
