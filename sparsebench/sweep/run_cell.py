"""From jobs to records: prepare each cell, train it, test it, measure."""

from __future__ import annotations

import hashlib
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

from sparsebench import __version__, seeds
from sparsebench.errors import DivergedError, StrategyError, UnsupportedError, UserError
from sparsebench.measure import groups, selection
from sparsebench.measure.spuriosity import token_spuriosity
from sparsebench.models.acting import Actor
from sparsebench.models.base import Network, Watchable
from sparsebench.models.shallow import ShallowViT
from sparsebench.models.two_layer import TwoLayerViT
from sparsebench.plugin.registry import Registry
from sparsebench.sweep import environment, store
from sparsebench.sweep.checkpoint import Checkpoint
from sparsebench.sweep.job import Job
from sparsebench.sweep.prepare import Context, Prepared, prepare
from sparsebench.sweep.record import Failure, Metric, Outcomes, Record, Status, TokenStep, pack
from sparsebench.tasks.base import Data, Mask, Task, relevant
from sparsebench.tasks.pictures import PictureTask
from sparsebench.training.discard import influences
from sparsebench.training.early import EarlyStopping
from sparsebench.training.evaluate import Evaluation, evaluate, first_batch, seconds_per_batch
from sparsebench.training.loop import Course, Training, steps_for
from sparsebench.training.state import can_be_resumed
from sparsebench.training.steps import Autograd, Samples
from sparsebench.training.trials import Trial, fits, train_together
from sparsebench.training.watch import Watch

SELECTION = ("selection_precision", "selection_recall", "selection_auroc")


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


def failure_of(error: BaseException) -> Failure:
    """Return what a record says of an error."""
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
        self.status, self.failure = _status(error), failure_of(error)

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
        course = Course(len(cell.train.labels), cell.recipe, cell.order)
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
        training = Training(steps, Course(len(cell.train.labels), cell.recipe, cell.order), _early(cell))
        checkpoint = self._checkpoint(training)
        if checkpoint is not None:
            checkpoint.resume()
        self.trained = training.run(on_step=watch or checkpoint)
        if checkpoint is not None and checkpoint.resumed:
            self.result.notes["resumed"] = str(checkpoint.resumed)
        if isinstance(steps, Autograd) and steps.parts > cell.recipe.accumulate:
            self.result.notes["memory"] = f"batches in {steps.parts} parts: the memory holds no larger ones"
        if watch is not None:
            _add_watched(self.result, watch, int(self.trained["steps"]), cell.task)

    def _checkpoint(self, training: Training) -> Checkpoint | None:
        """Return the cell's checkpoint, or None: what was seen while training is in none."""
        every, job = self.context.checkpoint, self.job
        if not every or training.course.recipe.watch or not can_be_resumed(training):
            return None
        made_by = {
            "cell": job.cell.id, "source of the strategy": job.origin.sha256, "torch": torch.__version__,
            "device": torch.device(self.context.device).type, "sparsebench": __version__,
        }  # fmt: skip
        return Checkpoint(store.checkpoint_path(self.context.out, job.cell.id), made_by, every, training)

    def measure(self) -> None:
        """Test it and fill the result; keep the weights if others start from them."""
        assert self.cell is not None and self.trained is not None
        _measure(self.result, self.cell, self.trained)
        if self.job.keep_weights:
            state = self.cell.network.module.state_dict()
            weights = {name: value.cpu().contiguous() for name, value in state.items()}
            content = save(weights)
            store.write_whole(store.weights_path(self.context.out, self.job.cell.id), content)
            self.result.notes["weights"] = hashlib.sha256(content).hexdigest()

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


def _early(cell: Prepared) -> EarlyStopping | None:
    """Return what ends the cell's training early, if anything does."""
    if not cell.recipe.patience:
        return None
    assert cell.validation is not None and cell.data.validation is not None
    return EarlyStopping(cell.network, cell.in_test, cell.validation, cell.data.validation.groups, cell.recipe)


def _device_name(device: str) -> str:
    return device if device == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


