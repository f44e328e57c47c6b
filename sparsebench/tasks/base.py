"""What a task is to the harness. No task imports torch: data are numpy arrays until a cell runs."""

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
from sparsebench.records.record import MOST_ITEMS
from sparsebench.tasks.sources.cache import Pixels
from sparsebench.tasks.sources.files import Locations

if TYPE_CHECKING:
    from sparsebench.measure.scores import Items  # which needs scipy

Inputs = Literal["tokens", "images"]
Mask = Literal["any", "half", "inside", "top"]
"""Which tokens matter, by the share of each that does: see `relevant`."""
Validated = Literal["accuracy", "worst_group"]


@dataclass(frozen=True)
class Split:
    """Samples of one split, n of them.

    Attributes:
        inputs: (n, L, d) float32 tokens, or (n, 3, height, width) uint8 images, which may be mapped from a file.
        labels: (n,) class numbers.
        groups: (n,) group numbers; all 0 where the task has no groups.
        relevance: (n, N) share of each token that matters to the label, or None for images: `boxes` say it, or nobody
            knows.
        boxes: for images (n, 4): top, left, height, width of what matters, before any permutation.
        order: for images of permuted patches (N,): the place in plain order of the patch that each position shows.
        mask: the rule that says which tokens matter, see `relevant`.
        foregrounds: (n,) the number of the picture that each sample shows, the same in every repetition and task of a
            source; each is of one class, and training and test are numbered apart. None where each shows its own.
    """

    inputs: np.ndarray
    labels: np.ndarray
    groups: np.ndarray
    relevance: np.ndarray | None = None
    boxes: np.ndarray | None = None
    order: np.ndarray | None = None
    mask: Mask = "half"
    foregrounds: np.ndarray | None = None

    def part(self, rows: slice) -> Split:
        """Return the split of those samples alone."""
        arrays = ("inputs", "labels", "groups", "relevance", "boxes", "foregrounds")
        values: dict[str, Any] = {name: getattr(self, name) for name in arrays}
        return replace(self, **{name: value[rows] for name, value in values.items() if value is not None})

    def relevance_on(self, grid: tuple[int, int] | None) -> np.ndarray | None:
        """Return (n, N) float32, the share of each token (or patch of that grid) that matters to the label.

        None where nobody knows it: then how well tokens are chosen is not measured, and oracles are unsupported.

        Raises:
            UserError: patches are permuted, and the grid's are others.
        """
        if self.boxes is None or grid is None:
            return self.relevance
        height, width = self.inputs.shape[-2:]
        relevance = coverage(self.boxes, height, width, [np.arange(parts) for parts in grid]).astype(np.float32)
        if self.order is None:
            return relevance
        if relevance.shape[1] != len(self.order):
            raise UserError(
                "permuted patches must be the model's, for which relevance is known",
                got=f"{len(self.order)} permuted patches, a model with {relevance.shape[1]}", allowed="as many",
                next_step="change patch or the model",
            )  # fmt: skip
        return relevance[:, self.order]


def relevant(shares: np.ndarray, mask: Mask) -> np.ndarray:
    """Return (n, N) booleans, which tokens matter, from the share of each that does.

    "any": some of it; "half": half of it or more; "inside": all of it; "top": the tokens with the largest shares, as
    many as all shares of the image are worth together, rounded, so that a foreground of one size is the same number of
    tokens wherever it lies. The first of equals goes first.
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
    """Return (n, N), which share of each patch of a picture its box covers. Arrays may be numpy's or, alike, torch's.

    Args:
        boxes: (n, 4): top, left, height, width; they may stick out.
        height, width: of the pictures.
        parts: 0, 1, ... for each row of patches, and for each column.
    """
    rows, columns = (
        _overlap(boxes[:, side], boxes[:, side + 2], pixels / len(parts[side]), parts[side])
        for side, pixels in enumerate((height, width))
    )
    return (rows[:, :, None] * columns[:, None, :]).reshape(len(boxes), -1)


def _overlap(start: Any, length: Any, part: float, parts: Any) -> Any:
    """Return (n, parts), which share of each of those parts of a line, `part` long, the segment covers."""
    low, high = parts * part, parts * part + part
    return ((start + length)[:, None].clip(low, high) - start[:, None].clip(low, high)) / part


@dataclass(frozen=True)
class Data:
    """What a task draws for one repetition.

    Attributes:
        classes, group_names: their names. Of four groups CLASS on BACKGROUND, numbered 2 class + background, boards
            have the gap.
        patterns: (d, M) for tasks whose tokens are patterns, else None.
        validation: samples to choose by, neither trained on nor tested on, or None.
        among: the numbers of the classes that a test may answer with; None for all.
    """

    train: Split
    test: Split
    classes: tuple[str, ...]
    group_names: tuple[str, ...] = ("all",)
    patterns: np.ndarray | None = None
    validation: Split | None = None
    among: np.ndarray | None = None

    def held_back(self, share: float) -> Data:
        """Return the data with the last of the training samples, that share of them rounded, as the validation split.

        Raises:
            UserError: no sample is left to train on, or to validate on.
        """
        n = len(self.train.labels)
        count = round(share * n)
        if not 0 < count < n:
            raise UserError(
                "validation must leave samples on both sides", got=f"{count} of {n} training samples held back",
                next_step="change validation, or train on more samples",
            )  # fmt: skip
        cut = slice(n - count), slice(n - count, n)
        return replace(self, train=self.train.part(cut[0]), validation=self.train.part(cut[1]))


@dataclass(frozen=True)
class Recipe:
    """How a network is trained on a task.

    Attributes:
        loss: "hinge" or "logistic" for (B,) margins, "cross-entropy" for (B, classes) logits.
        optimizer: "sgd" without momentum, or "adamw" with cosine decay of the step size to 0, after its warm-up.
        batch: samples a step; 0 for all, which is gradient descent.
        steps: the most updates; `epochs` the most passes over the data; the first limit reached ends it.
        stop_at_zero_loss: stop when each sample of a whole pass had a loss of exactly 0. Gradients were then 0
            throughout, so training on would change nothing.
        stop_below: stop when the mean loss of a pass, each before its step, is below.
        fixed_selection: a strategy's random numbers are a property of the sample, the same in every pass.
        rates: step sizes in place of `lr`, by the name of the parameter.
        watch: steps between looks at network and test split while training, the first before it and one at its end;
            0 for none. They change nothing.
        warmup: share of the steps in which the step size of "adamw" rises linearly to `lr`.
        smoothing: label smoothing of the cross-entropy in training (Szegedy et al. 2016), share given to all classes.
        flip, shift: mirror training images at random; move them at random by so many pixels, zeros coming in.
        accumulate: parts that a batch is cut into, which bounds the memory; the step is that of the whole batch.
        validation: share of the training samples that is held back, where the data have no validation split.
        patience: passes without a better validation result after which training ends, with the weights of the best
            pass; 0 to train to the end.
        validate_by: what that result is: the accuracy, or that of the worst group.
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
        """Return the most steps that training on n samples takes."""
        return min(self.steps, self.epochs * math.ceil(n / min(self.batch or n, n)))


