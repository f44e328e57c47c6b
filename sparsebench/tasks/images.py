"""Image tasks: a foreground is pasted at a random position, so that the relevant patches are known exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Mask, Recipe, Split, Task, Validated
from sparsebench.tasks.sources.cache import Pixels
from sparsebench.tasks.sources.composites import (
    FOLDER,
    HELD_OUT,
    SCENES,
    Foregrounds,
    backgrounds,
    classes_of,
    folder_pixels,
    foregrounds,
)
from sparsebench.tasks.sources.files import path_of
from sparsebench.tasks.sources.known import DIGITS, PHOTOS, SETS, names_for
from sparsebench.tasks.sources.masks import MASKED

Scene = Callable[[np.ndarray, np.random.Generator, bool], tuple[np.ndarray, np.ndarray]]
"""From labels (n,), a generator and whether it is the test: returns canvases (n, 3, S, S) uint8 and groups (n,)."""
LOOKS = frozenset({"permuted", "patch", "placement", "mask", "intensity", "head", "fill", "objects"})
"""Parameters that do not change which pictures and backgrounds are drawn, only how they are shown or judged."""
TURN, SCALE, SHEAR, MOVE = 0.26, 0.15, 0.15, 0.08
"""Largest changes of a foreground at affine=1: rotation in radians, log of the scale, shear, shift over the side."""
CANVAS, FOREGROUND = 12, 4
"""Sides of the image and of the foreground in patches, for trained weights whose patches determine the sizes."""
RECIPE = tuple(field.name for field in fields(Recipe))


def paste(canvas: np.ndarray, pictures: np.ndarray, rng: np.random.Generator, step: int = 1) -> np.ndarray:
    """Paste a picture onto each canvas, at a random position.

    Args:
        canvas: (n, 3, S, S) uint8, changed in place.
        pictures: (n, 3, s, s) uint8.
        rng: the generator of the positions.
        step: positions are multiples of it, in pixels.

    Returns:
        The (n, 4) boxes: top, left, height, width.
    """
    n = len(canvas)
    S = canvas.shape[2]
    s = pictures.shape[2]
    top, left = step * rng.integers(0, (S - s) // step + 1, (2, n))
    # A window at each position, without copies: one assignment then moves whole rows of pixels.
    windows = np.lib.stride_tricks.sliding_window_view(canvas, (s, s), axis=(2, 3), writeable=True)
    windows.transpose(0, 2, 3, 1, 4, 5)[np.arange(n), top, left] = pictures
    return np.stack([top, left, np.full(n, s), np.full(n, s)], axis=1)


def permute(images: np.ndarray, patch: int, order: np.ndarray) -> np.ndarray:
    """Return images (n, 3, S, S) with their patches in another order.

    Args:
        images: (n, 3, S, S), S a multiple of `patch`.
        patch: side of a patch in pixels.
        order: (N,) the original position of the patch at each position; positions are counted row by row.
    """
    n, channels, S, _ = images.shape
    side = S // patch
    cut = images.reshape(n, channels, side, patch, side, patch).swapaxes(3, 4)
    moved = cut.reshape(n, channels, side**2, patch, patch)[:, :, order].reshape(cut.shape)
    return np.ascontiguousarray(moved.swapaxes(3, 4)).reshape(images.shape)


def warp(pictures: np.ndarray, strength: float, rng: np.random.Generator) -> np.ndarray:
    """Return pictures, each rotated, scaled, sheared and shifted at random; edge pixels are repeated outside.

    Args:
        pictures: (n, 3, s, s) uint8.
        strength: multiple of the largest changes TURN, SCALE, SHEAR and MOVE.
        rng: the generator of the changes.
    """
    from scipy.ndimage import map_coordinates

    out = np.empty_like(pictures)
    s = pictures.shape[-1]
    for first in range(0, len(pictures), 1000):  # bounds the memory
        part = pictures[first : first + 1000]
        n = len(part)
        turn, size, shear, down, right = strength * rng.uniform(-1, 1, (5, n, 1, 1))
        cos, sin = np.cos(TURN * turn), np.sin(TURN * turn)
        middle = (s - 1) / 2
        y = (np.arange(s) - middle)[:, None] - MOVE * s * down
        x = (np.arange(s) - middle) - MOVE * s * right
        x = x + SHEAR * shear * y
        rows, columns = np.exp(SCALE * size) * np.stack([cos * y - sin * x, sin * y + cos * x]) + middle
        places = np.broadcast_arrays(
            np.arange(n)[:, None, None, None], np.arange(3)[:, None, None], rows[:, None], columns[:, None]
        )
        out[first : first + n] = map_coordinates(part, places, order=1, mode="nearest")
    return out


class PictureTask(Task):
    """Pictures with classes. Recipe: AdamW with warm-up and cosine decay; optional flips, shifts and early stopping.

    Attributes:
        training: names of the parameters of training and measuring. They do not change the drawn data.
        official: whether the data have an official validation split.
    """

    inputs: ClassVar[Inputs] = "images"
    default_model: ClassVar[str] = "vit"
    training: ClassVar[frozenset[str]] = frozenset({*RECIPE, "spuriosity"})
    official: ClassVar[bool] = False

    test: int = Field(400, gt=0, description="test images")
    epochs: int = Field(5, gt=0, description="epochs of training")
    batch: int = Field(64, gt=0, description="images per step")
    lr: float = Field(1e-3, gt=0, description="largest learning rate")
    weight_decay: float = Field(0.05, ge=0, description="AdamW's weight decay")
    watch: int = Field(0, ge=0, description="steps between tests during training; 0 for none")
    spuriosity: int = Field(0, ge=0, description="test images on which each token's influence is measured; 0 for none")

    warmup: float = Field(0.0, ge=0, lt=1, description="share of the steps in which the learning rate rises to lr")
    smoothing: float = Field(0.0, ge=0, lt=1, description="label smoothing, only in the training loss")
    flip: bool = Field(False, description="random horizontal flips of training images")
    shift: int = Field(0, ge=0, description="random shifts of training images by up to this many pixels")
    accumulate: int = Field(1, gt=0, description="number of parts of a batch, to save memory; the step stays the same")
    validation: float = Field(
        0.0, ge=0, lt=1, description="share of training images for validation; an official split has priority"
    )
    patience: int = Field(
        0, ge=0, description="epochs without a better validation result before training stops; 0: never"
    )
    validate_by: Validated = Field("accuracy", description="the validation result: accuracy, or the worst group's")

    def check(self) -> None:
        """See `Task.check`."""
        if self.patience and not (self.validation or self.official):
            raise UserError(
                "patience needs a validation split",
                got=f"patience={self.patience}, validation=0",
                next_step="hold some training images back, as in validation=0.1",
            )
        canvas = getattr(self, "canvas", None)
        if canvas is not None and self.shift >= canvas:
            raise UserError("shift", got=self.shift, allowed=f"less than the image's {canvas} pixels")

    def recipe(self) -> Recipe:
        """See `Task.recipe`."""
        options = {name: getattr(self, name) for name in RECIPE if name in type(self).model_fields}
        return Recipe("cross-entropy", "adamw", steps=self.epochs * 10**9, **options)


class ImageTask(PictureTask):
    """A foreground picture on a canvas. By default training starts from pre-trained weights.

    Attributes:
        reads_masks: whether its images may be pictures with masks instead.
    """

    training: ClassVar[frozenset[str]] = PictureTask.training | {
        "pretrain_epochs",
        "pretrain_samples",
        "pretrain_images",
        "pretrain_each",
        "affine",
    }
    added: ClassVar[frozenset[str]] = frozenset({"affine", "pretrain_each"})
    reads_masks: ClassVar[bool] = False

    images: str = Field(DIGITS, description="foregrounds: a set that sparsebench data names, or a folder")
    backgrounds: str = Field(PHOTOS, description="backgrounds: photos, flowers102, a folder or an .npz file")
    canvas: int = Field(32, gt=0, description="side of the image in pixels")
    foreground: int = Field(24, gt=0, description="side of the foreground in pixels")
    placement: Literal["anywhere", "grid", "tiles"] = Field(
        "anywhere",
        description="positions of the foreground; grid: aligned with patches; tiles: without overlap, so that "
        "every patch is foreground equally often",
    )
    mask: Mask = Field(
        "half",
        description="relevant patches: any, half or all (inside) of it is foreground, or the top patches by share",
    )
    intensity: float = Field(1.0, ge=0, le=1, description="brightness of the backgrounds")
    affine: float = Field(
        0.0, ge=0, le=2, description="strength of random rotation, scaling, shear and shift of training foregrounds"
    )
    held_out: tuple[str, ...] = Field((), description="the two classes of the spurious task, not in the pre-training")
    pretrain_epochs: int = Field(10, ge=0, description="epochs of pre-training on plain foregrounds; 0 for none")
    pretrain_samples: int = Field(4000, gt=0, description="number of images for pre-training")
    pretrain_images: str = Field("", description="foregrounds for pre-training; default: those of the task")
    pretrain_each: bool = Field(False, description="a separate pre-training for each repetition")
    permuted: bool = Field(False, description="patches are permuted, in the same way for all images")
    patch: int = Field(4, gt=0, description="side of a patch in pixels, as in the model")

    def check(self) -> None:
        """See `Task.check`."""
        super().check()
        for name in (self.images, self.pretrain_images):
            if (kind := name.partition("-")[0]) in names_for("task"):
                raise UserError(
                    f"the images of task '{self.name}': {kind} can only be used by task '{kind}'",
                    next_step=f"give other --images, or --task {kind}",
                )
            if kind == MASKED and not self.reads_masks:
                raise UserError(
                    f"the images of task '{self.name}': pictures with masks can only be used by task 'patches'",
                    next_step="give other --images, or --suite patches with --weights FILE",
                )
        moved = self.placement == "anywhere" and not self.permuted
        tiled = not (self.canvas % self.foreground or self.foreground % self.patch)
        for holds, what, names in (
            (self.foreground <= self.canvas, "the foreground is larger than the canvas", "foreground canvas"),
            (
                tiled or self.placement != "tiles",
                "tiles: the foreground must divide the canvas, and patch the foreground",
                "canvas foreground patch",
            ),
            (moved or not self.shift, "images on the patch grid cannot be shifted", "placement permuted shift"),
            (not (self.permuted and self.flip), "permuted patches cannot be flipped", "permuted flip"),
            (self.bound_to() is None or self.canvas % self.patch == 0, "patch must divide the canvas", "patch canvas"),
            (len(set(self.held_out)) in (0, 2), "held_out takes two classes, as in held_out=bird+airplane", "held_out"),
        ):
            if not holds:
                raise UserError(what, got=", ".join(f"{name}={getattr(self, name)}" for name in names.split()))

    def bound_to(self) -> int | None:
        """See `Task.bound_to`."""
        return self.patch if self.permuted or self.placement != "anywhere" else None

    def initial(self) -> tuple[Task, int] | None:
        """See `Task.initial`: foregrounds of the other classes on a clean canvas, with the same order of patches."""
        if self.pretrain_epochs == 0:
            return None
        shared = self.model_dump(
            include={
                "canvas",
                "foreground",
                "held_out",
                "permuted",
                "patch",
                "placement",
                "batch",
                "lr",
                "weight_decay",
                "warmup",
                "smoothing",
                "flip",
                "shift",
                "accumulate",
                "affine",
            }
        )
        other = self.pretrain_images if self.pretrain_images != self.images else ""
        pictures = {"images": other, "before": self.images} if other else {"images": self.images}
        return Plain(**shared, **pictures, epochs=self.pretrain_epochs), self.pretrain_samples

    def pictures(self, n_train: int, repetition: int, locations: Locations) -> Sequence[Pixels]:
        """See `Task.pictures`."""
        sizes = {self.images: self.foreground, self.backgrounds: self.canvas}
        names = [name for name in sizes if name.partition("-")[0] in (FOLDER, SCENES)]
        return [folder_pixels(name, sizes[name], path_of(name, locations))[1] for name in names]

    def with_patch(self, patch: int | None) -> Task:
        """See `Task.with_patch`: the canvas has 12 x 12 patches, and the foreground 4 x 4 of them."""
        if patch is None:
            return self
        sizes = {"canvas": CANVAS * patch, "foreground": FOREGROUND * patch, "patch": patch}
        return self.model_copy(update={name: size for name, size in sizes.items() if name not in self.model_fields_set})

    def pool(self, locations: Locations) -> Foregrounds:
        """Return the foregrounds."""
        self.check()
        return foregrounds(self.images, self.foreground, locations)

    def pair(self, images: str, classes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the two held-out classes: those given, the default of the source, or its first two classes."""
        if strange := sorted(set(self.held_out) - set(classes)):
            raise UserError(f"held_out of task '{self.name}'", got=strange, allowed=classes)
        if self.held_out:
            return self.held_out
        default = HELD_OUT.get(images, ("bird", "airplane"))
        return default if set(default) <= set(classes) else classes[:2]

    def stream(self, repetition: int, split: str) -> np.random.Generator:
        """Return the generator of one split's draws; the parameters in `training` and LOOKS do not change it."""
        # Trap: the JSON lists the parameters in the order of their definition, so that moving one changes every draw.
        return seeds.generator(self.name, self.model_dump_json(exclude=set(self.training | LOOKS)), repetition, split)

    def order(self) -> np.ndarray | None:
        """Return (N,) the original position of the patch at each position, or None for plain order.

        The order depends only on the sizes of canvas and patch, not on the task or the repetition.
        """
        if not self.permuted:
            return None
        N = (self.canvas // self.patch) ** 2
        return seeds.generator("order of patches", self.canvas, self.patch).permutation(N)

    def compose(
        self,
        n_train: int,
        repetition: int,
        pool: Foregrounds,
        classes: tuple[str, ...],
        scene: Scene,
        group_names: tuple[str, ...] = ("all",),
    ) -> Data:
        """Return training and test data with balanced classes, each foreground on a canvas from `scene`."""
        train, test = (
            self._split(n, self.stream(repetition, split), pool, classes, scene, test=split == "test")
            for split, n in (("train", n_train), ("test", self.test))
        )
        return Data(train, test, classes, group_names)

    def _split(
        self, n: int, rng: np.random.Generator, pool: Foregrounds, classes: tuple[str, ...], scene: Scene, *, test: bool
    ) -> Split:
        """Return n samples, with patches in the task's order."""
        labels = rng.permutation(np.arange(n) % len(classes))
        canvas, groups = scene(labels, rng, test)
        if self.intensity < 1:
            canvas = np.rint(canvas * self.intensity).astype(np.uint8)
        pictures, numbers = self._foregrounds(labels, rng, pool.test if test else pool.train, classes, test=test)
        step = {"anywhere": 1, "grid": self.patch, "tiles": self.foreground}[self.placement]
        area = self._paste(canvas, pictures, labels, rng, step)
        permutation = self.order()
        if permutation is not None:
            canvas = permute(canvas, self.patch, permutation)
        return Split(canvas, labels, groups, order=permutation, mask=self.mask, foregrounds=numbers, **area)

    def _paste(
        self, canvas: np.ndarray, pictures: np.ndarray, labels: np.ndarray, rng: np.random.Generator, step: int
    ) -> dict[str, np.ndarray]:
        """Paste each foreground onto its canvas; return the field of `Split` with the relevant areas.

        Args:
            canvas, pictures, rng, step: see `paste`.
            labels: (n,) classes of the foregrounds.
        """
        return {"boxes": paste(canvas, pictures, rng, step)}

    def _foregrounds(
        self,
        labels: np.ndarray,
        rng: np.random.Generator,
        per_class: Mapping[str, np.ndarray],
        classes: tuple[str, ...],
        *,
        test: bool,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return a foreground (n, 3, s, s) of the class of each label, and its number (n,) among those of all classes.

        Foregrounds of all classes are numbered one after the other.
        """
        n = len(labels)
        pictures = np.empty((n, 3, self.foreground, self.foreground), np.uint8)
        numbers = np.empty(n, dtype=np.int64)
        sizes = [len(pool) for pool in per_class.values()]
        first_number = dict(zip(per_class, np.cumsum([0, *sizes]), strict=False))
        changes = rng.spawn(1)[0]  # a separate generator, so that `affine` does not change positions and backgrounds
        for k, name in enumerate(classes):
            members = np.flatnonzero(labels == k)
            order = _cycle(len(per_class[name]), len(members), rng)
            numbers[members] = first_number[name] + order
            chosen = per_class[name][order]
            if self.affine and not test:
                chosen = warp(chosen, self.affine, changes)
            pictures[members] = chosen
        return pictures, numbers


def _cycle(size: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Return (n,) numbers of pictures of a pool of that size: all of them once before any is repeated."""
    order = [rng.permutation(size) for _ in range(-(-n // size))] or [np.empty(0, dtype=int)]
    return np.concatenate(order)[:n]


class Composite(ImageTask):
    """All classes, with backgrounds that are independent of the class (after Karp et al. 2021).

    Li et al. 2023, Figure 6b counts a training as a success if the test accuracy is at least 0.775.
    """

    name: ClassVar[str] = "composite"
    training: ClassVar[frozenset[str]] = ImageTask.training | {"success_accuracy"}

    success_accuracy: float = Field(
        0.0, ge=0, le=1, description="test accuracy at which a training counts as successful; 0 for no criterion"
    )

    def known_classes(self, locations: Locations) -> tuple[str, ...]:
        """See `Task.known_classes`."""
        return classes_of(self.images, locations)

    def class_count(self, labels: np.ndarray) -> int:
        """See `Task.class_count`: all classes of a known set."""
        return SETS[self.images].classes if self.images in SETS else super().class_count(labels)

    def success(self, test_loss: float, accuracy: float) -> bool | None:
        """See `Task.success`."""
        return accuracy >= self.success_accuracy if self.success_accuracy else None

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`."""
        pool = self.pool(locations)
        source = backgrounds(self.backgrounds, self.canvas, locations)

        def scene(labels: np.ndarray, rng: np.random.Generator, test: bool) -> tuple[np.ndarray, np.ndarray]:
            kinds = rng.choice(source.textured, len(labels))
            return source.draw(rng, kinds, test=test), np.zeros_like(labels)

        return self.compose(n_train, repetition, pool, pool.classes, scene)


class Plain(ImageTask):
    """Only foregrounds on a clean canvas, without the held-out classes; used for pre-training.

    If fewer than two classes would be left, all classes are used.
    """

    name: ClassVar[str] = "plain"
    training: ClassVar[frozenset[str]] = ImageTask.training | {"before"}

    pretrain_epochs: int = Field(0, ge=0, le=0, description="none: this is the pre-training")
    before: str = Field(
        "", description="foregrounds of the task to pre-train for, if different: its two classes are held out"
    )

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`."""
        pool = self.pool(locations)
        later = self.before or self.images
        without = self.pair(later, classes_of(later, locations))
        classes = tuple(name for name in pool.classes if name not in without)
        if len(classes) < 2:
            classes = pool.classes

        def scene(labels: np.ndarray, rng: np.random.Generator, test: bool) -> tuple[np.ndarray, np.ndarray]:
            return np.zeros((len(labels), 3, self.canvas, self.canvas), dtype=np.uint8), np.zeros_like(labels)

        return self.compose(n_train, repetition, pool, classes, scene)


class Spurious(ImageTask):
    """Two classes with a background that matches the label in most training images, but not in the test.

    Li et al. 2023, Section 4.2 and Sagawa et al. 2020: groups are (class, background); the four test groups are
    equal in size.
    """

    name: ClassVar[str] = "spurious"

    agreement: float = Field(0.9, ge=0.5, le=1, description="share of training images whose background fits the label")

    def class_count(self, labels: np.ndarray) -> int:
        """See `Task.class_count`."""
        return 2

    def known_classes(self, locations: Locations) -> tuple[str, ...]:
        """See `Task.known_classes`."""
        return self.pair(self.images, classes_of(self.images, locations))

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`."""
        pool = self.pool(locations)
        classes = self.pair(self.images, pool.classes)
        source = backgrounds(self.backgrounds, self.canvas, locations)
        names = tuple(f"{name} on {kind}" for name in classes for kind in source.kinds)

        def scene(labels: np.ndarray, rng: np.random.Generator, test: bool) -> tuple[np.ndarray, np.ndarray]:
            kinds = 1 - labels
            for label in (0, 1):  # the background fits the label in this share of each class, rounded
                order = rng.permutation(np.flatnonzero(labels == label))
                kinds[order[: round((0.5 if test else self.agreement) * len(order))]] = label
            return source.draw(rng, kinds, test=test), 2 * labels + kinds

        return self.compose(n_train, repetition, pool, classes, scene, names)
