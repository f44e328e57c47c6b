"""The base class of tasks, their data and recipes. No task imports torch: data are numpy arrays until a cell runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from sparsebench.errors import UserError
from sparsebench.measure.metrics import MetricKind
from sparsebench.measure.patches import object_shares
from sparsebench.records.record import MOST_ITEMS
from sparsebench.tasks.sources.cache import Pixels
from sparsebench.tasks.sources.files import Locations

if TYPE_CHECKING:
    from sparsebench.measure.metrics import Items  # needs scipy

Inputs = Literal["tokens", "images"]
Mask = Literal["any", "half", "inside", "top"]
"""The rule by which tokens are relevant, see `relevant`."""
Validated = Literal["accuracy", "worst_group"]


@dataclass(frozen=True)
class Split:
    """Samples of one split, n of them.

    Attributes:
        inputs: (n, L, d) float32 tokens, or (n, 3, height, width) uint8 images, which may be mapped from a file.
        labels: (n,) class numbers.
        groups: (n,) group numbers; all 0 if the task has no groups.
        relevance: (n, N) share of each token that matters to the label. None for images: it follows from `boxes`, or is
            unknown.
        boxes: for images (n, 4): top, left, height, width of the relevant area, before any permutation.
        order: for images of permuted patches (N,): the original position of the patch at each position.
        mask: the rule by which tokens are relevant, see `relevant`.
        foregrounds: (n,) number of the foreground picture of each sample. A picture has one class, and the same number
            in every repetition and task of a source. Training and test have separate numbers. None if no two samples
            share a picture.
        segments: for images with a class for each pixel (n, height, width) uint8, see `measure.patches`. The relevant
            area is then that of the objects.
    """

    inputs: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    relevance: np.ndarray | None = None
    boxes: np.ndarray | None = None
    order: np.ndarray | None = None
    mask: Mask = "half"
    foregrounds: np.ndarray | None = None
    segments: np.ndarray | None = None

    def part(self, rows: slice) -> Split:
        """Return the split with only these samples."""
        arrays = ("inputs", "labels", "groups", "relevance", "boxes", "foregrounds", "segments")
        values: dict[str, Any] = {name: getattr(self, name) for name in arrays}
        return replace(self, **{name: value[rows] for name, value in values.items() if value is not None})

    def relevance_on(self, grid: tuple[int, int] | None) -> np.ndarray | None:
        """Return (n, N) float32, the share of each token (or patch of this grid) that matters to the label.

        None if unknown: the quality of the selection is then not measured, and oracles are unsupported.

        Raises:
            UserError: patches are permuted, and the grid has another number of patches.
        """
        if self.segments is not None and grid is not None:
            return object_shares(self.segments, grid)
        if self.boxes is None or grid is None:
            return self.relevance
        height, width = self.inputs.shape[-2:]
        relevance = coverage(self.boxes, height, width, [np.arange(parts) for parts in grid]).astype(np.float32)
        if self.order is None:
            return relevance
        if relevance.shape[1] != len(self.order):
            raise UserError(
                "task and model have different patches, and the task permutes its patches",
                got=f"{len(self.order)} permuted patches, a model with {relevance.shape[1]}",
                allowed="the same patches",
                next_step="change patch or the model",
            )
        return relevance[:, self.order]


def relevant(shares: np.ndarray, mask: Mask) -> np.ndarray:
    """Return (n, N) booleans, which tokens are relevant, from the (n, N) share of each token that matters to the label.

    "any": the share is positive; "half": at least half; "inside": 1; "top": the tokens with the largest shares. The
    number of "top" tokens is the rounded sum of the image's shares, so that a foreground of a given size has the same
    number of tokens at every position. Of equal shares the first has priority.
    """
    if mask == "any":
        return shares > 0
    if mask == "half":
        return shares >= 0.5
    if mask == "inside":
        return shares > 1 - 1e-6
    worth = np.rint(shares.sum(axis=1, dtype=np.float64)).astype(int)
    rank = np.argsort(np.argsort(-shares, axis=1, kind="stable"), axis=1)
    return rank < worth[:, None]


def coverage(boxes: Any, height: int, width: int, parts: Sequence[Any]) -> Any:
    """Return (n, N), the share of each patch that the picture's box covers. Arrays are all numpy's or all torch's.

    Args:
        boxes: (n, 4): top, left, height, width. A box may extend beyond the picture.
        height, width: of the pictures, in pixels.
        parts: the numbers 0, 1, ... of the rows of patches, and of the columns.
    """
    shares = []
    for side, pixels in enumerate((height, width)):
        part = pixels / len(parts[side])
        low = parts[side] * part
        start = boxes[:, side, None]
        end = start + boxes[:, side + 2, None]
        shares.append((end.clip(low, low + part) - start.clip(low, low + part)) / part)
    return (shares[0][:, :, None] * shares[1][:, None, :]).reshape(len(boxes), -1)


@dataclass(frozen=True)
class Data:
    """The data of a task for one repetition.

    Attributes:
        classes, group_names: names of classes and groups. Boards have the gap for four groups named CLASS on BACKGROUND
            and numbered 2 class + background.
        patterns: (d, M) the patterns, if tokens are made of patterns, else None.
        validation: validation samples for model selection, or None.
        among: numbers of the classes that a test may predict; None for all.
        patch_classes: names of the classes of pixels and patches, the background first, if images have `segments`.
    """

    train: Split
    test: Split
    classes: tuple[str, ...]
    group_names: tuple[str, ...] = ("all",)
    patterns: np.ndarray | None = None
    validation: Split | None = None
    among: np.ndarray | None = None
    patch_classes: tuple[str, ...] = ()

    def hold_back(self, share: float) -> Data:
        """Return the data with the last training samples, this share of them rounded, as the validation split.

        Raises:
            UserError: no sample is left for training or for validation.
        """
        n = len(self.train.labels)
        count = round(share * n)
        if not 0 < count < n:
            raise UserError(
                "validation must leave samples on both sides",
                got=f"{count} of {n} training samples held back",
                next_step="change validation, or train on more samples",
            )
        cut = slice(n - count), slice(n - count, n)
        return replace(self, train=self.train.part(cut[0]), validation=self.train.part(cut[1]))


@dataclass(frozen=True)
class Recipe:
    """How a network is trained on a task.

    Attributes:
        loss: "hinge" or "logistic" for (B,) margins, "cross-entropy" for (B, classes) logits.
        optimizer: "sgd" without momentum, or "adamw" with cosine decay of the step size to 0, after its warm-up.
        batch: samples per step; 0 for all samples, which is full-batch gradient descent.
        steps: largest number of steps; `epochs` is the largest number of passes over the data. Training ends at the
            first limit.
        stop_at_zero_loss: stop when each sample of a whole pass had a loss of exactly 0. All gradients were then 0, so
            further training would change nothing.
        stop_below: stop when the mean loss of a pass, computed before each step, is below this value.
        fixed_selection: whether a strategy's random numbers for a sample are the same in every pass.
        rates: learning rates instead of `lr`, by the name of the parameter.
        watch: steps between measurements on network and test split during training, including one before and one after
            training; 0 for none. They do not change the training.
        warmup: share of the steps in which the learning rate of "adamw" rises linearly to `lr`.
        smoothing: label smoothing of the cross-entropy in training (Szegedy et al. 2016): the share spread over all
            classes.
        flip, shift: augmentation of training images: random horizontal flips; random shifts by up to this many pixels,
            padded with zeros.
        accumulate: number of parts of a batch, to save memory; the step is that of the whole batch.
        validation: share of the training samples that is held out for validation, if the data have no validation split.
        patience: number of passes without a better validation result after which training stops, with the weights of
            the best pass; 0 for no early stopping.
        validate_by: the validation result: accuracy, or worst-group accuracy.
    """

    loss: Literal["hinge", "logistic", "cross-entropy"]
    optimizer: Literal["sgd", "adamw"]
    lr: float
    batch: int
    epochs: int
    steps: int
    weight_decay: float = 0.0
    stop_at_zero_loss: bool = False
    stop_below: float = 0.0
    fixed_selection: bool = False
    rates: Mapping[str, float] = field(default_factory=dict)
    watch: int = 0
    warmup: float = 0.0
    smoothing: float = 0.0
    flip: bool = False
    shift: int = 0
    accumulate: int = 1
    validation: float = 0.0
    patience: int = 0
    validate_by: Validated = "accuracy"

    def total(self, n: int) -> int:
        """Return the largest number of training steps with n samples."""
        return min(self.steps, self.epochs * math.ceil(n / min(self.batch or n, n)))


class Task(BaseModel):
    """Data with known relevant tokens, and how networks are trained on them. The fields are the parameters.

    Attributes:
        name: the name on the command line.
        inputs: "tokens" or "images"; a model accepts one of the two.
        default_model: the model, unless a run names another.
        trains: False if the task only tests trained weights of the model, with 0 training samples.
        metrics: additional metrics, see `measure`; boards have a column for each.
        added: parameters that cells of older records do not have; cells do not contain them if they have their
            defaults.
        revision: increase it if the data or the training change; the cells are then run again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    inputs: ClassVar[Inputs]
    default_model: ClassVar[str]
    trains: ClassVar[bool] = True
    metrics: ClassVar[tuple[MetricKind, ...]] = ()
    added: ClassVar[frozenset[str]] = frozenset()
    revision: ClassVar[int] = 1

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """Return the data of one repetition, which are the same for every strategy and model."""
        raise NotImplementedError(f"task '{self.name}' must define draw(n_train, repetition, locations)")

    def pictures(self, n_train: int, repetition: int, locations: Locations) -> Sequence[Pixels]:
        """Return the pictures that `draw` reads; a run decodes them before the first cell. None by default."""
        return ()

    def check(self) -> None:
        """Raise UserError if these parameters contradict each other."""

    def bound_to(self) -> int | None:
        """Return the side in pixels of the patches of its pictures, or None if any patch size is possible."""
        return None

    def with_cut(self, cut: Mapping[str, Any]) -> Task:
        """Return the task with the settings that the model determines; `cut` is its transform, see `Model.cut`."""
        return self

    def with_patch(self, patch: int | None) -> Task:
        """Return the task with the sizes that follow from the patches of trained weights, where none are given.

        Args:
            patch: side of a patch in pixels; None if unknown.
        """
        return self

    def locate(self) -> tuple[Task, Mapping[str, Path]]:
        """Return the task with files named by content, and the paths of the files; see `Locations`."""
        return self, {}

    def with_classes(self, head: int | None, locations: Locations) -> Task:
        """Return the task with the order of classes, which depends on the network's head.

        Args:
            head: number of classes of the head of trained weights, or None if unknown.
            locations: the paths of its pictures.

        Raises:
            UserError: the pictures do not determine the order, or have other classes.
        """
        return self

    @property
    def reads_head(self) -> bool:
        """Whether it needs the head of trained weights: it trains nothing, and is not for a probe."""
        return not self.trains

    def for_probe(self, locations: Locations, skip_bad: bool = False) -> tuple[Task, Mapping[str, Path]]:
        """Return the task with the training images of a probe, and the places of pictures that this adds.

        Args:
            locations: the paths of its pictures.
            skip_bad: whether pictures that cannot be read are left out; otherwise they are an error.

        Raises:
            UserError: a probe cannot be learned on the task.
        """
        if self.inputs != "images" or not self.trains:
            raise UserError(f"task '{self.name}' has no training images for a probe")
        return self, {}

    def training_counts(self, locations: Locations) -> np.ndarray | None:
        """Return the (classes,) numbers of training images that exist for a probe; None if there is no limit."""
        return None

    def schedule_images(self, count: int, repetition: int, locations: Locations) -> tuple[Split, str] | None:
        """Return images on which schedules are chosen (schedule=auto), and a text that says which; labels are not used.

        None, as by default, stands for the training images.

        Args:
            count: number of images that are enough.
            repetition: the repetition, whose test images are others.
            locations: the paths of its pictures.

        Raises:
            UserError: there are no such images.
        """
        return None

    def check_schedule_images(self, locations: Locations) -> None:
        """Raise UserError if there are no images on which schedules can be chosen; called before any cell."""

    def check_located(self, locations: Locations) -> None:
        """Raise UserError if files that each cell needs are missing at these locations; called before any cell."""

    def known_classes(self, locations: Locations) -> tuple[str, ...] | None:
        """Return the names of the classes, or None if they are known only after `draw`."""
        return None

    def draws_test(self) -> bool:
        """Return whether each repetition has other test data; called if the task trains nothing. True by default."""
        return True

    def class_count(self, labels: np.ndarray) -> int:
        """Return the number of classes, which is the size of the network's head.

        Args:
            labels: (n,) labels of the test items, used if the parameters do not determine the number.

        Raises:
            UserError: neither determines the number.
        """
        if isinstance(classes := getattr(self, "classes", None), int):
            return classes
        count = int(labels.max()) + 1
        if count == len(labels):
            raise UserError("the number of classes is not known from so few test items")
        return count

    def recipe(self) -> Recipe:
        """Return how networks are trained on the task."""
        raise UserError(f"task '{self.name}' must define recipe()")

    def initial(self) -> tuple[Task, int] | None:
        """Return the task and number of samples for pre-training, or None to start from random weights."""
        return None

    def success(self, test_loss: float, accuracy: float) -> bool | None:
        """Return whether a trial succeeded, or None if the task has no criterion."""
        return None

    def successes(self, test_loss: float, accuracy: float) -> dict[str, bool]:
        """Return the results of all criteria by name: `success` if the task has a criterion, and the others."""
        success = self.success(test_loss, accuracy)
        return {} if success is None else {"success": success}

    def measure(self, items: Items, test: Split) -> Mapping[str, float]:
        """Return the values of `metrics` by name, NaN if there is nothing to measure.

        Args:
            items: the outcomes of the test items.
            test: the test split.
        """
        return {}


