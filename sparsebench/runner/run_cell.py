"""Running cells in one process: prepare, train and test each cell, and return its record."""

from __future__ import annotations

import faulthandler
import hashlib
import logging
import os
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

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
from sparsebench.training.steps import Autograd, Steps

EVERY = 1.0
"""Seconds between two reports of progress."""
STATUSES: dict[type[BaseException], Status] = {
    torch.OutOfMemoryError: "oom", MemoryError: "oom", NotReadyError: "skipped", UnsupportedError: "unsupported",
}  # fmt: skip
"""Statuses of cells by their exception. After other exceptions the status is "failed"."""
KNOWN = (StrategyError, DivergedError, UnsupportedError, UserError)
"""Exceptions whose message is sufficient. Others are stored with their type and traceback."""
log = logging.getLogger(__name__)


class Checkpoint:
    """Writes the state of a cell's training at intervals. It is called after each step.

    A checkpoint is written atomically. It is used only if cell, revision, start, device type and versions are equal.

    Attributes:
        resumed: how often the training was resumed.
    """

    def __init__(self, job: Job, cell: Prepared, setting: Setting, training: Training):
        self.path, self.training = store.checkpoint_path(setting.out, job.cell.id), training
        self.interval, self.resumed, self.warned = setting.execution.checkpoint, 0, False
        self.due = time.monotonic() + self.interval
        self.made_by = {
            "cell": job.cell.id, "revision of the strategy": job.origin.revision, "start": cell.start.name,
            "torch": str(torch.__version__), "device": torch.device(setting.device).type, "sparsebench": __version__,
        }  # fmt: skip

    def resume(self) -> None:
        """Continue from the file, if it exists and can be used."""
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True)
            if other := [name for name, value in self.made_by.items() if content["made_by"].get(name) != value]:
                raise ValueError(f"it was made with another {other[0]}")
            self.training.load(content["state"])
            self.resumed = content["resumed"] + 1
        except FileNotFoundError:
            pass
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, EOFError, UnpicklingError) as error:
            reason = one_line(error)[:200]
            log.warning("checkpoint %s is not used, training starts from the beginning: %s", self.path.name, reason)

    def __call__(self, step: int) -> None:
        """Write the file if it is due and the training is not finished."""
        if time.monotonic() >= self.due and not self.training.finished:
            self.write()
            self.due = time.monotonic() + self.interval

    def write(self) -> None:
        """Write the file. If that fails, warn once; the training continues."""
        content = BytesIO()
        torch.save({"made_by": self.made_by, "resumed": self.resumed, "state": self.training.state()}, content)
        try:
            files.write_whole(self.path, content.getvalue())
        except UserError as error:
            if not self.warned:
                log.warning("no checkpoint: %s", error)
            self.warned = True


Trained = tuple[Prepared, dict[str, float] | DivergedError, float]
"""A cell trained together with others, its outcome or error, and its share of the seconds."""


def run_cells(jobs: Sequence[Job], registry: Registry, context: Context) -> Iterator[Record]:
    """Yield the record of each job. Errors of a strategy are not raised but are in the record.

    On CUDA, jobs that support it are trained together in one program; on the CPU jobs run one by one. With
    `exclusive`, wait first until no other cell uses the device.
    """
    device, exclusive = context.setting.device, context.setting.execution.exclusive
    # The callback restarts the clock of the time limit, so waiting does not count.
    with turn(device, lambda: context.begin((), 0.0)) if exclusive else nullcontext():
        several = len(jobs) > 1 and device != "cpu"
        together = _train_together(jobs, registry, context) if several else {}
        for job in jobs:
            yield _run_cell(job, registry, context, together.pop(job.cell.id, None))


def _train_together(jobs: Sequence[Job], registry: Registry, context: Context) -> dict[str, Trained]:
    """Train the jobs that can be trained in one program. Jobs that fail first or must be trained alone are left out."""
    begun, cells, device = time.perf_counter(), dict[str, Prepared](), context.setting.device
    by_trainer = defaultdict[Any, list[tuple[str, Training]]](list)
    for job in jobs:
        context.begin([job.cell.id], 0.0)
        with suppress(Exception, SystemExit):  # the job is then tried alone, and its record has the error
            _seed(job, device)
            cell = prepare(job, registry, context)
            trainer = getattr(cell.network, "train_together", None)
            if trainer is not None and not cell.recipe.watch:
                training = Training(cell.network, cell.in_training, cell.train, cell.recipe, cell.order)
                cells[job.cell.id] = cell
                by_trainer[trainer].append((job.cell.id, training))
    context.begin(list(cells), 0.0)
    outcomes = dict[str, dict[str, float] | DivergedError]()
    for train_together, pairs in by_trainer.items():
        train_together([training for _, training in pairs])
        for cell_id, training in pairs:
            if isinstance(training.failure, DivergedError):
                outcomes[cell_id] = training.failure
            elif training.failure is None and training.finished:
                outcomes[cell_id] = training.outcome()
    if context.alone:
        torch.cuda.synchronize(device)  # raises if the device is lost: the worker ends, and cells are tried alone
    share = (time.perf_counter() - begun) / len(jobs)
    return {cell_id: (cells[cell_id], outcome, share) for cell_id, outcome in outcomes.items()}


