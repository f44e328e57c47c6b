"""What strategies do to single test pictures: which cells to train for it, and what became of the pictures in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from sparsebench.budget import FULL
from sparsebench.errors import UserError
from sparsebench.models.acting import Pass
from sparsebench.plugin.registry import Registry
from sparsebench.strategy import Mix
from sparsebench.sweep import run as runs
from sparsebench.sweep import store
from sparsebench.sweep.cell import canonical
from sparsebench.sweep.engine.limits import Limits
from sparsebench.sweep.engine.slots import first_of
from sparsebench.sweep.expand import Request
from sparsebench.sweep.job import Job
from sparsebench.sweep.prepare import Context, Prepared, prepare
from sparsebench.sweep.record import Record
from sparsebench.sweep.run import Files, Plan
from sparsebench.sweep.run_cell import failure_of
from sparsebench.sweep.worker import one_thread
from sparsebench.tasks.base import Data, Split
from sparsebench.tokens import membership_after
from sparsebench.training.steps import predictions


@dataclass(frozen=True)
class Stage:
    """The tokens after one choice, of n pictures of N patches.

    Attributes:
        place: "input", "block 1", "before block 1".
        count: tokens that went on.
        token: (n, N) which of them each patch is in, -1 for none; None where patches are mixed.
    """

    place: str
    count: int
    token: np.ndarray | None


@dataclass(frozen=True)
class Shown:
    """What one strategy did.

    Attributes:
        stages: each choice; none where all tokens stayed.
        predicted: (n,) class numbers at the end; empty where it has no result.
        why: why not.
    """

    label: str
    budget: str
    stages: list[Stage]
    predicted: np.ndarray
    why: str = ""


@dataclass(frozen=True)
class Pictures:
    """What is to be drawn, of n test pictures.

    Attributes:
        title: task, model, and how they were trained.
        grid: (rows, columns) of the patches.
        pictures: (n, height, width, 3) uint8.
        matters: (n, height, width) booleans, what matters to the label.
        names: what each is: its group, or its class.
        labels: (n,) class numbers; `classes` their names.
    """

    title: str
    grid: tuple[int, int]
    pictures: np.ndarray
    matters: np.ndarray
    names: list[str]
    labels: np.ndarray
    classes: tuple[str, ...]
    shown: list[Shown]


def show(
    request: Request,
    files: Files,
    out: Path,
    device: str,
    jobs: int | None,
    rerun: runs.Rerun,
    checkpoint: float,
    n: int,
    on_plan: Callable[[Plan, int], None],
    on_record: Callable[[Record], None],
    timeout: str | None = None,
    memory_limit: str | None = None,
    on_stop: Callable[[], None] | None = None,
) -> Pictures:
    """Train what a request lacks for its pictures, and return what its strategies do to n of them; see `look`.

    Args:
        request: of one task and one repetition.
        files: where its pictures and first weights come from.
        out: the run's folder.
        device, jobs, rerun, checkpoint: as for a run.
        n: the most pictures.
        on_plan: called with the plan and the number of workers before the first cell starts.
        on_record: called with each record.
        timeout, memory_limit, on_stop: as for a run.

    Raises:
        UserError: anything unknown, out of range, missing or unwritable, or no strategy has a result.
    """
    registry = Registry()
    device = runs.resolve_device(device)
    plan = narrowed(runs.plan(request, files, registry, out, rerun), files, registry, out)
    workers = runs.workers_for(plan, device, jobs)
    limits = Limits.given(timeout, memory_limit, workers)
    store.check_writable(out)
    on_plan(plan, workers)
    runs.execute(plan, registry, out, device, workers, on_record, checkpoint, limits, on_stop)
    return look(plan.jobs, store.read(out), registry, Context(out, first_of(device), plan.locations), n)


def narrowed(plan: Plan, files: Files, registry: Registry, out: Path) -> Plan:
    """Return the plan of the largest number of training samples alone, in which the weights of every cell are kept.

    What has a result but no weights is trained again. Pictures are located for all of it: what is trained is drawn.

    Raises:
        UserError: the task gives no pictures, they are not there, or there are several tasks or models.
    """
    wanted = [job for job in plan.jobs if not job.keep_weights]
    task = registry.task(wanted[0].cell.task.name)
    if task.inputs != "images":
        allowed = [cls.name for cls in registry.tasks() if cls.inputs == "images"]
        raise UserError("show-tokens needs a task of pictures", got=f"'{task.name}'", allowed=allowed)
    settings = {canonical([job.cell.task.model_dump(), job.cell.model.model_dump()]) for job in wanted}
    if len(settings) > 1:
        raise UserError(
            "show-tokens takes one task with one model", got=f"{len(settings)} of them",
            next_step="name their parameters with --task and --model",
        )  # fmt: skip
    largest, known = max(job.cell.n_train for job in wanted), store.read(out)
    jobs = [job.model_copy(update={"keep_weights": True}) for job in wanted if job.cell.n_train == largest]
    again = {job.cell.id for job in plan.todo} | {
        job.cell.id
        for job in jobs
        if (record := known.get(job.cell.id))
        and record.status == "ok"
        and not store.has_weights(out, job.cell.id, known)
    }
    todo = [job for job in jobs if job.cell.id in again]
    starts = [job for job in plan.jobs if job.cell.id in {own.after for own in jobs}]
    needed = {job.after for job in todo}
    first = [
        job
        for job in starts
        if job.cell.id in needed and (job.cell.id in again or not store.has_weights(out, job.cell.id, known))
    ]
    return replace(plan, jobs=starts + jobs, todo=first + todo, locations=files.places(starts + jobs, plan.locations))


def look(jobs: Sequence[Job], records: Mapping[str, Record], registry: Registry, context: Context, n: int) -> Pictures:
    """Return what the trained cells do to n pictures of the test split, spread over its groups or else its classes.

    Args:
        jobs: from `narrowed`; what others start from is not shown.
        records: at least theirs, by cell.
        registry: where their strategies are.
        context: where their weights are, and where to run them.
        n: the most pictures.

    Raises:
        UserError: none of them has a result.
    """
    shown, scene = [], None
    starts = {job.after for job in jobs}
    compared = [job for job in jobs if job.cell.id not in starts]
    with one_thread():
        for job in compared:
            failure = records[job.cell.id].failure
            if failure is None:
                try:
                    prepared = _trained(job, registry, context)
                    scene = scene or (prepared, spread(prepared.data, n))
                    shown.append(_shown(job, prepared, scene[1]))
                except (Exception, SystemExit) as error:  # a strategy is a stranger's code and may raise anything
                    failure = failure_of(error)
            if failure is not None:
                shown.append(Shown(job.label, _budget(job), [], np.empty(0, int), failure.reason))
    if scene is None:
        raise UserError(f"no strategy has a result; {shown[0].label}: {shown[0].why}")
    return _pictures(compared[0], *scene, shown)


def spread(data: Data, n: int) -> np.ndarray:
    """Return at most n test items, the first ones of each group or else of each class, group by group."""
    kinds = data.test.groups if len(data.group_names) > 1 else data.test.labels
    turn = np.empty(len(kinds), int)
    for kind in np.unique(kinds):
        turn[kinds == kind] = np.arange((kinds == kind).sum())
    chosen = np.lexsort((kinds, turn))[:n]
    return chosen[np.argsort(kinds[chosen], kind="stable")]


def _trained(job: Job, registry: Registry, context: Context) -> Prepared:
    """Return the cell with its trained weights, whatever it started from."""
    bare = job.model_copy(update={"cell": job.cell.model_copy(update={"init": None})})
    prepared = prepare(bare, registry, context)
    prepared.network.module.load_state_dict(load_file(store.weights_path(context.out, job.cell.id)))
    prepared.network.module.eval()
    return prepared


@torch.no_grad()
def _shown(job: Job, cell: Prepared, rows: np.ndarray) -> Shown:
    items = torch.from_numpy(rows).to(cell.test.items.device)
    outputs, acting = cell.test.forward(cell.network, cell.in_test, items, visit=0, training=False)
    stages = [] if acting is None else list(_stages(acting))
    return Shown(job.label, _budget(job), stages, predictions(cell.recipe, outputs).cpu().numpy())


def _budget(job: Job) -> str:
    return "" if job.cell.budget == FULL else job.cell.budget.label


def _stages(acting: Pass) -> Iterator[Stage]:
    """Yield what became of the patches at each choice."""
    place = {"input": "the input", "attention": "block {}", "block": "before block {}"}[acting.site]
    token: Tensor | None = torch.arange(acting.count, device=acting.index.device).expand(len(acting.index), -1)
    for decision in acting.decisions:
        if token is not None and not isinstance(decision.plan, Mix):
            token = membership_after(decision.plan, token, decision.before.shape[1])
        else:
            token = None
        shown = None if token is None else token.cpu().numpy()
        yield Stage(place.format(decision.block), decision.after.shape[1], shown)


def _pictures(job: Job, cell: Prepared, rows: np.ndarray, shown: list[Shown]) -> Pictures:
    data, test, grid = cell.data, cell.data.test, cell.network.grid
    assert grid is not None
    groups = len(data.group_names) > 1
    kinds, names = (test.groups, data.group_names) if groups else (test.labels, data.classes)
    pictures = test.inputs[rows].transpose(0, 2, 3, 1)
    share = cell.test.relevance
    relevant = None if share is None else share[torch.from_numpy(rows)].cpu().numpy() > 0
    return Pictures(
        f"{job.cell.task.name}, {job.cell.model.name}, {job.cell.n_train} training samples",
        grid, pictures, matters(test, rows, relevant, grid), [names[kind] for kind in kinds[rows]],
        test.labels[rows], data.classes, shown,
    )  # fmt: skip


def matters(split: Split, rows: np.ndarray, relevant: np.ndarray | None, grid: tuple[int, int]) -> np.ndarray:
    """Return (n, height, width) booleans, the boxes of what matters; patches of which some does where that is all.

    Nothing does where nobody knows what.

    Args:
        split: of pictures.
        rows: (n,) which of them.
        relevant: (n, N) which patches matter, or None.
        grid: (rows, columns) of the patches.
    """
    height, width = split.inputs.shape[-2:]
    if relevant is None:
        return np.zeros((len(rows), height, width), dtype=bool)
    if split.boxes is None or split.order is not None:
        patches = relevant.reshape(len(rows), *grid)
        return patches.repeat(height // grid[0], axis=1).repeat(width // grid[1], axis=2)
    top, left, tall, wide = split.boxes[rows].T[:, :, None]
    inside = [(low <= np.arange(length)) & (np.arange(length) < low + size)
              for low, size, length in ((top, tall, height), (left, wide, width))]  # fmt: skip
    return inside[0][:, :, None] & inside[1][:, None, :]
