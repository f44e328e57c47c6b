"""Running cells in one process: prepare, train and test each cell, and return its record."""

from __future__ import annotations

import copy
import faulthandler
import hashlib
import logging
import os
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsebench import files, seeds
from sparsebench.errors import (
    DivergedError,
    NotReadyError,
    StrategyError,
    UnsupportedError,
    UserError,
    is_out_of_memory,
    last_line,
    one_line,
    shortage,
    text_of,
)
from sparsebench.measure.cost import Step
from sparsebench.measure.metrics import Items, Metric, decider_of, group_accuracies, scores, share
from sparsebench.measure.patches import IGNORE, Overlap, on_boundary, patch_labels, scores_of_patches
from sparsebench.measure.selection import quality, token_spuriosity
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.plan.jobs import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import (
    Cell,
    Failure,
    Outcomes,
    Probe,
    Record,
    ScheduleChoice,
    Status,
    bytes_of,
    digest,
)
from sparsebench.runner.devices import machine, turn
from sparsebench.runner.environment import RunEnvironment
from sparsebench.runner.features import Probed, Shared, Unavailable, features_at, path_of, rounded
from sparsebench.runner.prepare import Context, Prepared, fit_on, prepare, wants_images, weights_file
from sparsebench.runner.process import Line, Message, forget_peak, peak
from sparsebench.strategy.base import Strategy, place_of
from sparsebench.tasks.base import Data, Split, Task, check_items, relevant
from sparsebench.tasks.images import PictureTask
from sparsebench.tasks.patches import Patches
from sparsebench.training.evaluation import (
    Evaluation,
    Features,
    Passes,
    check_leaks,
    evaluate,
    features,
    first_batch,
    influences,
    seconds_per_batch,
)
from sparsebench.training.fit import calibrate
from sparsebench.training.loop import Checkpoint, EarlyStopping, Training, Watch
from sparsebench.training.patches import Head, chosen_patches, learn_head, predict, read_patches, some
from sparsebench.training.probes import linear_probe, neighbours, rows_of_probe
from sparsebench.training.steps import Autograd, Samples, Steps

REPORT_INTERVAL = 1.0
"""Seconds between two reports of progress."""
STATUSES: dict[type[BaseException], Status] = {
    torch.OutOfMemoryError: "oom",
    NotReadyError: "skipped",
    UnsupportedError: "unsupported",
}
"""Statuses of cells by their exception. After other exceptions it is "oom" if memory is short, else "failed"."""
PERMANENT = ("failed", "unsupported")
"""Statuses of cells that end in the same way if they are tried again."""
KNOWN = (StrategyError, DivergedError, UnsupportedError, UserError)
"""Exceptions whose message is sufficient. Others are stored with their type and traceback."""
FEWEST_TIMED = 4
"""Fewest batches of a test whose median time is used. If the test has fewer, one batch is timed repeatedly."""
BATCHES_OF_PROBE, FEWEST_OF_PROBE = 16, 1
"""Fewest batches of a probe's images on a CPU, so that some can be timed although each image passes once; and the
fewest timed batches."""
LOWEST_LOG = -100.0
"""The lowest logarithm of a probability in the loss of a probe."""
MISPLANNED = 0.02
"""A record notes a larger relative difference of actual and planned MACs if the token counts are as planned."""
MOST_PICTURES = 2**16
"""Number of pictures that a record can tell apart. If there are more, some share a number, and intervals over pictures
count these as one."""
SELECTION = ("selection_precision", "selection_recall", "selection_auroc")
log = logging.getLogger(__name__)