def _run_cell(job: Job, registry: Registry, context: Context, trained: Trained | None) -> Record:
    """Return the record of one job, whose cell may already be trained."""
    context.begin([job.cell.id], 0.0)
    cell, outcome, before = trained or (None, None, 0.0)
    started, clock, result = datetime.now(UTC).isoformat(), time.perf_counter() - before, Result()
    device = context.setting.device
    try:
        if cell is None or outcome is None:
            _seed(job, device)
            cell = prepare(job, registry, context)
            _seed(job, device)
            outcome = _train(job, cell, context, result)
        elif isinstance(outcome, DivergedError):
            raise outcome
        _seed(job, device)
        _measure(job, cell, outcome, context, result)
    except BaseException as error:  # a third-party strategy may raise anything
        if isinstance(error, KeyboardInterrupt) and not context.alone:
            raise
        status: Status = next((status for kind, status in STATUSES.items() if isinstance(error, kind)), "failed")
        failure = failure_of(error, None if cell is None or cell.actor is None else cell.actor.strategy)
        if context.alone and status != "unsupported":  # a worker writes it to its log
            lines = [f"cell {job.cell.id}, {job.label}: {status}\n", *traceback.format_exception(error)]
            with suppress(OSError):  # a strategy may have closed the log
                os.write(2, "".join(lines).encode("utf-8", "backslashreplace"))
        return job.record_of_failure(status, failure, started, time.perf_counter() - clock)
    return Record(
        cell=job.cell, cell_id=job.cell.id, status="ok", **vars(result), origin=job.origin, kind=job.kind,
        label=job.label, environment=digest(environment()),
        device=device if device == "cpu" else f"{device} {torch.cuda.get_device_name(device)}", started=started,
        seconds=round(time.perf_counter() - clock, 3),
    )  # fmt: skip


def _seed(job: Job, device: str) -> None:
    """Seed torch's generators by the cell's id.

    torch.manual_seed would queue a call with a stack trace for each unused kind of device, in a list without end.
    """
    seed = seeds.seed_of("cell", job.cell.id)
    torch.default_generator.manual_seed(seed)
    if device != "cpu":
        torch.cuda.manual_seed_all(seed)


def failure_of(error: BaseException, strategy: Strategy | None = None) -> Failure:
    """Return the failure of a record from an error, with the last file and line of the strategy's code."""
    kind = type(error).__name__
    text = text_of(error) if isinstance(error, KNOWN) else one_line(error)
    if strategy is not None and not isinstance(error, UnsupportedError | DivergedError):
        text = f"{' '.join(text.split())[:450]}{place_of(error, strategy)}"
    trace = "" if isinstance(error, KNOWN) else "".join(traceback.format_exception(error))[-4000:]
    trace = trace.encode("utf-8", "backslashreplace").decode()
    return Failure(reason=" ".join(text.split())[:500], kind=kind, traceback=trace)


def _train(job: Job, cell: Prepared, context: Context, result: Result) -> dict[str, float]:
    """Train a cell, unless it tests a trained network; return the outcome, see `Training.outcome`."""
    if cell.outcome is not None or not cell.task.trains:
        return cell.outcome or {}
    _fit(cell, cell.in_training, context, result)
    recipe = cell.recipe
    if job.keep_weights:  # weights of an earlier training must not be taken for this one's
        store.weights_path(context.setting.out, job.cell.id).unlink(missing_ok=True)
    early = None
    if recipe.patience:
        assert cell.validation is not None and cell.data.validation is not None
        early = EarlyStopping(cell.in_test, cell.validation, cell.data.validation.groups)
    training = Training(cell.network, cell.in_training, cell.train, recipe, cell.order, cell.teacher, early)
    steps, watch, checkpoint = training.steps, None, None
    if recipe.watch:  # without checkpoints, as they do not contain what a Watch has measured
        watch = Watch(cell, steps)
    elif context.setting.execution.checkpoint and isinstance(steps, Autograd):
        checkpoint = Checkpoint(job, cell, context.setting, training)
        checkpoint.resume()
    sooner = recipe.stop_at_zero_loss or recipe.stop_below or recipe.patience
    outcome = training.run(_reports(job, context, 0 if sooner else training.total, watch or checkpoint))
    result.notes |= _notes_on(cell, steps, checkpoint)
    if watch is not None:
        add_watch(result, watch, int(outcome["steps"]))
    return outcome