class Task(BaseModel):
    """Data with the truth about each token. Its fields are its parameters.

    Attributes:
        name: what users type.
        inputs: "tokens" or "images"; models say which they take.
        default_model: the model it is run with unless another is named.
        trains: False for one that only tests the weights that a model brings, with 0 training samples.
        metrics: those that it measures besides, see `measure`; boards have a column of each.
        added: parameters that cells of older records do not have; at their defaults they are in no cell.
        revision: raise it when it draws other data, or trains otherwise: its cells are run again then.
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
        """Return the data of one repetition; the same for every strategy and model."""
        raise NotImplementedError(f"task '{self.name}' must define draw(n_train, repetition, locations)")

    def pictures(self, n_train: int, repetition: int, locations: Locations) -> Sequence[Pixels]:
        """Return the decoded pictures that `draw` maps, which are made before the first cell; by default none."""
        return ()

    def check(self) -> None:
        """Raise UserError if these parameters contradict each other."""

    def bound_to(self) -> int | None:
        """Return the side in pixels of the patches that its pictures are made of, or None where any will do."""
        return None

    def with_cut(self, cut: Mapping[str, Any]) -> Task:
        """Return the task with what it leaves to the model; `cut` is how that wants its pictures, see `Model.cut`."""
        return self

    def located(self) -> tuple[Task, Mapping[str, Path]]:
        """Return the task with names by content in place of its files, and where these lie; see `Locations`."""
        return self, {}

    def with_classes(self, head: int | None, locations: Locations) -> Task:
        """Return the task with what it leaves to the network's head: which class is which.

        Args:
            head: how many classes the head of trained weights has, or None where that is not known.
            locations: where its pictures lie.

        Raises:
            UserError: the pictures do not say it, or are of others.
        """
        return self

    def check_located(self, locations: Locations) -> None:
        """Raise UserError if what lies at these locations lacks something that each cell needs; before any is run."""

    def known_classes(self, locations: Locations) -> tuple[str, ...] | None:
        """Return the names of its classes, or None where only the data that are drawn have them."""
        return None

    def draws_test(self) -> bool:
        """Say whether each repetition tests on other data; asked of a task that trains nothing. By default it may."""
        return True

    def class_counts(self, labels: np.ndarray) -> tuple[int, ...]:
        """Return how many classes its data can have, which is the size of the network's head.

        Args:
            labels: (n,) of the test items, which say it where parameters do not.

        Raises:
            UserError: neither says it.
        """
        if isinstance(known := getattr(self, "classes", None), int):
            return (known,)
        seen = int(labels.max()) + 1
        if seen == len(labels):
            raise UserError("how many classes there are is not known from so few test items")
        return (seen,)

    def recipe(self) -> Recipe:
        """Return how networks are trained on it."""
        raise NotImplementedError(f"task '{self.name}' must define recipe()")

    def initial(self) -> tuple[Task, int] | None:
        """Return the task and number of samples on which a network is trained first, or None to start at random."""
        return None

    def success(self, test_loss: float, accuracy: float) -> bool | None:
        """Say whether a trial succeeded, or None where the task has no such criterion."""
        return None

    def successes(self, test_loss: float, accuracy: float) -> dict[str, bool]:
        """Return `success` under that name, where the task has a criterion, and by theirs what other ones say."""
        success = self.success(test_loss, accuracy)
        return {} if success is None else {"success": success}

    def measure(self, items: Items, test: Split) -> Mapping[str, float]:
        """Return the values of `metrics` by name, NaN where there is nothing to measure.

        Args:
            items: what came out for each test item.
            test: the test split.
        """
        return {}


def check_items(task: Task, n: int) -> None:
    """Raise UserError if a task has more test items than a record holds."""
    if n > MOST_ITEMS:
        raise UserError(
            f"task '{task.name}': test items", got=n, allowed=f"at most {MOST_ITEMS}, which a record holds",
            next_step=f"test fewer, as in {task.name}:test={MOST_ITEMS}" if "test" in type(task).model_fields else None,
        )  # fmt: skip