class Result:
    """The results of a cell, filled while it runs. The attributes are fields of its record."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self.trajectory: tuple[Step, ...] = ()
        self.schedule: ScheduleChoice | None = None
        self.samples: dict[str, tuple[float | None, ...]] = {}
        self.outcomes: Outcomes | None = None
        self.notes: dict[str, str] = {}

    def add(self, name: str, value: float | None, n: int, unit: str = "") -> None:
        """Add one metric, see `Metric.of`."""
        self.metrics[name] = Metric.of(name, value, n, unit)


Trained = tuple[Prepared, dict[str, float] | DivergedError, float]
"""A cell trained together with others, its outcome or error, and its share of the seconds."""


def run_cells(jobs: Sequence[Job], registry: Registry, context: Context) -> Iterator[Record]:
    """Yield the record of each job. Errors of a strategy are not raised but are in the record.

    On CUDA, jobs that support it are trained together in one program; on the CPU jobs run one by one. With
    `exclusive`, wait first until no other cell uses the device.
    """
    device, exclusive = context.environment.device, context.environment.execution.exclusive
    # The callback restarts the clock of the time limit, so waiting does not count.
    with turn(device, lambda: context.on_progress((), 0.0)) if exclusive else nullcontext():
        several = len(jobs) > 1 and device != "cpu" and not jobs[0].features
        together = _train_together(jobs, registry, context) if several else {}
        for job in jobs:
            yield _run_cell(job, registry, context, together.pop(job.cell.id, None))


def _train_together(jobs: Sequence[Job], registry: Registry, context: Context) -> dict[str, Trained]:
    """Train the jobs that can be trained in one program. Jobs that fail first or must be trained alone are left out."""
    begun = time.perf_counter()
    device = context.environment.device
    ready: dict[str, Prepared] = {}
    by_trainer = defaultdict[Any, list[tuple[str, Training]]](list)
    for job in jobs:
        context.on_progress([job.cell.id], 0.0)
        with suppress(Exception, SystemExit):  # the job is then tried alone, and its record has the error
            _seed(job, device)
            prepared = prepare(job, registry, context)
            trainer = getattr(prepared.network, "train_together", None)
            if trainer is not None and not prepared.recipe.watch:
                training = Training(
                    prepared.network, prepared.in_training, prepared.train, prepared.recipe, prepared.order
                )
                ready[job.cell.id] = prepared
                by_trainer[trainer].append((job.cell.id, training))
    context.on_progress(list(ready), 0.0)

    outcomes: dict[str, dict[str, float] | DivergedError] = {}
    for train_together, pairs in by_trainer.items():
        train_together([training for _, training in pairs])
        for cell_id, training in pairs:
            outcome = _outcome_of(training)
            if outcome is not None:
                outcomes[cell_id] = outcome
    if context.alone:
        torch.cuda.synchronize(device)  # raises if the device is lost: the worker ends, and cells are tried alone
    seconds_each = (time.perf_counter() - begun) / len(jobs)
    return {cell_id: (ready[cell_id], outcome, seconds_each) for cell_id, outcome in outcomes.items()}


def _outcome_of(training: Training) -> dict[str, float] | DivergedError | None:
    """Return the outcome of a training beside others, or its error if it diverged; None if it must be trained alone."""
    if isinstance(training.failure, DivergedError):
        return training.failure
    if training.failure is not None or not training.finished:
        return None
    return training.outcome()


def _run_cell(job: Job, registry: Registry, context: Context, trained: Trained | None) -> Record:
    """Return the record of one job, whose cell may already be trained."""
    context.on_progress([job.cell.id], 0.0)
    prepared, _, seconds_before = trained or (None, None, 0.0)
    started = datetime.now(UTC).isoformat()
    clock = time.perf_counter() - seconds_before
    result = Result()

    def on_prepared(ready: Prepared) -> None:
        nonlocal prepared
        prepared = ready

    last = _last_features(job, context)
    if isinstance(last, Unavailable):  # all cells with these features fail in the same way
        return job.record_of_failure(last.status, last.failure, started, time.perf_counter() - clock)
    try:
        if job.cell.probe is not None:
            _probe(job, job.cell.probe, registry, context, result, on_prepared)
        elif trained is not None:
            _test_trained(job, trained, context, result)
        else:
            _train_and_test(job, registry, context, result, on_prepared)
    except BaseException as error:  # a third-party strategy may raise anything
        if isinstance(error, KeyboardInterrupt) and not context.alone:
            raise
        status, failure = _status_and_failure(job, context, error, prepared)
        return job.record_of_failure(status, failure, started, time.perf_counter() - clock)
    device = context.environment.device
    return Record(
        cell=job.cell,
        cell_id=job.cell.id,
        status="ok",
        **vars(result),
        origin=job.origin,
        kind=job.kind,
        label=job.label,
        environment=digest(machine()),
        device=device if device == "cpu" else f"{device} {_name_of(device)}",
        started=started,
        seconds=round(time.perf_counter() - clock, 3),
    )


def _probe(
    job: Job,
    probe: Probe,
    registry: Registry,
    context: Context,
    result: Result,
    on_prepared: Callable[[Prepared], None],
) -> None:
    """Learn the probe of a cell and fill its result; see `_features` for the arguments."""
    if not probe.of_patches:
        add_probe(result, job.cell, _features(job, registry, context, on_prepared))
        return
    _seed(job, context.environment.device)
    prepared = prepare(job, registry, context)
    on_prepared(prepared)
    _seed(job, context.environment.device)
    _predict_patches(job, prepared, context, result)


def _train_and_test(
    job: Job, registry: Registry, context: Context, result: Result, on_prepared: Callable[[Prepared], None]
) -> None:
    """Prepare, train and test a cell, and fill its result. `on_prepared` is called before the training."""
    device = context.environment.device
    _seed(job, device)
    prepared = prepare(job, registry, context)
    on_prepared(prepared)
    _seed(job, device)
    outcome = _train(job, prepared, context, result)
    _seed(job, device)
    _test(job, prepared, outcome, context, result)


def _test_trained(job: Job, trained: Trained, context: Context, result: Result) -> None:
    """Test a cell that was trained together with others, and fill its result; raise the error of its training."""
    prepared, outcome, _ = trained
    if isinstance(outcome, DivergedError):
        raise outcome
    _seed(job, context.environment.device)
    _test(job, prepared, outcome, context, result)


def _status_and_failure(
    job: Job, context: Context, error: BaseException, prepared: Prepared | None
) -> tuple[Status, Failure]:
    """Return the status and the failure of a cell that ended with an error, which a worker writes to its log.

    If the features of a probe cannot be computed, the context says so to the other cells with these features. Cells
    that predict patches share none: each reads features of its own, and they depend on the training images.
    """
    status = _status_of(error)
    shares_features = bool(job.features) and job.cell.probe is not None and not job.cell.probe.of_patches
    strategy = None if prepared is None or prepared.actor is None else prepared.actor.strategy
    failure = failure_of(error, strategy, job.files)
    if shares_features and status in PERMANENT and _last_features(job, context) is None:  # not the probe itself failed
        context.features = Unavailable(_path_of_features(job, context).stem, status, failure)
    if context.alone and status != "unsupported":
        _write_to_log(job, status, error)
    return status, failure


def _name_of(device: str) -> str:
    """Return the kind of a device, which is the name of a GPU; of several equal ones, all have this name."""
    return device if device == "cpu" else torch.cuda.get_device_name(device)


def _status_of(error: BaseException) -> Status:
    """Return the status of a cell that ended with this exception, see STATUSES."""
    for kind, status in STATUSES.items():
        if isinstance(error, kind):
            return status
    return "oom" if is_out_of_memory(error) else "failed"


def _write_to_log(job: Job, status: Status, error: BaseException) -> None:
    """Write an error with its traceback to the log of a worker, which is its standard error."""
    lines = [f"cell {job.cell.id}, {job.label}: {status}\n", *traceback.format_exception(error)]
    with suppress(OSError):  # a strategy may have closed the log
        os.write(2, "".join(lines).encode("utf-8", "backslashreplace"))


def _seed(job: Job, device: str) -> None:
    """Seed torch's generators by the cell's id, or by the name of the features that it shares with other cells.

    torch.manual_seed would queue a call with a stack trace for each unused kind of device, in a list without end.
    """
    seed = seeds.seed_of("cell", job.features or job.cell.id)
    torch.default_generator.manual_seed(seed)
    if device != "cpu":
        torch.cuda.manual_seed_all(seed)


def failure_of(error: BaseException, strategy: Strategy | None = None, plugins: Sequence[str] = ()) -> Failure:
    """Return the failure of a record from an error, with the last file and line of the strategy's code.

    Without such a line, it has the last line of the plugin files, which bring the task and the model too.
    """
    place = ""
    if not isinstance(error, UnsupportedError | DivergedError):  # these are not errors in the code
        if strategy is not None:
            place = place_of(error, strategy)
        place = place or last_line(error, lambda frame: frame.f_code.co_filename in plugins)

    text = text_of(error) if isinstance(error, KNOWN) else one_line(error)
    short = shortage(error)
    if short:
        text = f"{short} ({text[:300]})"
    text = " ".join(text.split())
    if place:  # a long text is cut, so that the place remains
        text = f"{text[:450]}{place}"
    reason = " ".join(text.split())[:500]

    trace = "" if isinstance(error, KNOWN) else "".join(traceback.format_exception(error))[-4000:]
    trace = trace.encode("utf-8", "backslashreplace").decode()
    return Failure(reason=reason, kind=type(error).__name__, traceback=trace)


def _train(job: Job, prepared: Prepared, context: Context, result: Result) -> dict[str, float]:
    """Train a cell, unless it tests a trained network; return the outcome, see `Training.outcome`."""
    if prepared.is_trained:
        return prepared.outcome or {}
    _fit(prepared, prepared.in_training, context, result)
    recipe = prepared.recipe
    if job.keep_weights:  # weights of an earlier training must not be taken for this one's
        store.weights_path(context.environment.out, job.cell.id).unlink(missing_ok=True)
    early = None
    if recipe.patience:
        assert prepared.validation is not None and prepared.data.validation is not None
        early = EarlyStopping(prepared.in_test, prepared.validation, prepared.data.validation.groups)
    training = Training(
        prepared.network, prepared.in_training, prepared.train, recipe, prepared.order, prepared.teacher, early
    )
    watch, checkpoint = None, None
    if recipe.watch:  # without checkpoints, as they do not contain what a Watch has measured
        watch = Watch(training, prepared.in_test, prepared.test)
    else:
        checkpoint = _resumed(job, prepared, training, context)
    each_step = watch or checkpoint
    may_end_early = bool(recipe.stop_at_zero_loss or recipe.stop_below or recipe.patience)
    outcome = training.run(_reports(job, context, 0 if may_end_early else training.total, each_step))
    result.notes |= _notes_on(prepared, training.steps, checkpoint)
    if watch is not None:
        add_watch(result, watch, int(outcome["steps"]), prepared.task)
    return outcome


def _resumed(job: Job, prepared: Prepared, training: Training, context: Context) -> Checkpoint | None:
    """Resume a training from its checkpoint, if any; return what stores its checkpoints, or None if nothing does."""
    seconds = context.environment.execution.checkpoint
    if not seconds or not isinstance(training.steps, Autograd):
        return None
    made_by = {
        "cell": job.cell.id,
        "revision of the strategy": job.origin.revision,
        "start": prepared.start.name,
        "device": torch.device(context.environment.device).type,
    }
    path = store.checkpoint_path(context.environment.out, job.cell.id)
    checkpoint = Checkpoint(path, training, seconds, made_by)
    checkpoint.resume()
    return checkpoint


def _reports(
    job: Job, context: Context, total: int, first: Callable[[int], None] | None = None
) -> Callable[[int], None]:
    """Return a function to call with the number of finished steps or test items. It reports their share every second.

    It also calls `first` with this number. If `total` is 0, as training may end early, it reports no share.
    """
    due = time.monotonic() + REPORT_INTERVAL

    def report(done: int) -> None:
        nonlocal due
        if first is not None:
            first(done)
        if total and done and time.monotonic() >= due:
            context.on_progress([job.cell.id], done / total)
            due = time.monotonic() + REPORT_INTERVAL

    return report


def _fit(prepared: Prepared, acting: Actor | None, context: Context, result: Result) -> None:
    """Fit the strategy on training images, if it has a `fit` and was not fitted before.

    A strategy that acts in the training and in the test has one actor, which is fitted before the training only.
    """
    if acting is None or "fit" in result.notes or not wants_images(acting):
        return
    if prepared.in_training is not None and prepared.task.trains and not prepared.start.head:
        raise UnsupportedError(
            f"'{acting.strategy.name}' needs a trained network, but this training starts from random weights: it "
            "belongs to the tracks frozen and tuned"
        )
    result.notes["fit"] = fit_on(prepared, acting, context.fitted)


def _notes_on(prepared: Prepared, steps: Steps, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Return notes on a training: resumed, batches in parts, and terms of the loss without effect."""
    notes: dict[str, str] = {}
    if checkpoint is not None and checkpoint.resumed:
        notes["resumed"] = str(checkpoint.resumed)
    # Batches are in the parts of the recipe at first. They are in more parts once memory was short.
    if isinstance(steps, Autograd) and steps.parts > prepared.recipe.accumulate:
        notes["memory"] = f"batches in {steps.parts} parts: the memory holds no larger ones"
    actor = prepared.in_training
    if actor is not None and actor.acts:
        # What has no effect even with a teacher has weight 0. The rest lacks the teacher.
        weightless = actor.strategy.inactive(teacher=True)
        inactive = actor.strategy.inactive(prepared.teacher is not None)
        untaught = [term for term in inactive if term not in weightless]
        reasons = {"weight 0": weightless, "no teacher": untaught}
        texts = [f"{', '.join(terms)}: {reason}" for reason, terms in reasons.items() if terms]
        if texts:
            notes["inactive"] = "; ".join(texts)
    return notes


