"""From jobs to records, in this process or a worker of it: prepare each cell, train it, test it, measure."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch

from sparsebench import __version__, files, seeds
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
from sparsebench.plan.request import Job, Setting
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Failure, Record, Status, digest
from sparsebench.runner.devices import environment, turn
from sparsebench.runner.prepare import Context, Prepared, fit_on, prepare, wants_images, weights_file
from sparsebench.runner.process import Line, Message, forget_peak, peak
from sparsebench.runner.results import Result, Watch, add_watch, measure
from sparsebench.strategy.base import Strategy, place_of
from sparsebench.training.loop import EarlyStopping, Training
from sparsebench.training.steps import Autograd

EVERY = 1.0
"""Seconds between two reports of the share that is done."""
LONGEST = 1e8
"""Seconds; timers take no more than some hundred years."""
THREAD_LIMIT = 1
"""Sums of floating-point numbers depend on how they are split over threads, so a cell has one."""
STATUSES: dict[type[BaseException], Status] = {
    torch.OutOfMemoryError: "oom", MemoryError: "oom", NotReadyError: "skipped", UnsupportedError: "unsupported",
}  # fmt: skip
"""Of cells that end with an error; others have failed."""
KNOWN = (StrategyError, DivergedError, UnsupportedError, UserError)
"""Errors whose text says all; others are shown with their type and kept with their traceback."""
log = logging.getLogger(__name__)


class Checkpoint:
    """Called after each step, writes the state of a training every few seconds.

    Args:
        path: the file, which is there whole or not at all.
        made_by: what its use depends on: a file that says otherwise is not used.
        interval: seconds between writings.
        training: what it is of.

    Attributes:
        resumed: how often the training was gone on with.
    """

    def __init__(self, path: Path, made_by: Mapping[str, str], interval: float, training: Training):
        self.path, self.made_by, self.interval, self.training = path, made_by, interval, training
        self.resumed = 0
        self.warned = False
        self.due = time.monotonic() + interval

    def resume(self) -> None:
        """Go on from the file, if it is there and fits."""
        try:
            written = torch.load(self.path, map_location="cpu", weights_only=True)
            if other := [name for name, value in self.made_by.items() if written["made_by"].get(name) != value]:
                raise ValueError(f"it was made with another {other[0]}")
            self.training.load(written["state"])
        except FileNotFoundError:
            return
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, EOFError, UnpicklingError) as error:
            log.warning("%s is not used and its cell starts anew: %s", self.path.name, one_line(error)[:200])
            return
        self.resumed = written["resumed"] + 1

    def __call__(self, step: int) -> None:
        """Write, if it is time to and training is not over."""
        if time.monotonic() >= self.due and not self.training.finished:
            self.write()
            self.due = time.monotonic() + self.interval

    def write(self) -> None:
        """Write the file; where that fails, say so once and let the training go on."""
        content = BytesIO()
        torch.save({"made_by": self.made_by, "resumed": self.resumed, "state": self.training.state()}, content)
        try:
            files.write_whole(self.path, content.getvalue())
        except UserError as error:
            if not self.warned:
                log.warning("no checkpoint: %s", error)
            self.warned = True


def run_cells(jobs: Sequence[Job], registry: Registry, context: Context) -> Iterator[Record]:
    """Yield the record of each job, whatever happens: what a strategy does wrong is in its record, not raised.

    Several that can are trained in one program on CUDA; on the CPU one by one.
    """
    for group in [[job] for job in jobs] if context.setting.device == "cpu" else [jobs]:
        runs = []
        for job in group:
            context.begin([job.cell.id], 0.0)
            runs.append(run := _Run(job, context))
            run.attempt(partial(run.prepare, registry))
        together = [run for run in runs if run.cell is not None and run.failure is None and run.cell.joins]
        if len(group) > 1 and together:
            context.begin([run.job.cell.id for run in together], 0.0)
            _train_together(together)
        for run in runs:
            if len(group) > 1:
                context.begin([run.job.cell.id], 0.0)
            if run.trained is None:
                run.attempt(run.train)
            run.attempt(run.measure)
            yield run.record(share=len(group))


def _train_together(runs: Sequence[_Run]) -> None:
    """Train what runs in one program; each has its outcome then, or has diverged, or must be trained alone."""
    by_trainer: dict[Any, list[tuple[_Run, Training]]] = {}
    for run in runs:
        cell = run.cell
        assert cell is not None
        training = Training(cell.network, cell.in_training, cell.train, cell.recipe, cell.order)
        by_trainer.setdefault(cast(Any, training.network).train_together, []).append((run, training))
    for train_together, pairs in by_trainer.items():
        train_together([training for _, training in pairs])
        for run, training in pairs:
            if isinstance(training.failure, DivergedError):
                run.fail(training.failure)
            elif training.failure is None and training.finished:
                run.trained = training.outcome()
    context, device = runs[0].context, runs[0].setting.device
    if context.alone and device != "cpu":
        torch.cuda.synchronize(device)  # ends the worker if the device is lost; each cell is tried alone then


def failure_of(error: BaseException, strategy: Strategy | None = None) -> Failure:
    """Return what a record says of an error; with the file and line where a strategy had its last word."""
    kind = type(error).__name__
    text = text_of(error) if isinstance(error, KNOWN) else one_line(error)
    if strategy is not None and not isinstance(error, UnsupportedError | DivergedError):
        text = f"{' '.join(text.split())[:450]}{place_of(error, strategy)}"
    trace = "" if isinstance(error, KNOWN) else "".join(traceback.format_exception(error))[-4000:]
    trace = trace.encode("utf-8", "backslashreplace").decode()
    return Failure(reason=" ".join(text.split())[:500], kind=kind, traceback=trace)


class _Run:
    """One job on its way to a record, in stages that may fail."""

    def __init__(self, job: Job, context: Context):
        self.job, self.context, self.setting = job, context, context.setting
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
            # Not torch.manual_seed, which seeds every kind of device, and notes it down for those that are not in use
            # yet, each time with a stack trace, in a list without end.
            seed = seeds.seed_of("cell", self.job.cell.id)
            torch.default_generator.manual_seed(seed)
            if self.setting.device != "cpu":
                torch.cuda.manual_seed_all(seed)
            stage()
        except BaseException as error:  # a strategy is a stranger's code and may raise anything
            if isinstance(error, KeyboardInterrupt) and not self.context.alone:
                raise
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Note what went wrong; a process of its own, whose log is read for it, says where."""
        acting = None if self.cell is None else self.cell.in_training or self.cell.in_test
        strategy = None if acting is None else acting.strategy
        self.status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), "failed")
        self.failure = failure_of(error, strategy)
        if self.context.alone and self.status != "unsupported":
            lines = [f"cell {self.job.cell.id}, {self.job.label}: {self.status}\n", *traceback.format_exception(error)]
            with suppress(OSError):  # a strategy may have closed it
                os.write(2, "".join(lines).encode("utf-8", "backslashreplace"))

    def prepare(self, registry: Registry) -> None:
        """Draw the data and build the network."""
        self.cell = prepare(self.job, registry, self.context)

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
            store.weights_path(self.setting.out, self.job.cell.id).unlink(missing_ok=True)
        recipe, early = cell.recipe, _early(cell)
        training = Training(cell.network, cell.in_training, cell.train, recipe, cell.order, cell.teacher, early)
        steps, watch = training.steps, None
        if cell.recipe.watch:
            train_, test = (cell.train, cell.in_training), (cell.test, cell.in_test)
            watch = Watch(cell.recipe, steps, cell.network, train_, test)
        checkpoint = self._checkpoint(training)
        if checkpoint is not None:
            checkpoint.resume()
        sooner = cell.recipe.stop_at_zero_loss or cell.recipe.stop_below or cell.recipe.patience
        self.trained = training.run(self._reports(0 if sooner else training.total, watch or checkpoint))
        if checkpoint is not None and checkpoint.resumed:
            self.result.notes["resumed"] = str(checkpoint.resumed)
        if isinstance(steps, Autograd) and steps.parts > cell.recipe.accumulate:
            self.result.notes["memory"] = f"batches in {steps.parts} parts: the memory holds no larger ones"
        if inactive := _inactive(cell):
            self.result.notes["inactive"] = inactive
        if watch is not None:
            add_watch(self.result, watch, int(self.trained["steps"]), cell.task)

    def _reports(self, total: int, first: Callable[[int], None] | None = None) -> Callable[[int], None]:
        """Return what is called with how many steps, or test items, are done; it tells the share every second.

        Args:
            total: of the steps or items; 0 if they may be fewer than anybody knows, of which no share is told.
            first: called before.
        """
        due = time.monotonic() + EVERY

        def report(done: int) -> None:
            nonlocal due
            if first is not None:
                first(done)
            if total and done and time.monotonic() >= due:
                self.context.begin([self.job.cell.id], done / total)
                due = time.monotonic() + EVERY

        return report

    def _fit(self, cell: Prepared, acting: Actor | None) -> None:
        """Let the strategy that acts now look at training images, unless it did or does not want to."""
        if acting is None or "fit" in self.result.notes or not wants_images(acting):
            return
        if cell.in_training is not None and cell.task.trains and not cell.answers:
            raise UnsupportedError(
                f"'{acting.strategy.name}' needs a trained network, but this training starts from random weights: it "
                "belongs to the tracks frozen and tuned"
            )
        self.result.notes["fit"] = fit_on(cell, acting, self.context.fitted)

    def _checkpoint(self, training: Training) -> Checkpoint | None:
        """Return the cell's checkpoint, or None: what was seen while training is in none."""
        interval, job, cell = self.setting.how.checkpoint, self.job, self.cell
        assert cell is not None
        if not interval or training.recipe.watch or not isinstance(training.steps, Autograd):
            return None
        made_by = {
            "cell": job.cell.id, "revision of the strategy": job.origin.revision, "start": cell.initial,
            "torch": str(torch.__version__), "device": torch.device(self.setting.device).type,
            "sparsebench": __version__,
        }  # fmt: skip
        return Checkpoint(store.checkpoint_path(self.setting.out, job.cell.id), made_by, interval, training)

    def measure(self) -> None:
        """Test it and fill the result; keep the weights if others start from them."""
        assert self.cell is not None and self.trained is not None
        self._fit(self.cell, self.cell.in_test)
        context, cell = self.context, self.job.cell
        key = self.job.label, self.job.origin.identity, cell.task.name, cell.model.name
        tests_only = self.cell.outcome is not None or not self.cell.task.trains
        on_done = self._reports(len(self.cell.test.labels)) if tests_only else None
        measure(
            self.result, self.cell, self.trained, self.setting.how.batch,
            leaks=key not in context.trusted, on_done=on_done,
        )  # fmt: skip
        context.trusted.add(key)
        if "images_per_s" in self.result.metrics:
            alone = "alone on its machine" if self.setting.device == "cpu" else "alone on its GPU"
            self.result.notes["timed"] = alone if self.setting.how.exclusive else "perhaps beside other cells"
        if self.job.keep_weights:
            content = weights_file(self.cell.network, self.cell.initial, self.trained)
            files.write_whole(store.weights_path(self.setting.out, self.job.cell.id), content)
            self.result.notes["weights"] = hashlib.sha256(content).hexdigest()

    def record(self, share: int) -> Record:
        """Return the record; `share` runs divide the time between them."""
        self.cell = None  # its memory
        seconds = (time.perf_counter() - self.clock) / share
        if self.failure is not None:
            return self.job.record_of_failure(self.status, self.failure, self.started, seconds)
        job, device = self.job, self.setting.device
        device = device if device == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"
        return Record(
            cell=job.cell, cell_id=job.cell.id, status=self.status, **vars(self.result), origin=job.origin,
            kind=job.kind, label=job.label, environment=digest(environment()), device=device,
            started=self.started, seconds=round(seconds, 3),
        )  # fmt: skip


