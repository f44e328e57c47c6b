"""Show which class probes predict for each patch of test pictures, from the records of a run."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparsebench.errors import UserError
from sparsebench.inspection.pictures import Block, Ink, Scene, sheet, spread, tint
from sparsebench.measure.patches import BACKGROUND, IGNORE, patch_labels
from sparsebench.plan.contenders import closed_cost, specs_of
from sparsebench.plan.jobs import Job
from sparsebench.plan.locate import official_places
from sparsebench.plan.request import Execution, Files, Request
from sparsebench.plugin.registry import Registry
from sparsebench.records import store
from sparsebench.records.record import Record, canonical, numbers_of
from sparsebench.runner import run as runs
from sparsebench.runner.progress import Callbacks
from sparsebench.stats import style
from sparsebench.strategy.budget import FULL
from sparsebench.strategy.spec import parse
from sparsebench.tasks.base import Data
from sparsebench.tasks.patches import Patches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STRENGTH = 0.6
"""The strength of the tint of a class."""
COLOURS = (*style.COLOURS, "#000000", "#17becf", "#7f3c8d", "#8c564b")
"""Colours of classes: without yellow, which outlines objects."""
NOT_JUDGED = -1
DENSE = "dense"


@dataclass(frozen=True)
class Predicted:
    """The classes that one strategy's probe predicts.

    Attributes:
        label, budget: the strategy.
        classes: (n, N) predicted classes of the patches of n pictures, NOT_JUDGED for those to ignore.
        iou: intersection over union of the whole test; None without an object.
        why: why there is no result.
    """

    label: str
    budget: str
    classes: np.ndarray
    iou: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Predictions(Scene):
    """Test pictures, with true and predicted classes of their patches.

    Attributes:
        patch_classes: names of the classes of patches.
        truth: (n, N) true classes, NOT_JUDGED for those to ignore.
        predicted: the predictions of each strategy.
    """

    patch_classes: tuple[str, ...]
    truth: np.ndarray
    predicted: Sequence[Predicted]


def show_predictions(
    request: Request,
    files: Files,
    execution: Execution,
    out: Path,
    callbacks: Callbacks,
    n: int,
    registry: Registry | None = None,
) -> Predictions:
    """Run the missing cells of a request, and return what its probes predict for n test pictures.

    The pictures are spread over the classes. They are those of the first repetition, with the most training images.

    Args:
        request: one task `patches` with one model.
        files, execution, out, callbacks: see `runner.run.run_missing`.
        n: maximal number of pictures.
        registry: has the plugin files that are loaded already, if any.

    Raises:
        UserError: an argument is unknown, out of range, missing or unwritable, or there are several tasks or models.
    """
    registry = registry or Registry()
    plan = runs.run_missing(request, files, execution, registry, out, callbacks)
    jobs = _jobs_shown(plan.whole)
    places = {**plan.locations, **official_places(files, jobs, plan.locations)}
    cell = jobs[0].cell
    _, task, model = registry.resolve(cell)
    cost = closed_cost(task, model.located(places))
    if cost is None:
        raise UserError(f"the number of patches of model '{model.name}' is not known")
    side = int(np.sqrt(cost.tokens))
    data = task.draw(cell.drawn, cell.repetition, places)
    assert data.test.segments is not None
    labels = patch_labels(data.test.segments, (side, side))
    rows = spread(data, n)
    records = store.read(out)
    predicted = [_predicted(job, records[job.cell.id], labels, rows) for job in jobs]
    return _scene(data, (side, side), labels, rows, predicted, f"{task.name}, {model.name}")


def _jobs_shown(jobs: Sequence[Job]) -> list[Job]:
    """Return the requested jobs of the first repetition with the most training images, those of dense first.

    Raises:
        UserError: they have several tasks or models.
    """
    requested = [job for job in jobs if job.requested and job.cell.repetition == 0]
    most = max(job.cell.n_train for job in requested)
    shown = [job for job in requested if job.cell.n_train == most]
    settings = {canonical([job.cell.task.model_dump(), job.cell.model.model_dump()]) for job in shown}
    if len(settings) > 1:
        raise UserError(
            "only one task with one model is possible here",
            got=f"{len(settings)} of them",
            next_step="give their parameters with --task and --model, and one file of weights",
        )
    return sorted(shown, key=lambda job: job.cell.strategy.name != DENSE)


def _predicted(job: Job, record: Record, labels: np.ndarray, rows: np.ndarray) -> Predicted:
    """Return the predictions of a record for the pictures `rows`, from the (n, N) true classes of all."""
    budget = "" if job.cell.budget == FULL else job.cell.budget.label
    if record.outcomes is None:
        why = "no outcomes" if record.failure is None else record.failure.reason
        return Predicted(job.label, budget, np.empty(0, int), why=why)
    classes = np.full(labels.shape, NOT_JUDGED)
    classes[labels != IGNORE] = numbers_of(record.outcomes.predicted, record.outcomes.n)
    return Predicted(job.label, budget, classes[rows], record.metrics["iou"].value)


def _scene(
    data: Data,
    grid: tuple[int, int],
    labels: np.ndarray,
    rows: np.ndarray,
    predicted: Sequence[Predicted],
    title: str,
) -> Predictions:
    test = data.test
    assert test.segments is not None
    segments = test.segments[rows]
    return Predictions(
        f"{title}: predicted classes of patches",
        grid,
        test.inputs[rows].transpose(0, 2, 3, 1),
        (segments != BACKGROUND) & (segments != IGNORE),
        [data.classes[label] for label in test.labels[rows]],
        test.labels[rows],
        data.classes,
        data.patch_classes,
        np.where(labels[rows] == IGNORE, NOT_JUDGED, labels[rows]),
        predicted,
    )


def figure(pictures: Predictions) -> Figure:
    """Return a figure with the pictures, their true classes, and a block with the predictions of each strategy."""
    shown = [pictures.truth, *(each.classes for each in pictures.predicted if not each.why)]
    present = sorted({int(k) for classes in shown for k in np.unique(classes)} - {BACKGROUND, NOT_JUDGED})
    inks = {k: Ink(COLOURS[place % len(COLOURS)], STRENGTH) for place, k in enumerate(present)}
    blocks = [Block("truth", "", [("", _tiles(pictures, pictures.truth, inks))])]
    for each in pictures.predicted:
        if each.why:
            why = textwrap.shorten(f"no result: {each.why}", 80, placeholder=" ...")
            blocks.append(Block(each.label, f"{each.budget}\n{why}", []))
            continue
        caption = "" if each.iou is None else f"IoU of the test {100 * each.iou:.1f} %"
        blocks.append(Block(each.label, each.budget, [(caption, _tiles(pictures, each.classes, inks))]))
    legend = {pictures.patch_classes[k]: ink for k, ink in inks.items()}
    grey = "not judged" if any((classes == NOT_JUDGED).any() for classes in shown) else ""
    return sheet(pictures, blocks, legend, grey=grey, outlined="outline of the object")


def _tiles(pictures: Predictions, classes: np.ndarray, inks: dict[int, Ink]) -> list[np.ndarray]:
    """Return the pictures with each patch in the colour of its class."""
    tiles = []
    for picture, matters, row in zip(pictures.pictures, pictures.matters, classes, strict=True):
        tiles.append(tint(picture, matters, row, pictures.grid, inks))
    return tiles


def predicts_patches(request: Request, registry: Registry) -> bool:
    """Return whether the one task of a request is `patches` or a plugin's task of its kind.

    Raises:
        UserError: the task is unknown, or a plugin file cannot be loaded.
    """
    for text in request.plugins:
        specs_of(text, registry)  # files may bring the task
    return issubclass(registry.task(parse(request.tasks[0]).name), Patches)