def check_data(task: Task, data: Data) -> None:
    """Raise UserError if inputs or labels are not as `Split` says, or a record does not hold that many test items."""
    check_items(task, len(data.test.labels))
    dtype = "uint8" if task.inputs == "images" else "float32"
    classes = len(data.classes)
    for name in ("train", "test", "validation"):
        split: Split | None = getattr(data, name)
        if split is None:
            continue
        inputs, labels = np.asarray(split.inputs), np.asarray(split.labels)
        if inputs.dtype != dtype:
            raise UserError(
                f"task '{task.name}': the inputs of its {name} split",
                got=str(inputs.dtype),
                allowed=f"{dtype} for {task.inputs}",
            )
        if len(labels) and (labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= classes):
            raise UserError(
                f"task '{task.name}': the labels of its {name} split",
                got=f"{labels.dtype} from {labels.min()} to {labels.max()}",
                allowed=f"integers from 0 to {classes - 1}, as it has {classes} classes",
            )


def check_items(task: Task, n: int, patches: int = 1) -> None:
    """Raise UserError if a task has more test items than a record holds.

    Args:
        task: the task.
        n: number of test images or samples.
        patches: number of items of each of them.
    """
    if n * patches > MOST_ITEMS:
        most = MOST_ITEMS // patches
        raise UserError(
            f"task '{task.name}': test {'items' if patches == 1 else f'images of {patches} patches'}",
            got=n,
            allowed=f"at most {most}, which a record holds",
            next_step=f"test fewer, as in {task.name}:test={most}" if "test" in type(task).model_fields else None,
        )