class _Result:
    """What is filled in while a cell runs."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.trajectory: tuple[TokenStep, ...] = ()
        self.samples: dict[str, tuple[float | None, ...]] = {}
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
    _add_training(result, trained, len(cell.train.labels))
    _add_validation(result, cell)
    _add_outcomes(result, cell.task, cell.data, evaluation)
    _add_selection(result, evaluation, cell.test, cell.data.test.mask, network.cost.depth)
    if isinstance(cell.task, PictureTask) and cell.task.spuriosity and cell.test.relevance is not None:
        _add_spuriosity(result, network, cell.in_test, cell.test, cell.test.relevance[: cell.task.spuriosity])
    _add_cost(result, network, actor, evaluation)
    if cell.task.inputs == "images":
        _add_timing(result, network, cell.in_test, cell.test, evaluation.batch)
    if (first := first_batch(network, cell.test)) > evaluation.batch:
        result.notes["test_batch"] = f"{evaluation.batch}; the device had no memory for {first}"
    if 0 < (n := len(cell.train.labels)) < recipe.batch:
        result.notes["batch"] = f"all {n} samples; the task's batch of {recipe.batch} is larger"
    if cell.initial:
        result.notes["initial_weights"] = cell.initial
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
    units = {"train_loss": "loss", "fitted": "0 or 1", "kept_epoch": "epochs"}
    for name, value in trained.items():
        result.add(name, value, units.get(name, name), n)


def _add_validation(result: _Result, cell: Prepared) -> None:
    """Add the validation accuracy of the weights that are tested."""
    split = cell.data.validation
    if split is None or cell.validation is None:
        return
    correct = evaluate(cell.network, cell.in_test, cell.validation, cell.recipe).predicted == split.labels
    result.add_share("validation_accuracy", correct)
    if len(cell.data.group_names) > 1:
        worst = np.nanmin(groups.group_accuracies(correct, split.groups, len(cell.data.group_names)))
        result.add("validation_worst_group_accuracy", float(worst), "fraction", len(correct))


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
        sizes = np.bincount(data.train.groups, minlength=len(data.group_names))
        for number, name in enumerate(data.group_names):
            result.add_share(f"accuracy: {name}", correct[test.groups == number])
            result.add(f"train_samples: {name}", sizes[number], "samples", len(data.train.groups))
        for name, value in groups.summary(correct, test.groups, data.train.groups, len(data.group_names)).items():
            result.add(name, value, "fraction", n)
    result.outcomes = Outcomes(
        n=n, predicted=pack(evaluation.predicted), label=pack(test.labels), group=pack(test.groups)
    )


def _add_selection(result: _Result, evaluation: Evaluation, samples: Samples, mask: Mask, depth: int) -> None:
    """Add how well the tokens that matter were found: at the end, and by block where there is more than one.

    It is not measured where nobody knows which those are.
    """
    if samples.relevance is None:
        for name in SELECTION:
            result.add(name, None, "fraction", 0)
        return
    matter = relevant(samples.relevance.cpu().numpy(), mask)
    precision, recall = selection.precision_recall(evaluation.kept, matter)
    auroc = selection.auroc(evaluation.scores, matter)
    for name, value in zip(SELECTION, (precision, recall, auroc), strict=True):
        result.add(name, value, "fraction", len(matter))
    if depth == 1 or not evaluation.choices:
        return
    rows = [
        (float(choice.block), *selection.precision_recall(choice.kept, matter), selection.auroc(choice.scores, matter))
        for choice in evaluation.choices
    ]
    names = ("blocks", "precision_by_block", "recall_by_block", "auroc_by_block")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        result.samples[f"selection_{name}"] = tuple(None if np.isnan(value) else value for value in values)


def _add_spuriosity(
    result: _Result, network: Network, actor: Actor | None, samples: Samples, relevance: torch.Tensor
) -> None:
    """Add the token spuriosity indices of the first images, with the strategy and with nothing acting."""
    n, inside = len(relevance), relevance.cpu().numpy() > 0
    dense = influences(network, None, samples, n)
    acted = dense if actor is None else influences(network, actor, samples, n)
    if acted is None:
        result.notes["spuriosity"] = "not measured: tokens are fused, merged or mixed, not only removed"
    for end, z in (("", acted), ("_dense", dense)):
        indices = (None, None) if z is None else token_spuriosity(z, inside)
        for name, value in zip(("a_tsi", "m_tsi"), indices, strict=True):
            result.add(name + end, value, "ratio", n)


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
