"""Training steps: samples with augmentation, losses, the optimiser, and updates by automatic differentiation."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench import seeds
from sparsebench.models.actor import LEARNED, Actor, Pass
from sparsebench.models.base import Network
from sparsebench.strategy.base import ModelOutputs
from sparsebench.tasks.base import Recipe, coverage


@dataclass(frozen=True, eq=False)
class Augmentation:
    """Augmentation of training images: random shifts, padded with zeros, then random horizontal flips.

    Attributes:
        stream: the seed of the random numbers.
        flip: whether images are flipped with probability 1/2.
        shift: largest shift in pixels, in each direction.
        boxes: (n, 4) boxes of the relevant areas, on the images' device; None if unknown.
        grid: number of rows and columns of patches.
    """

    stream: int
    flip: bool
    shift: int
    boxes: Tensor | None
    grid: tuple[int, int]

    def __call__(self, images: Tensor, rows: Tensor, visit: int) -> tuple[Tensor, Tensor | None]:
        """Return the augmented images (B, 3, height, width) of the (B,) rows in pass `visit`, and their relevance.

        The images need not be contiguous.
        """
        down, right, mirrored = self.moves(rows, visit)
        height, width = images.shape[2:]
        moved = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        if self.shift:
            windows = F.pad(moved, [self.shift] * 4).unfold(2, height, 1).unfold(3, width, 1)  # without copies
            column = self.shift - torch.where(
                mirrored, -right, right
            )  # here flipped first, then shifted, so right becomes left
            moved = windows[torch.arange(len(images), device=images.device), :, self.shift - down, column]
        if self.boxes is None:
            return moved, None
        top, left, box_height, box_width = self.boxes.index_select(0, rows).unbind(1)
        left = left + right
        left = torch.where(mirrored, width - left - box_width, left)
        boxes = torch.stack([top + down, left, box_height, box_width], dim=1).double()  # may extend beyond the image
        parts = [torch.arange(count, device=boxes.device, dtype=torch.float64) for count in self.grid]
        return moved, coverage(boxes, height, width, parts).float()

    def moves(self, rows: Tensor, visit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shifts down and right in pixels of the images of the (B,) rows, and which are flipped."""
        u = seeds.uniform(seeds.mix(seeds.mix(rows, self.stream), visit), 3)
        pixels = (u[:, :2] * (2 * self.shift + 1)).long() - self.shift
        return pixels[:, 0], pixels[:, 1], (u[:, 2] < 0.5) & self.flip


FIXED = frozenset({"tokens", "pixels", "relevance"})
"""Fields of a view that training does not change."""


def chooses_once(actor: Actor | None, recipe: Recipe) -> bool:
    """Return whether the same tokens stay in every step: no actor, or one that reads nothing that training changes."""
    return actor is None or (actor.requires <= FIXED and recipe.fixed_selection and not actor.strategy.ramps)