def _early(cell: Prepared) -> EarlyStopping | None:
    """Return what ends the cell's training early, if anything does."""
    if not cell.recipe.patience:
        return None
    assert cell.validation is not None and cell.data.validation is not None
    return EarlyStopping(cell.in_test, cell.validation, cell.data.validation.groups)


def _inactive(cell: Prepared) -> str:
    """Return which published terms of the strategy's loss had no part in the training, and why; "" if all had."""
    actor = cell.in_training
    if actor is None or not actor.acts:
        return ""
    weightless = actor.strategy.inactive(teacher=True)
    untaught = [term for term in actor.strategy.inactive(cell.teacher is not None) if term not in weightless]
    reasons = {"weight 0": weightless, "no teacher": untaught}
    return "; ".join(f"{', '.join(terms)}: {why}" for why, terms in reasons.items() if terms)


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch deterministic for a while: one thread, no TF32, deterministic kernels where there are any."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = torch.get_num_threads(), torch.get_deterministic_debug_mode(), convolutions.fp32_precision
    filled = memory.fill_uninitialized_memory
    torch.set_num_threads(THREAD_LIMIT)
    # As use_deterministic_algorithms(True, warn_only=True), which first imports torch's compiler for seconds.
    torch.set_deterministic_debug_mode("warn")
    memory.fill_uninitialized_memory = False  # costs a kernel for each new tensor
    convolutions.fp32_precision = "ieee"  # the one place where TF32 is on unless told otherwise
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_deterministic_debug_mode(before[1])
        convolutions.fp32_precision = before[2]
        memory.fill_uninitialized_memory = filled