def _path_of_features(job: Job, context: Context) -> Path:
    """Return the file of the features that a cell's probe learns from."""
    computer = f"{digest(machine())} {_name_of(context.environment.device)}"
    return path_of(context.environment.out, job.features, computer)


def _last_features(job: Job, context: Context) -> Probed | Unavailable | None:
    """Return the features of the last probe, or why there are none, if they are those of this cell; otherwise None."""
    last = context.features
    is_of_cell = job.features and last is not None and last.name == _path_of_features(job, context).stem
    return last if is_of_cell else None


def _features(job: Job, registry: Registry, context: Context, on_prepared: Callable[[Prepared], None]) -> Probed:
    """Return the features that a cell's probe learns from: of the last cell, of a file, or computed now.

    Args:
        job, registry, context: the cell and its surroundings.
        on_prepared: called with the cell if features are computed.
    """
    last = _last_features(job, context)
    if isinstance(last, Probed):
        return last
    path = _path_of_features(job, context)

    def compute() -> Probed:
        _seed(job, context.environment.device)
        prepared = prepare(job, registry, context)
        on_prepared(prepared)
        _seed(job, context.environment.device)
        return probed_of(job, prepared, context, path.stem)

    context.features = features_at(path, compute)
    return context.features


def probed_of(job: Job, prepared: Prepared, context: Context, name: str) -> Probed:
    """Return the features of the training and test images of a cell, each of which passes the network once.

    Raises:
        DivergedError: the weights or features are not finite.
        StrategyError: kept tokens or features depend on labels or masks.
    """
    shared = Result()
    asked = context.environment.execution.batch
    first = asked or _first_batch_of_probe(prepared, context.environment.device)
    trust = _ready_for_probe(job, prepared, context, shared, first)
    train, test = _features_of_splits(job, prepared, context, first)
    if not (np.isfinite(train.outputs).all() and np.isfinite(test.outputs).all()):
        raise _not_finite(prepared, "features are not finite")
    context.trusted.add(trust)

    _add_selection(shared, prepared, test)
    if train.batch == test.batch:  # else the seconds are of batches of two sizes
        test = replace(test, seconds=[*train.seconds, *test.seconds])
    _add_passes(shared, prepared, test, asked, first, FEWEST_OF_PROBE)
    _add_note_on_times(shared, context)
    return _packed(name, prepared.data, train.outputs, test.outputs, shared)