def losses(recipe: Recipe, outputs: Tensor, labels: Tensor, *, training: bool = False) -> Tensor:
    """Return the (B,) losses: hinge, logistic or cross-entropy. Label smoothing is applied in training only.

    Hinge is max(0, 1 - yF) and logistic log(1 + e^(-yF)), with y = -1 for class 0 and +1 for class 1. For outputs
    (B, 2) hinge is summed over both, with y = (-1,-1), (-1,+1), (+1,-1), (+1,+1) for classes 0 to 3.
    """
    if recipe.loss == "cross-entropy":
        smoothing = recipe.smoothing if training else 0.0
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=smoothing)
    if recipe.loss == "logistic":
        return F.softplus((1 - 2 * labels) * outputs)
    if outputs.ndim == 1:
        return torch.relu(1 - (2 * labels - 1) * outputs)
    signs = 2 * torch.stack([labels // 2, labels % 2], dim=1) - 1
    return torch.relu(1 - signs * outputs).sum(dim=1)


def predictions(recipe: Recipe, outputs: Tensor) -> Tensor:
    """Return the (B,) predicted class numbers: the signs of the outputs, numbered as in `losses`, or the largest."""
    if recipe.loss == "cross-entropy":
        return outputs.max(dim=1).indices  # twice as fast as argmax
    positive = (outputs > 0).long()
    return positive if outputs.ndim == 1 else 2 * positive[:, 0] + positive[:, 1]


def optimiser(recipe: Recipe, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the recipe's optimiser of the trainable parameters. Vectors (biases, norms) have no weight decay.

    The entry "learned" of a parameter group says whether it belongs to a strategy's learned modules.
    """
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    learned = {name: name.startswith(f"{LEARNED}.") for name in params}
    if recipe.optimizer == "sgd":
        rates = recipe.rates
        return torch.optim.SGD(
            [{"params": [p], "lr": rates.get(name, recipe.lr), "learned": learned[name]} for name, p in params.items()]
        )
    groups: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, p in params.items():
        groups.setdefault((learned[name], p.ndim <= 1), []).append(p)
    decays = {False: recipe.weight_decay, True: 0.0}
    ordered = [
        {"params": groups[is_learned, vectors], "weight_decay": decays[vectors], "learned": is_learned}
        for is_learned, vectors in sorted(groups)
    ]
    return torch.optim.AdamW(ordered, lr=recipe.lr)


def step_size(recipe: Recipe, done: float, total: int) -> float:
    """Return AdamW's step size after the share `done` of `total` steps.

    It rises linearly from above 0 during the share `warmup` of the steps, then falls to 0 by a cosine.
    """
    if done < recipe.warmup:
        return recipe.lr * (done * total + 1) / (recipe.warmup * total + 1)
    return recipe.lr * 0.5 * (1 + math.cos(math.pi * (done - recipe.warmup) / (1 - recipe.warmup)))


class Samples:
    """A split on the device.

    Args:
        inputs: (n, ...) on the device, or images in host memory, from where batches are moved to the device.
        labels: (n,) class numbers, on the device.
        relevance: (n, N) share of each token that matters to the label, or None if unknown.
        augmentation: augmentation in training, or None.

    Attributes:
        absent: (classes,) booleans, the classes that the test may not predict; None for none.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, relevance: Tensor | None, augmentation: Augmentation | None = None
    ):
        self.inputs, self.labels, self.relevance = inputs, labels, relevance
        self.augmentation = augmentation
        self.items = torch.arange(len(labels), device=labels.device)
        self.absent: Tensor | None = None

    def take(self, rows: Tensor) -> Tensor:
        """Return the inputs of the rows, on the device."""
        if rows is self.items:
            return self.inputs.to(rows.device)  # without a copy
        # index_select copies whole samples, several times as fast as `inputs[rows]`.
        return self.inputs.index_select(0, rows.to(self.inputs.device)).to(rows.device)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows and inputs of `size` samples at a time, in order, on the device.

        Batches in host memory are copied to the device while it works on the previous batch.
        """
        if self.inputs.device != self.items.device:
            yield from self._batches_from_host(size)
            return
        # Networks convert pixels (uint8), so views are enough. Floats are copied, since networks may change them.
        pixels = None if self.inputs.is_floating_point() else self.inputs.split(size)
        for number, rows in enumerate(self.items.split(size)):
            yield rows, self.take(rows) if pixels is None else pixels[number]

    def _batches_from_host(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of inputs in host memory. Two buffers take turns: one is filled while the other is copied."""
        device = self.items.device
        rows_on_host = self.items.cpu().split(size)
        rows_on_device = self.items.split(size)
        copying = torch.cuda.Stream(device)
        copied = [torch.cuda.Event(), torch.cuda.Event()]
        # Copies from pinned memory are asynchronous; allocating it is expensive.
        shape = (size, *self.inputs.shape[1:])
        buffers = [self.inputs.new_empty(shape, pin_memory=True) for _ in copied]

        def send(number: int) -> Tensor:
            rows = rows_on_host[number]
            buffer = buffers[number % 2][: len(rows)]
            event = copied[number % 2]
            event.synchronize()  # the previous batch in this buffer is on the device
            torch.index_select(self.inputs, 0, rows, out=buffer)
            with torch.cuda.stream(copying):
                inputs = buffer.to(device, non_blocking=True)
                event.record(copying)
            return inputs

        following = send(0) if rows_on_host else None
        for number, rows in enumerate(rows_on_device):
            inputs = following
            assert inputs is not None
            working = torch.cuda.current_stream(device)
            working.wait_event(copied[number % 2])
            following = send(number + 1) if number + 1 < len(rows_on_host) else None
            inputs.record_stream(working)  # its memory is not reused before its readers have finished
            yield rows, inputs

    def forward(
        self,
        network: Network,
        actor: Actor | None,
        rows: Tensor,
        *,
        visit: int,
        training: bool,
        teacher: Teacher | None = None,
        done: float = 1.0,
    ) -> tuple[Tensor, Pass | None]:
        """Return the network's outputs for the rows, and the pass (None without an actor).

        The teacher gets the same inputs; its outputs are in the pass. `done` is as in `Steps.step`.
        """
        inputs, relevance = self.take(rows), None
        if training and self.augmentation is not None:
            inputs, relevance = self.augmentation(inputs, rows, visit)
        if actor is None:
            return network(inputs), None
        acting = self.begin(actor, rows, visit=visit, training=training, relevance=relevance, done=done)
        acting.teacher = None if teacher is None else teacher.tell(inputs)
        return outputs_of(network, inputs, acting), acting

    def begin(
        self,
        actor: Actor,
        rows: Tensor,
        *,
        visit: int,
        training: bool,
        relevance: Tensor | None = None,
        done: float = 1.0,
    ) -> Pass:
        """Return the strategy's pass over the rows; `relevance`, if given, replaces that of the split."""
        if relevance is None and self.relevance is not None:
            relevance = self.relevance if rows is self.items else self.relevance[rows]
        return actor.begin(self.items[rows], visit, relevance, training=training, done=done)


def outputs_of(network: Network, inputs: Tensor, acting: Pass | None) -> Tensor:
    """Return the network's outputs for (B, ..) inputs, with the strategy's pass, if any."""
    if acting is None:
        return network(inputs)
    outputs = network(inputs, acting)
    acting.check_network()
    return outputs


class Teacher(Protocol):
    """A network that a strategy may learn from, in addition to the loss."""

    def tell(self, inputs: Tensor, /) -> ModelOutputs:
        """Return the outputs for (B, ..) inputs, without gradients."""


class Steps(Protocol):
    """Takes training steps.

    It may have `test(actor, samples)`, which returns mean loss and accuracy of the weights in the network, faster than
    the network.
    """

    def step(self, rows: np.ndarray, visit: int, done: float) -> Tensor | float:
        """Update the network with the samples `rows` and return the sum of their losses before the update.

        Args:
            rows, visit, done: see `loop.Batch`.
        """

    def store(self) -> None:
        """Copy the weights into the network, if they are stored elsewhere during training."""


class Autograd:
    """Steps by automatic differentiation, for any network, strategy and device.

    Attributes:
        parts: number of parts of a batch: the recipe's `accumulate`, or more if the device was out of memory.
    """

    def __init__(
        self, network: Network, actor: Actor | None, samples: Samples, recipe: Recipe, teacher: Teacher | None = None
    ):
        self.network = network
        self.actor = actor
        self.samples = samples
        self.recipe = recipe
        self.teacher = teacher
        self.parts = recipe.accumulate
        self.total = recipe.total(len(samples.labels))
        self.opt = optimiser(recipe, network.module)
        self.rates = [group["lr"] for group in self.opt.param_groups]
        network.module.train()

    def step(self, rows: np.ndarray, visit: int, done: float) -> Tensor:
        """See `Steps.step`.

        Raises:
            torch.OutOfMemoryError: even a single sample does not fit. Before that, a step that does not fit is repeated
                with twice as many parts, which later steps keep.
        """
        samples = self.samples
        chosen = samples.items if self.recipe.batch == 0 else torch.from_numpy(rows).to(samples.labels.device)
        self._set_step_sizes(done)
        while True:
            try:
                loss = self._gradients(chosen, visit, done)
                break
            except torch.OutOfMemoryError:
                if self.parts >= len(chosen):
                    raise
            self.parts *= 2  # outside of `except`, since the error holds the memory of the step
        for group in self.opt.param_groups:
            if group["lr"] == 0:  # otherwise moments would accumulate and change the weights later
                for weight in group["params"]:
                    weight.grad = None
        self.opt.step()
        return loss

    def _set_step_sizes(self, done: float) -> None:
        """Set each group's step size to the recipe's; for the network's weights times the strategy's `network_rate`."""
        share = 1.0 if self.actor is None else self.actor.strategy.network_rate(done)
        for group, rate in zip(self.opt.param_groups, self.rates, strict=True):
            if self.recipe.optimizer == "adamw":
                rate = step_size(self.recipe, done, self.total)
            group["lr"] = rate if group["learned"] else rate * share

    def _gradients(self, chosen: Tensor, visit: int, done: float = 1.0) -> Tensor:
        """Set the gradients to those of the mean loss of the chosen samples; return the sum of their losses.

        The gradients include the strategy's own loss, the returned sum does not.
        """
        self.opt.zero_grad(set_to_none=True)
        parts = min(self.parts, len(chosen))
        summed = []
        for rows in (chosen,) if parts == 1 else chosen.tensor_split(parts):
            outputs, acting = self.samples.forward(
                self.network, self.actor, rows, visit=visit, training=True, teacher=self.teacher, done=done
            )
            loss = losses(self.recipe, outputs, self.samples.labels[rows], training=True).sum()
            added = acting.loss() * len(rows) if acting is not None and acting.learns else 0.0
            for logits in () if acting is None else acting.auxiliary():
                added = added + losses(self.recipe, logits, self.samples.labels[rows], training=True).sum()
            ((loss + added) / len(chosen)).backward()
            summed.append(loss.detach())
        return reduce(operator.add, summed)

    def store(self) -> None:
        """See `Steps.store`: the weights are in the network."""