def main(line: Line) -> None:
    """Answer jobs until the line is closed, or memory or the device is not what the next cell needs."""
    with suppress(OSError):  # Linux, if it lacks memory, chooses this process, and not the run or somebody else's
        Path("/proc/self/oom_score_adj").write_text("900", encoding="utf-8")
    faulthandler.enable()  # a crash says in the log where it was
    setting: Setting = line.recv()
    registry, timeout = Registry(), setting.how.limits()[0]

    def begin(cells: Sequence[str], share: float) -> None:
        if not share:
            forget_peak()
        if not share and timeout:  # shortly before it is killed, even if it holds the lock
            faulthandler.dump_traceback_later(min(timeout - min(1.0, timeout / 4), LONGEST))
        line.say(Message(at=tuple(cells), share=share))

    context = Context(setting, True, begin)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment()  # as it is before strangers' code is here
        line.say(Message())
        while True:
            jobs: list[Job] = line.recv()
            # Who waits says so: no second of it is a cell's.
            with turn(setting.device, lambda: line.say(Message())) if setting.how.exclusive else nullcontext():
                out_of_memory = False
                for done, record in enumerate(run_cells(jobs, registry, context), 1):
                    faulthandler.cancel_dump_traceback_later()
                    out_of_memory = out_of_memory or record.status == "oom"
                    # Cells that were trained together are all trained by now.
                    unfit = (out_of_memory and done == len(jobs)) or device_is_lost(setting.device)
                    line.say(Message(record=record.model_copy(update={"memory": peak()}), unfit=unfit))
                    if unfit:
                        return


def device_is_lost(device: str) -> bool:
    """Say whether a CUDA device answers nothing but errors from now on, in this process."""
    if not device.startswith("cuda"):
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