def _ready_for_probe(job: Job, prepared: Prepared, context: Context, result: Result, batch: int) -> tuple[str, ...]:
    """Fit and calibrate the strategy of a probe's cell, and check it for leaks, unless it passed this check before.

    Returns:
        The key by which the context trusts the strategy from now on, if the rest of the cell succeeds.

    Raises:
        DivergedError: the weights are not finite.
        StrategyError: kept tokens or features depend on labels or masks.
    """
    actor = prepared.in_test
    result.schedule = prepared.schedule
    _check_weights_are_finite(prepared)
    _fit(prepared, actor, context, result)
    _calibrate(result, prepared)
    trust = job.label, job.origin.identity, job.cell.task.name, job.cell.model.name, "probe"
    if actor is not None and trust not in context.trusted:
        check_leaks(prepared.network, actor, prepared.test, None, batch)
    return trust


def _features_of_splits(job: Job, prepared: Prepared, context: Context, batch: int) -> tuple[Features, Features]:
    """Return the features of training and test images, with `batch` as the batch size to try first."""
    network, actor = prepared.network, prepared.in_test
    n_train, n_test = len(prepared.train.labels), len(prepared.test.labels)
    report = _reports(job, context, n_train + n_test)
    # Training and test images have equal numbers, so they are different passes.
    train = features(network, actor, prepared.train, batch, visit=1, on_done=report)
    has_mask = prepared.test.relevance is not None
    # Where memory was short, the test begins with the size of batches that the training images had in the end.
    test = features(
        network, actor, prepared.test, train.batch, choices=has_mask, on_done=lambda done: report(n_train + done)
    )
    return train, test


