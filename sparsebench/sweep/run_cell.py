"""From jobs to records: prepare each cell, train it, test it, measure."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import cast

import numpy as np
import torch
from safetensors.torch import save
from scipy.stats import binomtest

from sparsebench import seeds
from sparsebench.errors import DivergedError, StrategyError, UnsupportedError, UserError
from sparsebench.measure import groups, selection
from sparsebench.models.acting import Actor
from sparsebench.models.base import Network, Watchable
from sparsebench.models.shallow import ShallowViT
from sparsebench.models.two_layer import TwoLayerViT
from sparsebench.plugin.registry import Registry
from sparsebench.sweep import environment, store
from sparsebench.sweep.job import Job
from sparsebench.sweep.prepare import Context, Prepared, prepare
from sparsebench.sweep.record import Failure, Metric, Outcomes, Record, Status, TokenStep, pack
from sparsebench.tasks.base import Data, Task
from sparsebench.training.evaluate import Evaluation, evaluate, first_batch, seconds_per_batch
from sparsebench.training.loop import Course, steps_for, train
from sparsebench.training.steps import Samples
from sparsebench.training.trials import Trial, fits, train_together
from sparsebench.training.watch import Watch

RELEVANT = 0.5
"""A patch counts as relevant when at least this share of it matters (theory tokens are 0 or 1)."""


TOP_5_FROM = 10
"""With fewer classes it says little that the label is among the five that the network finds likeliest."""


def run_cell(job: Job, registry: Registry, context: Context) -> Record:
    """Return the job's record, whatever happens: what a strategy does wrong is in the record, not raised."""
    (record,) = run_cells([job], registry, context)
    return record


def run_cells(jobs: Sequence[Job], registry: Registry, context: Context) -> Iterator[Record]:
    """Yield the record of each job. Several that can are trained in one program on CUDA; on the CPU one by one."""
    if context.device == "cpu" or len(jobs) == 1:
        for job in jobs:
            run = _Run(job, context)
            run.attempt(partial(run.prepare, registry))
            run.attempt(run.train)
            run.attempt(run.measure)
            yield run.record(share=1)
        return
    runs = [_Run(job, context) for job in jobs]
    for run in runs:
        run.attempt(partial(run.prepare, registry))
    _train_together([run for run in runs if run.can_share()])
    for run in runs:
        if run.trained is None:
            run.attempt(run.train)
        run.attempt(run.measure)
        yield run.record(share=len(runs))


def _train_together(runs: Sequence[_Run]) -> None:
    """Train what runs in one program; each has its outcome then, or how it failed."""
    trials = [run.trial() for run in runs]
    try:
        train_together(trials)
    except Exception as error:  # all of them are in the program that failed
        for run in runs:
            run.fail(error)
        return
    for run, trial in zip(runs, trials, strict=True):
        if trial.failure is not None:
            run.fail(trial.failure)
        else:
            run.trained = trial.course.outcome()


KNOWN = (StrategyError, DivergedError, UnsupportedError, UserError)
"""Errors whose text says all; others are shown with their type and kept with their traceback."""


def _failure(error: BaseException) -> Failure:
    kind = type(error).__name__
    text = str(error) if isinstance(error, KNOWN) else f"{kind}: {error}"
    trace = "" if isinstance(error, KNOWN) else "".join(traceback.format_exception(error))[-4000:]
    return Failure(reason=" ".join(text.split())[:500], kind=kind, traceback=trace)


def _status(error: BaseException) -> Status:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    return "unsupported" if isinstance(error, UnsupportedError) else "failed"