def _reports(
    job: Job, context: Context, total: int, first: Callable[[int], None] | None = None
) -> Callable[[int], None]:
    """Return a function to call with the number of finished steps or test items. It reports their share every second.

    It also calls `first` with this number. If `total` is 0, as training may end early, it reports no share.
    """
    due = time.monotonic() + EVERY

    def report(done: int) -> None:
        nonlocal due
        if first is not None:
            first(done)
        if total and done and time.monotonic() >= due:
            context.begin([job.cell.id], done / total)
            due = time.monotonic() + EVERY

    return report


def _fit(cell: Prepared, acting: Actor | None, context: Context, result: Result) -> None:
    """Fit the strategy on training images, if it has a `fit` and was not fitted before."""
    if acting is None or "fit" in result.notes or not wants_images(acting):
        return
    if cell.in_training is not None and cell.task.trains and not cell.start.head:
        raise UnsupportedError(
            f"'{acting.strategy.name}' needs a trained network, but this training starts from random weights: it "
            "belongs to the tracks frozen and tuned"
        )
    result.notes["fit"] = fit_on(cell, acting, context.fitted)


def _notes_on(cell: Prepared, steps: Steps, checkpoint: Checkpoint | None) -> dict[str, str]:
    """Return notes on a training: resumed, batches in parts, and terms of the loss without effect."""
    notes, actor = dict[str, str](), cell.in_training
    if checkpoint is not None and checkpoint.resumed:
        notes["resumed"] = str(checkpoint.resumed)
    if isinstance(steps, Autograd) and steps.parts > cell.recipe.accumulate:
        notes["memory"] = f"batches in {steps.parts} parts: the memory holds no larger ones"
    if actor is not None and actor.acts:
        weightless = actor.strategy.inactive(teacher=True)
        untaught = [term for term in actor.strategy.inactive(cell.teacher is not None) if term not in weightless]
        reasons = {"weight 0": weightless, "no teacher": untaught}
        if inactive := "; ".join(f"{', '.join(terms)}: {why}" for why, terms in reasons.items() if terms):
            notes["inactive"] = inactive
    return notes


def _measure(job: Job, cell: Prepared, outcome: dict[str, float], context: Context, result: Result) -> None:
    """Test a trained cell and fill its result; store the weights if other cells need them."""
    _fit(cell, cell.in_test, context, result)
    execution = context.setting.execution
    key = job.label, job.origin.identity, job.cell.task.name, job.cell.model.name
    tests_only = cell.outcome is not None or not cell.task.trains
    on_done = _reports(job, context, len(cell.test.labels)) if tests_only else None
    measure(result, cell, outcome, execution.batch, leaks=key not in context.trusted, on_done=on_done)
    context.trusted.add(key)
    if "images_per_s" in result.metrics:
        alone = "alone on its machine" if context.setting.device == "cpu" else "alone on its GPU"
        result.notes["timed"] = alone if execution.exclusive else "perhaps beside other cells"
    if job.keep_weights:
        content = weights_file(cell.network, cell.start.name, outcome)
        files.write_whole(store.weights_path(context.setting.out, job.cell.id), content)
        result.notes["weights"] = hashlib.sha256(content).hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
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
    setting: Setting = line.recv()
    registry, timeout = Registry(), setting.execution.limits()[0]

    def begin(cells: Sequence[str], share: float) -> None:
        if not share:
            forget_peak()
        if not share and timeout:  # shortly before the time limit, even if a thread holds the GIL
            faulthandler.dump_traceback_later(timeout - min(1.0, timeout / 4))
        line.say(Message(at=tuple(cells), share=share))

    context = Context(setting, True, begin)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        environment()  # cached now, before third-party code can change it
        line.say(Message())
        while True:
            jobs: list[Job] = line.recv()
            out_of_memory = False
            for done, record in enumerate(run_cells(jobs, registry, context), 1):
                faulthandler.cancel_dump_traceback_later()
                out_of_memory = out_of_memory or record.status == "oom"
                # After a cell was out of memory, the rest of its batch still runs here: it may already be trained.
                unfit = (out_of_memory and done == len(jobs)) or device_is_lost(setting.device)
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
