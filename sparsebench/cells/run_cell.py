"""From jobs to records: prepare each cell, train it, test it, measure."""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

import torch

from sparsebench import seeds
from sparsebench.cells.checkpoint import Checkpoint
from sparsebench.cells.fitting import FIT, fit_cell
from sparsebench.cells.prepare import Context, Prepared, prepare, weights_file
from sparsebench.cells.results import Result, add_watched, measure
from sparsebench.cells.share import Share, each
from sparsebench.contain.exclusive import timing
from sparsebench.contract import place_of
from sparsebench.errors import (
    DivergedError,
    NotReadyError,
    StrategyError,
    UnsupportedError,
    UserError,
    one_line,
    text_of,
)
from sparsebench.models.actor import Actor
from sparsebench.models.shallow import ShallowViT
from sparsebench.models.two_layer import TwoLayerViT
from sparsebench.planning.job import Job
from sparsebench.plugin.registry import Registry
from sparsebench.records import environment, files, store
from sparsebench.records.cell import digest
from sparsebench.records.record import Failure, Record, Status
from sparsebench.strategy import Strategy
from sparsebench.training.early import EarlyStopping
from sparsebench.training.loop import Course, Training, steps_for
from sparsebench.training.state import can_be_resumed
from sparsebench.training.steps import Autograd
from sparsebench.training.trials import Trial, fits, train_together
from sparsebench.training.watch import Watch
from sparsebench.version import __version__


def run_cell(job: Job, registry: Registry, context: Context) -> Record:
    """Return the job's record, whatever happens: what a strategy does wrong is in the record, not raised."""
    (record,) = run_cells([job], registry, context)
    return record


def run_cells(
    jobs: Sequence[Job],
    registry: Registry,
    context: Context,
    on_begin: Callable[[Sequence[Job]], None] = lambda jobs: None,
) -> Iterator[Record]:
    """Yield the record of each job. Several that can are trained in one program on CUDA; on the CPU one by one.

    `on_begin` is called with the jobs that something begins for, which may not come to its end.
    """
    if context.device == "cpu" or len(jobs) == 1:
        for job in jobs:
            on_begin([job])
            run = _Run(job, context)
            run.attempt(partial(run.prepare, registry))
            run.attempt(run.train)
            run.attempt(run.measure)
            yield run.record(share=1)
        return
    runs = [_Run(job, context) for job in jobs]
    for run in runs:
        on_begin([run.job])
        run.attempt(partial(run.prepare, registry))
    sharing = [run for run in runs if run.can_share()]
    if sharing:
        on_begin([run.job for run in sharing])
        _train_together(sharing)
    for run in runs:
        on_begin([run.job])
        if run.trained is None:
            run.attempt(run.train)
        run.attempt(run.measure)
        yield run.record(share=len(runs))


def _train_together(runs: Sequence[_Run]) -> None:
    """Train what runs in one program; each has its outcome then, or has diverged, or must be trained alone."""
    trials = [run.trial() for run in runs]
    train_together(trials)
    for run, trial in zip(runs, trials, strict=True):
        if isinstance(trial.failure, DivergedError):
            run.fail(trial.failure)
        elif trial.failure is None:
            run.trained = trial.course.outcome()
    context = runs[0].context
    if context.alone and context.device != "cpu":
        torch.cuda.synchronize(context.device)  # ends the worker if the device is lost; each cell is tried alone then


KNOWN = (StrategyError, DivergedError, UnsupportedError, UserError)
"""Errors whose text says all; others are shown with their type and kept with their traceback."""


def failure_of(error: BaseException, strategy: Strategy | None = None) -> Failure:
    """Return what a record says of an error; with the file and line where a strategy had its last word."""
    kind = type(error).__name__
    text = text_of(error) if isinstance(error, KNOWN) else one_line(error)
    if strategy is not None and not isinstance(error, UnsupportedError | DivergedError):
        text = f"{' '.join(text.split())[:450]}{place_of(error, strategy)}"
    trace = "" if isinstance(error, KNOWN) else "".join(traceback.format_exception(error))[-4000:]
    trace = trace.encode("utf-8", "backslashreplace").decode()
    return Failure(reason=" ".join(text.split())[:500], kind=kind, traceback=trace)


def _status(error: BaseException) -> Status:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    if isinstance(error, NotReadyError):
        return "skipped"
    return "unsupported" if isinstance(error, UnsupportedError) else "failed"