class _Run:
    """One job on its way to a record, in stages that may fail."""

    def __init__(self, job: Job, context: Context):
        self.job, self.context = job, context
        self.started, self.clock = datetime.now(UTC).isoformat(), time.perf_counter()
        self.status: Status = "ok"
        self.failure: Failure | None = None
        self.result = _Result()
        self.cell: Prepared | None = None
        self.trained: dict[str, float] | None = None

    def attempt(self, stage: Callable[[], None]) -> None:
        """Run a stage unless one before it failed."""
        if self.failure is not None:
            return
        try:
            torch.manual_seed(seeds.seed_of("cell", self.job.cell.id))
            stage()
        except (Exception, SystemExit) as error:  # a strategy is a stranger's code and may raise anything
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note what went wrong."""
        self.status, self.failure = _status(error), _failure(error)

    def prepare(self, registry: Registry) -> None:
        """Draw the data and build the network."""
        self.cell = prepare(self.job, registry, self.context)

    def can_share(self) -> bool:
        """Say whether it can be trained in one program with others."""
        cell = self.cell
        if self.failure is not None or cell is None or cell.recipe.watch:
            return False
        return fits(cell.network, cell.in_training, cell.train, cell.recipe)

    def trial(self) -> Trial:
        """Return it as a trial among others."""
        cell = self.cell
        assert cell is not None and isinstance(cell.network, ShallowViT | TwoLayerViT)
        course = Course(cell.cell.n_train, cell.recipe, cell.order)
        return Trial(cell.network, cell.in_training, cell.train, cell.recipe, course)

    def train(self) -> None:
        """Train it alone, if its task trains at all."""
        cell = self.cell
        assert cell is not None
        if not cell.task.trains:
            self.trained = {}
            return
        steps = steps_for(cell.network, cell.in_training, cell.train, cell.recipe)
        watch = None
        if cell.recipe.watch:
            train_, test = (cell.train, cell.in_training), (cell.test, cell.in_test)
            watch = Watch(cell.recipe, steps, cell.network, train_, test)
        self.trained = train(steps, cell.cell.n_train, cell.recipe, cell.order, on_step=watch)
        steps.store()
        if watch is not None:
            _add_watched(self.result, watch, int(self.trained["steps"]), cell.task)

    def measure(self) -> None:
        """Test it and fill the result; keep the weights if others start from them."""
        assert self.cell is not None and self.trained is not None
        _measure(self.result, self.cell, self.trained)
        if self.job.keep_weights:
            state = self.cell.network.module.state_dict()
            weights = {name: value.cpu().contiguous() for name, value in state.items()}
            store.write_whole(store.weights_path(self.context.out, self.job.cell.id), save(weights))

    def record(self, share: int) -> Record:
        """Return the record; `share` runs divide the time between them."""
        self.cell = None  # its memory
        seconds = (time.perf_counter() - self.clock) / share
        if self.failure is not None:
            return self.job.record_of_failure(self.status, self.failure, self.started, seconds)
        job, result = self.job, self.result
        return Record(
            cell=job.cell, cell_id=job.cell.id, status=self.status, metrics=result.metrics,
            trajectory=result.trajectory, samples=result.samples, outcomes=result.outcomes, notes=result.notes,
            origin=job.origin, kind=job.kind, label=job.label,
            environment=environment.digest(environment.describe()), device=_device_name(self.context.device),
            started=self.started, seconds=round(seconds, 3),
        )  # fmt: skip


def _device_name(device: str) -> str:
    return device if device == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


class _Result:
    """What is filled in while a cell runs."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.trajectory: tuple[TokenStep, ...] = ()
        self.samples: dict[str, tuple[float, ...]] = {}
        self.outcomes: Outcomes | None = None
        self.notes: dict[str, str] = {}

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


def _measure(result: _Result, cell: Prepared, trained: dict[str, float]) -> None:
    """Add all that is measured on the trained network.

    Raises:
        DivergedError: its weights or its test loss are not finite.
    """
    network, actor, recipe = cell.network, cell.actor, cell.recipe
    if not all(bool(p.isfinite().all()) for p in network.module.parameters()):
        raise DivergedError("training diverged: the weights after the last step are not finite")
    evaluation = evaluate(network, cell.in_test, cell.test, recipe)
    if not np.isfinite(evaluation.loss):
        raise DivergedError(f"training diverged: the test loss is {evaluation.loss}")
    _add_training(result, trained, cell.cell.n_train)
    _add_outcomes(result, cell.task, cell.data, evaluation)
    if cell.test.relevance is not None:
        _add_selection(result, evaluation, cell.test.relevance)
    _add_cost(result, network, actor, evaluation)
    if cell.task.inputs == "images":
        _add_timing(result, network, cell.in_test, cell.test, evaluation.batch)
    if cell.weights:
        result.notes["weights"] = cell.weights
    if (first := first_batch(network, cell.test)) > evaluation.batch:
        result.notes["test_batch"] = f"{evaluation.batch}; the device had no memory for {first}"
    if 0 < cell.cell.n_train < recipe.batch:
        result.notes["batch"] = f"all {cell.cell.n_train} samples; the task's batch of {recipe.batch} is larger"
    if actor is not None and (scoring := network.cost.scoring(actor.requires)):
        result.notes["attention"] = "received" if scoring == "received" else network.attention_source


def _add_watched(result: _Result, watch: Watch, steps: int, task: Task) -> None:
    """Add what was seen while training, to the last step."""
    watch.look(steps)
    n = len(watch.test[0].labels)
    result.samples["watched_steps"] = tuple(map(float, watch.at))
    result.samples |= {f"watched_{name}": tuple(values) for name, values in watch.seen.items()}
    result.samples |= {f"trained_{name}": values for name, values in watch.portrait().items()}
    for name, unit in cast(Watchable, watch.network).shows.items():
        result.add(name, watch.seen[name][-1], unit, n)
    result.add("iterations", watch.iterations(task.success), "steps", n)


def _add_training(result: _Result, trained: dict[str, float], n: int) -> None:
    units = {"train_loss": "loss", "fitted": "0 or 1"}
    for name, value in trained.items():
        result.add(name, value, units.get(name, name), n)


def _add_outcomes(result: _Result, task: Task, data: Data, evaluation: Evaluation) -> None:
    """Add accuracy, loss, success and group metrics, and each item's outcome."""
    test = data.test
    n, correct = len(test.labels), evaluation.predicted == test.labels
    accuracy = float(correct.mean())
    result.add_share("accuracy", correct)
    if len(data.classes) >= TOP_5_FROM:
        result.add_share("accuracy_top5", evaluation.rank < 5)
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


def _add_selection(result: _Result, evaluation: Evaluation, relevance: torch.Tensor) -> None:
    relevant = relevance.cpu().numpy() >= RELEVANT
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


def _add_timing(result: _Result, network: Network, actor: Actor | None, samples: Samples, batch: int) -> None:
    batch, seconds = seconds_per_batch(network, actor, samples, batch)
    result.samples["seconds_per_batch"] = tuple(round(s, 6) for s in seconds)
    result.add("images_per_s", batch / float(np.median(seconds)), "images/s", len(seconds))