def _first_batch_of_probe(prepared: Prepared, device: str) -> int:
    """Return the batch size to try first for features; on a CPU one with enough batches to time."""
    usual = first_batch(prepared.network, prepared.test)
    if device != "cpu":
        return usual
    images = len(prepared.train.labels) + len(prepared.test.labels)
    return min(usual, max(1, images // BATCHES_OF_PROBE))


def _packed(name: str, data: Data, train: np.ndarray, test: np.ndarray, shared: Result) -> Probed:
    """Return (P, C) training and (n, C) test features with the labels and groups of their images."""
    foregrounds = data.test.foregrounds
    both = rounded(np.concatenate([train, test]))
    return Probed(
        name=name,
        train=both[: len(train)],
        test=both[len(train) :],
        train_labels=np.asarray(data.train.labels, dtype=np.int64),
        train_groups=np.asarray(data.train.groups, dtype=np.int64),
        test_labels=np.asarray(data.test.labels, dtype=np.int64),
        test_groups=np.asarray(data.test.groups, dtype=np.int64),
        foregrounds=np.asarray([] if foregrounds is None else foregrounds, dtype=np.int64),
        classes=data.classes,
        groups=data.group_names,
        shared=Shared.model_validate({name: getattr(shared, name) for name in Shared.model_fields}),
    )


def add_probe(result: Result, cell: Cell, probed: Probed) -> None:
    """Learn the probe of a cell, and fill the result with its accuracies and with what it shares with other cells."""
    shared = probed.shared
    result.metrics |= shared.metrics
    result.trajectory = shared.trajectory
    result.schedule = shared.schedule
    result.samples |= shared.samples
    result.notes |= shared.notes

    rows = rows_of_probe(probed.train_labels, cell.n_train, cell.task.name, cell.repetition)
    train, labels = probed.train[rows], probed.train_labels[rows]
    n_classes = len(probed.classes)
    probe = linear_probe(train, labels, probed.test, n_classes)
    near = neighbours(train, labels, probed.test, n_classes)
    items = _items_of_probe(probed, probe.scores)
    sizes = np.bincount(probed.train_groups[rows], minlength=len(probed.groups))
    result.metrics |= scores(items, n_classes, probed.groups, sizes.tolist())
    result.add("p_label", items.p_label, len(items.labels))
    result.metrics["neighbour_accuracy"] = share(near == items.labels)
    result.notes["probe"] = f"C={probe.C:g}"
    result.outcomes = _outcomes(items, near)


def _items_of_probe(probed: Probed, class_scores: np.ndarray) -> Items:
    """Return the outcomes of the n test images of a probe from its (n, classes) scores."""
    truth = probed.test_labels[:, None]
    of_label = np.take_along_axis(class_scores, truth, axis=1)
    is_higher = class_scores > of_label
    # Equal scores rank by class number, as in `evaluation.ranks`.
    is_before = (class_scores == of_label) & (np.arange(class_scores.shape[1]) < truth)
    return Items(
        predicted=class_scores.argmax(axis=1),
        labels=probed.test_labels,
        groups=probed.test_groups,
        ranks=(is_higher | is_before).sum(axis=1),
        losses=-np.maximum(of_label[:, 0], LOWEST_LOG).astype(np.float32),
        foregrounds=probed.foregrounds if len(probed.foregrounds) else None,
    )


def _predict_patches(job: Job, prepared: Prepared, context: Context, result: Result) -> None:
    """Predict the patches of the test images of a cell, and fill its result.

    Raises:
        DivergedError: the weights or the features are not finite.
        StrategyError: kept tokens or features depend on labels or masks.
        UnsupportedError: the network or the strategy has no tokens that stand for patches.
        UserError: there are too many patches, all are to ignore, or those of the training images have one class.
    """
    task, data, network, grid = prepared.task, prepared.data, prepared.network, prepared.network.grid
    segments = data.test.segments
    assert isinstance(task, Patches) and segments is not None and grid is not None
    labels = patch_labels(segments, grid)
    check_items(task, *labels.shape)
    _check_judged(labels, "test")
    asked = context.environment.execution.batch
    first = asked or _first_batch_of_probe(prepared, context.environment.device)
    trust = _ready_for_probe(job, prepared, context, result, first)
    head, result.notes["probe"] = _head(task, prepared, context, first)
    n_classes = len(data.patch_classes)

    def read(rows: np.ndarray, features: np.ndarray) -> dict[str, np.ndarray]:
        if not np.isfinite(features).all():
            raise _not_finite(prepared, "features are not finite")
        return predict(head, features, labels[rows], segments[rows], grid, n_classes)._asdict()

    report = _reports(job, context, len(labels))
    passes = read_patches(
        network, prepared.in_test, prepared.test, read, first, fill=task.fill, choices=True, on_done=report
    )
    context.trusted.add(trust)
    _add_selection(result, prepared, passes)
    _add_passes(result, prepared, passes, asked, first, FEWEST_OF_PROBE)
    _add_note_on_times(result, context)
    _add_patches(result, data, labels, on_boundary(segments, grid), passes.values)


def _check_judged(labels: np.ndarray, split: str) -> None:
    """Raise UserError if all patches of the images of a split are to ignore."""
    if (labels == IGNORE).all():
        raise UserError(
            f"all patches of the {split} images are to ignore",
            got=f"{labels.size} patches",
            next_step="set ignore of the task, or add pictures whose masks have other numbers",
        )


def _head(task: Patches, prepared: Prepared, context: Context, batch: int) -> tuple[Head, str]:
    """Return the head of a cell, and a note on it. One without a strategy is learned once for all cells of a process.

    Args:
        task, prepared, context: the cell and its surroundings.
        batch: the batch size to try first.
    """
    cell, segments = prepared.cell, prepared.data.train.segments
    assert segments is not None and prepared.network.grid is not None
    rows = rows_of_probe(prepared.data.train.labels, cell.n_train, task.name, cell.repetition)
    labels = patch_labels(segments, prepared.network.grid)
    _check_judged(labels[rows], "training")
    chosen = chosen_patches(labels, rows, task.name, cell.repetition)
    note = f"{chosen.sum()} patches of {len(rows)} images"
    start = None if cell.init is None else cell.init.id
    key = digest([cell.draw, cell.model.model_dump(mode="json"), cell.precision, start, cell.n_train])
    if task.head == "dense" and key in context.heads:
        return context.heads[key], note

    def read(places: np.ndarray, features: np.ndarray) -> dict[str, np.ndarray]:
        return {"features": features[chosen[rows[places]]]}

    actor = prepared.in_test if task.head == "own" else None
    # Training and test images have equal numbers, so they are different passes.
    passes = read_patches(prepared.network, actor, some(prepared.train, rows), read, batch, fill=task.fill, visit=1)
    features = passes.values["features"]
    if not np.isfinite(features).all():
        raise _not_finite(prepared, "features are not finite")
    head = learn_head(features, labels[chosen])
    if task.head == "dense":
        context.heads[key] = head
    return head, note


def _add_patches(
    result: Result, data: Data, labels: np.ndarray, boundary: np.ndarray, values: Mapping[str, np.ndarray]
) -> None:
    """Add the outcomes of predicted patches; those to ignore are left out.

    Args:
        result: the result.
        data: the data of the cell.
        labels: (n, N) classes of the patches.
        boundary: (n, N) which patches have pixels of several classes.
        values: the fields of `Predictions` of all test images.
    """
    judged = labels != IGNORE
    images = np.nonzero(judged)[0]
    pictures = images if data.test.foregrounds is None else data.test.foregrounds[images]
    items = Items(
        predicted=values["predicted"][judged],
        labels=labels[judged],
        groups=np.zeros(len(images), dtype=np.int64),
        ranks=values["ranks"][judged],
        losses=values["losses"][judged],
        foregrounds=pictures % MOST_PICTURES,
    )
    result.metrics |= scores(items, len(data.patch_classes), ("all",), (0,))
    result.add("p_label", items.p_label, len(images))
    pixels = Overlap(values["both"], values["either"], values["labels"])
    result.metrics |= scores_of_patches(items, images, boundary[judged], pixels)
    result.outcomes = _outcomes(items)


def _outcomes(items: Items, neighbour: np.ndarray | None = None) -> Outcomes:
    """Return the outcomes of items for a record; `neighbour` are the predictions of nearest neighbours, if any."""
    return Outcomes(
        n=len(items.labels),
        predicted=bytes_of(items.predicted),
        label=bytes_of(items.labels),
        group=bytes_of(items.groups),
        rank=bytes_of(items.ranks),
        foreground=bytes_of(items.foregrounds),
        neighbour=bytes_of(neighbour),
    )


def _test(job: Job, prepared: Prepared, outcome: dict[str, float], context: Context, result: Result) -> None:
    """Test a trained cell and fill its result; store the weights if other cells need them."""
    _fit(prepared, prepared.in_test, context, result)
    execution = context.environment.execution
    key = job.label, job.origin.identity, job.cell.task.name, job.cell.model.name
    on_done = _reports(job, context, len(prepared.test.labels)) if prepared.is_trained else None
    measure(result, prepared, outcome, execution.batch, leaks=key not in context.trusted, on_done=on_done)
    context.trusted.add(key)
    _add_note_on_times(result, context)
    if job.keep_weights:
        content = weights_file(prepared.network, prepared.start.name, outcome)
        files.write_whole(store.weights_path(context.environment.out, job.cell.id), content)
        result.notes["weights"] = hashlib.sha256(content).hexdigest()


def _add_note_on_times(result: Result, context: Context) -> None:
    """Add a note on whether other cells may have run at the same time, if times were measured."""
    if "images_per_s" in result.metrics:
        alone = "alone on its machine" if context.environment.device == "cpu" else "alone on its GPU"
        result.notes["timed"] = alone if context.environment.execution.exclusive else "perhaps beside other cells"


def measure(
    result: Result,
    prepared: Prepared,
    trained: dict[str, float],
    batch: int | None = None,
    *,
    leaks: bool = True,
    on_done: Callable[[int], None] | None = None,
) -> None:
    """Test the trained network of a cell and add all measurements to the result.

    Args:
        result: the result to fill.
        prepared: the cell.
        trained: the outcome of the training.
        batch: the test batch size to try first; None for `first_batch`.
        leaks: whether to check that results do not depend on labels or masks.
        on_done: called during the test with the number of finished items.

    Raises:
        DivergedError: the weights or the test loss are not finite, see `_not_finite`.
        StrategyError: kept tokens or predictions depend on labels or masks.
    """
    network = prepared.network
    result.schedule = prepared.schedule
    _check_weights_are_finite(prepared)
    _calibrate(result, prepared)
    first = batch or first_batch(network, prepared.test)
    if leaks and prepared.in_test is not None:
        check_leaks(network, prepared.in_test, prepared.test, prepared.recipe, first)
    has_mask = prepared.test.relevance is not None
    evaluation = evaluate(
        network, prepared.in_test, prepared.test, prepared.recipe, first, choices=has_mask, on_done=on_done
    )
    if not np.isfinite(evaluation.loss):
        raise _not_finite(prepared, f"the test loss is {evaluation.loss}")

    for name, value in trained.items():
        result.add(name, value, len(prepared.train.labels))
    _add_validation(result, prepared)
    _add_outcomes(result, prepared.task, prepared.data, evaluation)
    _add_selection(result, prepared, evaluation)
    _add_spuriosity(result, prepared)
    _add_passes(result, prepared, evaluation, batch, first)


def _add_passes(
    result: Result, prepared: Prepared, passes: Passes, batch: int | None, first: int, fewest: int = FEWEST_TIMED
) -> None:
    """Add cost, size and speed, and notes on the passes of the test.

    Args:
        result: the result.
        prepared: the cell.
        passes: what strategy and network did with the test items.
        batch: the batch size that the user asked for, if any.
        first: the batch size that was tried first.
        fewest: see FEWEST_TIMED.
    """
    network = prepared.network
    _add_cost(result, network, prepared.in_test, passes)
    result.add("parameters", sum(weight.numel() for weight in network.module.parameters()), 1)
    if prepared.task.inputs == "images":
        _add_timing(result, network, prepared.in_test, prepared.test, passes, fewest)
    was_halved = passes.batch < first
    if batch or was_halved:
        why = f"; the device had no memory for {first}" if was_halved else ""
        result.notes["test_batch"] = f"{passes.batch}{why}"
    result.notes |= _notes_on_network(prepared)


def _notes_on_network(prepared: Prepared) -> dict[str, str]:
    """Return notes on the tested network: the weights it started from, and the attention that the strategy reads."""
    notes: dict[str, str] = {}
    if prepared.start.name:
        notes["initial_weights"] = prepared.start.name
    network = prepared.network
    scoring = "" if prepared.actor is None else network.cost.scoring(prepared.actor.requires)
    if scoring:
        notes["attention"] = "received" if scoring == "received" else network.attention_source
    return notes


def _check_weights_are_finite(prepared: Prepared) -> None:
    """Raise DivergedError if a weight is infinite or not a number. On a GPU this waits once, not for each weight."""
    are_finite = torch.stack([weight.isfinite().all() for weight in prepared.network.module.parameters()])
    if not bool(are_finite.all()):
        raise _not_finite(prepared, "its weights are not finite")


def _not_finite(prepared: Prepared, what: str) -> DivergedError:
    """Return the error for numbers that are not finite; they are the fault of the training only if the cell trains."""
    if prepared.is_trained:
        return DivergedError(
            f"the trained network gives no finite numbers: {what}; check the weights and the precision"
        )
    return DivergedError(f"training diverged: {what}")


def _calibrate(result: Result, prepared: Prepared) -> None:
    """Calibrate an adaptive strategy on training images, if any, so that it spends the budget."""
    actor = prepared.in_test
    if actor is None or not actor.strategy.adaptive:
        return
    if not len(prepared.train.labels):
        return
    samples = prepared.train
    if prepared.cell.probe is not None:  # training images of a probe may be sorted by class
        samples = copy.copy(samples)
        order = seeds.generator("calibrate", *prepared.order).permutation(len(samples.labels))
        samples.items = torch.from_numpy(order).to(samples.labels.device)
    calibrated = calibrate(prepared.network, actor, samples)
    if calibrated is not None:
        budget, ratio, images = calibrated
        spent = f"{ratio:.4f} of the dense MACs on {images} training images"
        result.notes["calibration"] = f"counts of {budget.label}: {spent}"


def add_watch(result: Result, watch: Watch, steps: int, task: Task) -> None:
    """Measure after the last step; add all measurements made during the training."""
    watch.measure(steps)
    result.samples |= watch.series()
    n = len(watch.samples.labels)
    for name, unit in watch.network.shows.items():
        result.add(name, watch.seen[name][-1], n, unit)
    result.add("iterations", watch.iterations(task.success), n)


def _add_validation(result: Result, prepared: Prepared) -> None:
    """Add the validation accuracy of the tested weights, and that of the worst group."""
    split = prepared.data.validation
    if split is None or prepared.validation is None:
        return
    evaluation = evaluate(prepared.network, prepared.in_test, prepared.validation, prepared.recipe)
    correct = evaluation.predicted == split.labels
    result.metrics["validation_accuracy"] = share(correct)
    if len(prepared.data.group_names) > 1:
        worst = np.nanmin(group_accuracies(correct, split.groups, len(prepared.data.group_names)))
        result.add("validation_worst_group_accuracy", float(worst), len(correct))


def _add_outcomes(result: Result, task: Task, data: Data, evaluation: Evaluation) -> None:
    """Add accuracy, loss, success, group metrics, the task's own metrics, and the outcome of each item.

    Raises:
        UserError: the task does not return a declared metric, or returns one that is not declared, that exists already,
            or that is infinite or not a number.
    """
    test, group_names = data.test, data.group_names
    items = replace(evaluation, labels=test.labels, groups=test.groups, foregrounds=test.foregrounds)
    sizes = np.bincount(data.train.groups, minlength=len(group_names))
    result.metrics |= scores(items, len(data.classes), group_names, sizes.tolist())
    if task.recipe().loss == "cross-entropy":
        result.add("p_label", items.p_label, len(items.labels))
    for name, success in task.successes(items.loss, items.accuracy).items():
        result.add(name, float(success), 1, "" if decider_of(name) else _unit_of(task, name))
    _add_metrics_of_task(result, task, items, test)
    result.outcomes = _outcomes(items)


def _add_metrics_of_task(result: Result, task: Task, items: Items, test: Split) -> None:
    """Add the metrics that a task declares and measures itself.

    Raises:
        UserError: as `_add_outcomes`.
    """
    for name, value in task.measure(items, test).items():
        if name in result.metrics:
            raise UserError(f"metric '{name}' of task '{task.name}' is measured already", next_step="rename it")
        if not isinstance(value, int | float | np.number) or np.isinf(value):
            got, allowed = repr(value)[:60], "a finite number, or NaN"
            raise UserError(f"metric '{name}' of task '{task.name}'", got=got, allowed=allowed)
        result.add(name, value, len(items.labels), _unit_of(task, name))
    missing = [kind.name for kind in task.metrics if kind.name not in result.metrics]
    if missing and type(task).measure is not Task.measure:
        raise UserError(
            f"task '{task.name}' declares metric '{missing[0]}' but does not return it",
            next_step="return a number from measure(items, test), or NaN",
        )


def _unit_of(task: Task, name: str) -> str:
    """Return the unit that a task declares for a metric."""
    units = {kind.name: kind.unit for kind in task.metrics}
    if name not in units:
        raise UserError(
            f"task '{task.name}' returns a metric that it does not declare",
            got=f"'{name}'",
            allowed=sorted(units) or "none",
            next_step="add it to the task's `metrics`",
        )
    return units[name]


def _add_selection(result: Result, prepared: Prepared, passes: Passes) -> None:
    """Add precision, recall and AUROC of the selection of relevant tokens: at the end, and by block if several.

    They are None if the relevant tokens are unknown.
    """
    if prepared.test.relevance is None:
        for name in SELECTION:
            result.add(name, None, 0)
        return
    matter = relevant(prepared.test.relevance.cpu().numpy(), prepared.data.test.mask)
    at_end, *in_blocks = passes.choices
    for name, value in zip(SELECTION, quality(at_end.kept, at_end.scores, matter), strict=True):
        result.add(name, value, len(passes.kept))
    if prepared.network.cost.depth == 1 or not in_blocks:
        return
    result.samples["selection_blocks"] = tuple(float(choice.block) for choice in in_blocks)
    measured = [quality(choice.kept, choice.scores, matter) for choice in in_blocks]
    for name, values in zip(SELECTION, zip(*measured, strict=True), strict=True):
        result.samples[f"{name}_by_block"] = tuple(None if np.isnan(value) else float(value) for value in values)


def _add_spuriosity(result: Result, prepared: Prepared) -> None:
    """Add the token spuriosity indices, if the task measures them: with the strategy, and without it (`_dense`).

    Each is computed over those of the first images that the network then classifies correctly, so the two may be of
    different images. The value is None if there is no such image.
    """
    network, actor, samples = prepared.network, prepared.in_test, prepared.test
    if not isinstance(prepared.task, PictureTask) or not prepared.task.spuriosity or samples.relevance is None:
        return
    relevance = samples.relevance[: prepared.task.spuriosity]
    n = len(relevance)
    inside = relevance.cpu().numpy() > 0
    labels = samples.labels[:n].cpu().numpy()
    dense = influences(network, None, samples, n)
    acted = dense if actor is None else influences(network, actor, samples, n)
    if acted is None:
        result.notes["spuriosity"] = "not measured: tokens are fused, merged, mixed or of a number of each image's own"
    for suffix, outcome in (("", acted), ("_dense", dense)):
        a_tsi, m_tsi, number = None, None, 0
        if outcome is not None:
            values, predicted = outcome
            correct = predicted == labels
            a_tsi, m_tsi = token_spuriosity(values[correct], inside[correct])
            number = int(correct.sum())
        result.add(f"a_tsi{suffix}", a_tsi, number)
        result.add(f"m_tsi{suffix}", m_tsi, number)


def _add_cost(result: Result, network: Network, actor: Actor | None, passes: Passes) -> None:
    """Add the realised MACs, the dense MACs and the planned share of the dense MACs."""
    cost, n = network.cost, len(passes.kept)
    dense_steps = cost.dense()
    steps = passes.steps or dense_steps
    planned_steps = dense_steps if actor is None else actor.planned
    dense_macs = cost.macs(dense_steps)
    macs = cost.macs(steps)
    planned_macs = cost.macs(planned_steps)
    # The counts of an adaptive strategy are limits, from which no MACs follow.
    counts_are_limits = actor is not None and actor.strategy.adaptive and actor.budget.counts is not None

    result.trajectory = tuple(steps)
    result.add("macs", macs, n)
    result.add("macs_dense", dense_macs, n)
    result.add("macs_ratio", macs / dense_macs, n)
    if len(passes.macs) and np.ptp(passes.macs):
        result.add("macs_p95", float(np.quantile(passes.macs, 0.95)), n)
    result.add("macs_ratio_planned", None if counts_are_limits else planned_macs / dense_macs, n)
    if _is_misplanned(steps, macs, planned_steps, planned_macs):
        shares = f"{macs / dense_macs:.3f} of the dense MACs, planned as {planned_macs / dense_macs:.3f}"
        result.notes["cost_model"] = shares


def _is_misplanned(steps: Sequence[Step], macs: float, planned_steps: Sequence[Step], planned_macs: float) -> bool:
    """Return whether the MACs are not as planned, see MISPLANNED, although the token counts are.

    Products of the strategy's own do not count: they are not planned if they cost more than the strategy saves.
    """
    counts = [(step.tokens_in, step.tokens_out) for step in steps]
    planned_counts = [(step.tokens_in, step.tokens_out) for step in planned_steps]
    if counts != planned_counts:
        return False
    of_network = macs - sum(step.own for step in steps)
    planned_of_network = planned_macs - sum(step.own for step in planned_steps)
    return abs(of_network / planned_of_network - 1) > MISPLANNED


def _add_timing(
    result: Result, network: Network, actor: Actor | None, samples: Samples, passes: Passes, fewest: int
) -> None:
    """Add the speed of the test. If fewer batches than `fewest` were timed, one batch is timed repeatedly."""
    batch, seconds = passes.batch, passes.seconds
    if len(seconds) < fewest:
        batch, seconds = seconds_per_batch(network, actor, samples, batch)
    result.samples["seconds_per_batch"] = tuple(round(s, 6) for s in seconds)
    result.add("images_per_s", batch / float(np.median(seconds)), len(seconds))
    result.add("timed_batch", batch, len(seconds))


@contextmanager
def deterministic() -> Iterator[None]:
    """Make torch deterministic in this context: one thread, no TF32, deterministic kernels where they exist."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode(), convolutions.fp32_precision
    filled = memory.fill_uninitialized_memory
    torch.set_num_threads(1)  # floating-point sums depend on how they are split over threads
    # The same as use_deterministic_algorithms(True, warn_only=True), which imports torch's compiler for seconds.
    torch.set_deterministic_debug_mode("warn")
    memory.fill_uninitialized_memory = False  # True costs a kernel for each new tensor
    convolutions.fp32_precision = "ieee"  # TF32 is on by default for convolutions only
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        convolutions.fp32_precision = before[2]
        memory.fill_uninitialized_memory = filled


def main(line: Line) -> None:
    """Run jobs and send records until the line is closed, a cell was out of memory, or the device is lost."""
    with suppress(OSError):  # if memory is short, Linux kills this process, not the run or another program
        Path("/proc/self/oom_score_adj").write_text("900", encoding="utf-8")
    faulthandler.enable()  # writes the stack to the log at a crash
    environment: RunEnvironment = line.recv()
    registry, timeout = Registry(), environment.execution.limits()[0]

    def on_progress(cells: Sequence[str], share: float) -> None:
        if share == 0:
            forget_peak()
            if timeout:  # shortly before the time limit, even if a thread holds the GIL
                faulthandler.dump_traceback_later(timeout - min(1.0, timeout / 4))
        line.say(Message(at=tuple(cells), share=share))

    context = Context(environment, alone=True, on_progress=on_progress)
    with deterministic(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        machine()  # cached now, before third-party code can change it
        line.say(Message())
        while True:
            jobs: list[Job] = line.recv()
            out_of_memory = False
            for done, record in enumerate(run_cells(jobs, registry, context), 1):
                faulthandler.cancel_dump_traceback_later()
                out_of_memory = out_of_memory or record.status == "oom"
                # After a cell was out of memory, the rest of its batch still runs here: it may already be trained.
                unfit = (out_of_memory and done == len(jobs)) or device_is_lost(environment.device)
                line.say(Message(record=record.model_copy(update={"memory": peak()}), unfit=unfit))
                if unfit:
                    return


def device_is_lost(device: str) -> bool:
    """Return whether a CUDA device can no longer be used in this process."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