class _Run:
    """One job on its way to a record, in stages that may fail."""

    def __init__(self, job: Job, context: Context):
        self.job, self.context = job, context
        self.started, self.clock = datetime.now(UTC).isoformat(), time.perf_counter()
        self.status: Status = "ok"
        self.failure: Failure | None = None
        self.result = Result()
        self.cell: Prepared | None = None
        self.trained: dict[str, float] | None = None

    def attempt(self, stage: Callable[[], None]) -> None:
        """Run a stage unless one before it failed."""
        if self.failure is not None:
            return
        try:
            _seed(seeds.seed_of("cell", self.job.cell.id), self.context.device)
            stage()
        except BaseException as error:  # a strategy is a stranger's code and may raise anything
            if isinstance(error, KeyboardInterrupt) and not self.context.alone:
                raise
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note what went wrong; a process of its own, whose log is read for it, says where."""
        acting = None if self.cell is None else self.cell.in_training or self.cell.in_test
        strategy = None if acting is None else acting.strategy
        self.status, self.failure = _status(error), failure_of(error, strategy)
        if self.context.alone and self.status != "unsupported":
            lines = [f"cell {self.job.cell.id}, {self.job.label}: {self.status}\n", *traceback.format_exception(error)]
            with suppress(OSError):  # a strategy may have closed it
                os.write(2, "".join(lines).encode("utf-8", "backslashreplace"))

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
        if cell.outcome is not None or not cell.task.trains:
            self.trained = cell.outcome or {}
            if cell.tested:
                self.result.notes["tested_weights"] = cell.tested
            return
        self._fit(cell, cell.in_training)
        if self.job.keep_weights:  # what a training before this one left must not be taken for its own
            store.weights_path(self.context.out, self.job.cell.id).unlink(missing_ok=True)
        steps = steps_for(cell.network, cell.in_training, cell.train, cell.recipe, cell.teacher)
        watch = None
        if cell.recipe.watch:
            train_, test = (cell.train, cell.in_training), (cell.test, cell.in_test)
            watch = Watch(cell.recipe, steps, cell.network, train_, test)
        training = Training(steps, Course(len(cell.train.labels), cell.recipe, cell.order), _early(cell))
        checkpoint = self._checkpoint(training)
        if checkpoint is not None:
            checkpoint.resume()
        share = Share(training.course, partial(self.context.on_share, self.job.cell.id))
        self.trained = training.run(on_step=each(watch or checkpoint, share if share.certain else None))
        if checkpoint is not None and checkpoint.resumed:
            self.result.notes["resumed"] = str(checkpoint.resumed)
        if isinstance(steps, Autograd) and steps.parts > cell.recipe.accumulate:
            self.result.notes["memory"] = f"batches in {steps.parts} parts: the memory holds no larger ones"
        if inactive := _inactive(cell):
            self.result.notes["inactive"] = inactive
        if watch is not None:
            add_watched(self.result, watch, int(self.trained["steps"]), cell.task)

    def _fit(self, cell: Prepared, acting: Actor | None) -> None:
        """Let the strategy that acts now look at training images, unless it did or does not want to."""
        if acting is not None and FIT not in self.result.notes and (note := fit_cell(cell, self.job, self.context.out)):
            self.result.notes[FIT] = note

    def _checkpoint(self, training: Training) -> Checkpoint | None:
        """Return the cell's checkpoint, or None: what was seen while training is in none."""
        every, job, cell = self.context.checkpoint, self.job, self.cell
        assert cell is not None
        if not every or training.course.recipe.watch or not can_be_resumed(training):
            return None
        made_by = {
            "cell": job.cell.id, "revision of the strategy": job.origin.revision, "start": cell.initial,
            "torch": torch.__version__, "device": torch.device(self.context.device).type, "sparsebench": __version__,
        }  # fmt: skip
        return Checkpoint(store.checkpoint_path(self.context.out, job.cell.id), made_by, every, training)

    def measure(self) -> None:
        """Test it and fill the result; keep the weights if others start from them."""
        assert self.cell is not None and self.trained is not None
        self._fit(self.cell, self.cell.in_test)
        measure(self.result, self.cell, self.trained, self.context.drawn.data)
        if "images_per_s" in self.result.metrics:
            self.result.notes["timed"] = timing(self.context.device, self.context.exclusive)
        if self.job.keep_weights:
            content = weights_file(self.cell.network, self.cell.initial, self.trained)
            files.write_whole(store.weights_path(self.context.out, self.job.cell.id), content)
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
            environment=digest(environment.describe()), device=_device_name(self.context.device),
            started=self.started, seconds=round(seconds, 3),
        )  # fmt: skip


def _early(cell: Prepared) -> EarlyStopping | None:
    """Return what ends the cell's training early, if anything does."""
    if not cell.recipe.patience:
        return None
    assert cell.validation is not None and cell.data.validation is not None
    return EarlyStopping(cell.network, cell.in_test, cell.validation, cell.data.validation.groups, cell.recipe)


def _inactive(cell: Prepared) -> str:
    """Return which published terms of the strategy's loss had no part in the training, and why; "" if all had."""
    actor = cell.in_training
    if actor is None or not actor.acts:
        return ""
    weightless = actor.strategy.inactive(teacher=True)
    untaught = [term for term in actor.strategy.inactive(cell.teacher is not None) if term not in weightless]
    reasons = {"weight 0": weightless, "no teacher": untaught}
    return "; ".join(f"{', '.join(terms)}: {why}" for why, terms in reasons.items() if terms)


def _seed(seed: int, device: str) -> None:
    """Seed torch's own generators, of the CPU and of CUDA if that is used.

    torch.manual_seed does so for every kind of device, and notes it down for those that are not in use yet, each time
    with a stack trace, in a list without end.
    """
    torch.default_generator.manual_seed(seed)
    if device != "cpu":
        torch.cuda.manual_seed_all(seed)


def _device_name(device: str) -> str:
    return device if device == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"
