"""The loop over the batches of a training, with early stopping, checkpoints and measurements in between."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from sparsebench import __version__, files, seeds
from sparsebench.errors import DivergedError, UnsupportedError, UserError, one_line
from sparsebench.measure.metrics import group_accuracies
from sparsebench.models.actor import Actor, SplitPass
from sparsebench.models.base import Network
from sparsebench.tasks.base import Recipe
from sparsebench.training.evaluation import evaluate
from sparsebench.training.steps import Autograd, Samples, Steps, Teacher

log = logging.getLogger(__name__)

STATE, EARLY = ("step", "epoch", "mean", "summed", "seen"), ("best", "kept", "weights")
"""Attributes of Training and of EarlyStopping that checkpoints store."""


class Batch(NamedTuple):
    """The samples of one step.

    Attributes:
        rows: numbers of the samples.
        visit: number of the pass, which seeds a strategy's random numbers; always 0 with a fixed selection.
        done: share of the training that is done, in [0, 1).
        ends_pass: whether this is the last step of the pass.
    """

    rows: np.ndarray
    visit: int
    done: float
    ends_pass: bool


@dataclass(eq=False)
class EarlyStopping:
    """Evaluates the validation split after each pass, and keeps the weights of the best pass.

    Attributes:
        actor: the strategy on the network in the test, or None.
        samples: the validation split.
        groups: (n,) groups of its samples.
        best: the best result so far, -1 before the first. An equal result is not better.
        kept: the pass with the best result.
        weights: the weights after that pass.
    """

    actor: Actor | None
    samples: Samples
    groups: np.ndarray
    best: float = -1.0
    kept: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def over(self, network: Network, recipe: Recipe, epoch: int) -> bool:
        """Evaluate after `epoch` passes; return whether training should stop."""
        evaluation = evaluate(network, self.actor, self.samples, recipe)
        network.module.train()
        result = evaluation.accuracy
        if recipe.validate_by == "worst_group":
            groups = group_accuracies(evaluation.correct, self.groups, int(self.groups.max()) + 1)
            result = float(np.nanmin(groups))
        if result > self.best:
            self.best, self.kept = result, epoch
            self.weights = {name: value.clone() for name, value in network.module.state_dict().items()}
        return epoch - self.kept >= recipe.patience


class Training:
    """A training of a network. Each pass visits all samples once, in a new random order.

    Args:
        network: the network.
        actor: the strategy on it, or None.
        samples: n training samples.
        recipe: the recipe.
        order_seed: what seeds the order of the samples.
        teacher: a network that a strategy learns from, or None.
        early: early stopping, or None.
        steps: takes the training steps. By default the network's own trainer if it has one, otherwise Autograd.

    Attributes:
        step, epoch: number of steps and passes done.
        mean: mean loss of the last pass.
        summed, seen: sum and number of the losses in the current pass.
        fitted: whether training ended because the loss was low enough.
        finished: whether training has ended.
        failure: the error of a training that ran together with others, see `Network`; or None.
    """

    def __init__(
        self,
        network: Network,
        actor: Actor | None,
        samples: Samples,
        recipe: Recipe,
        order_seed: tuple[object, ...],
        teacher: Teacher | None = None,
        early: EarlyStopping | None = None,
        steps: Steps | None = None,
    ):
        self.network = network
        self.actor = actor
        self.samples = samples
        self.recipe = recipe
        self.order_seed, self.teacher, self.early = order_seed, teacher, early
        self.n = len(samples.labels)
        self.batch = min(recipe.batch or self.n, self.n)
        self.total = recipe.total(self.n)
        if steps is not None:
            self.steps = steps
        self.begin()

    def begin(self) -> None:
        """Reset the progress to the beginning; do not change the network."""
        self.step, self.epoch, self.mean = 0, 0, math.nan
        self.fitted, self.finished = False, self.total == 0
        self.summed: Tensor | float = 0.0
        self.seen = 0
        self.failure: Exception | None = None

    @cached_property
    def steps(self) -> Steps:
        """The network's own trainer, if it has one for this training, otherwise Autograd."""
        args = self.network, self.actor, self.samples, self.recipe
        trainer: Steps | None = self.network.trainer(*args[1:]) if hasattr(self.network, "trainer") else None
        return Autograd(*args, self.teacher) if trainer is None else trainer

    def batches(self) -> Iterator[Batch]:
        """Yield the remaining batches in order, without regard to the losses."""
        passed = math.ceil(self.n / self.batch)
        order = np.empty(0, dtype=np.int64)
        for step in range(self.step, self.total):
            epoch, place = divmod(step, passed)
            if place == 0 or not len(order):
                order = seeds.generator(*self.order_seed, epoch).permutation(self.n)
            end = (place + 1) * self.batch
            ends = end >= self.n or step + 1 == self.total
            visit = 0 if self.recipe.fixed_selection else epoch
            yield Batch(order[end - self.batch : end], visit, step / self.total, ends)

    def tell(self, batch: Batch, loss: Tensor | float) -> None:
        """Update the progress with the summed loss of the next batch.

        Raises:
            DivergedError: the loss became NaN or infinite.
        """
        self.summed = self.summed + loss
        self.seen += len(batch.rows)
        self.step += 1
        self.finished = self.step == self.total
        if not batch.ends_pass:
            return
        self.epoch += 1
        self.mean = float(self.summed) / self.seen
        if not math.isfinite(self.mean):
            raise DivergedError(f"training diverged: the loss of pass {self.epoch} is {self.mean}")
        still = self.recipe.stop_at_zero_loss and self.mean == 0.0
        self.fitted = (still or self.mean < self.recipe.stop_below) and self.seen == self.n
        self.finished = self.finished or self.fitted
        self.summed, self.seen = 0.0, 0

    def outcome(self) -> dict[str, float]:
        """Return the numbers of steps and passes, and the mean loss of the last pass.

        If the recipe ends training by the loss, `fitted` is 1 if it did, otherwise 0.
        """
        out = {"steps": float(self.step), "epochs": float(self.epoch), "train_loss": self.mean}
        ends = self.recipe.stop_at_zero_loss or self.recipe.stop_below > 0
        return out | ({"fitted": float(self.fitted)} if ends else {})

    def run(self, on_step: Callable[[int], None] | None = None) -> dict[str, float]:
        """Train to the end.

        Args:
            on_step: called with the number of steps done, before the first and after each.

        Returns:
            `outcome`; with early stopping also `kept_epoch`, the pass of the weights.

        Raises:
            DivergedError: the loss became NaN or infinite.
        """
        steps, early = self.steps, self.early
        if on_step is not None and self.step == 0:
            on_step(0)
        for batch in self.batches():
            self.tell(batch, steps.step(batch.rows, batch.visit, batch.done))
            if batch.ends_pass and early is not None:
                steps.store()
                self.finished |= early.over(self.network, self.recipe, self.epoch)
            if on_step is not None:
                on_step(self.step)
            if self.finished:
                break
        steps.store()
        if early is None:
            return self.outcome()
        self.network.module.load_state_dict(early.weights)
        return self.outcome() | {"kept_epoch": float(early.kept)}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint of a training with Autograd: tensors, numbers and strings."""
        steps = cast(Autograd, self.steps)
        state: dict[str, Any] = {
            "network": steps.network.module.state_dict(),
            "optimiser": steps.opt.state_dict(),
            "parts": steps.parts,
            "course": {name: getattr(self, name) for name in STATE},
            "random": torch.get_rng_state(),
        }
        if self.early is not None:
            state["early"] = {name: getattr(self.early, name) for name in EARLY}
        if (device := steps.samples.labels.device).type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(device)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state` of this training before its end; its tensors are on the CPU."""
        steps = cast(Autograd, self.steps)
        steps.network.module.load_state_dict(state["network"])
        steps.opt.load_state_dict(state["optimiser"])
        steps.parts = state["parts"]
        vars(self).update(state["course"])
        if self.early is not None:
            vars(self.early).update(state["early"])
        torch.set_rng_state(state["random"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], steps.samples.labels.device)


class Checkpoint:
    """Writes the state of a training to a file at intervals. It is called after each step.

    The file is written atomically. It is used only if it was made under the same conditions.

    Args:
        path: the file.
        training: the training.
        interval: seconds between two checkpoints.
        made_by: the conditions that a file must have been made under, by name.

    Attributes:
        resumed: how often the training was resumed.
    """

    def __init__(self, path: Path, training: Training, interval: float, made_by: Mapping[str, str]):
        self.path, self.training, self.interval = path, training, interval
        self.made_by = {**made_by, "torch": str(torch.__version__), "sparsebench": __version__}
        self.due = time.monotonic() + interval
        self.resumed = 0
        self.warned = False

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


class Watch:
    """Measures at intervals during a training, first before the first step. It is called after each step.

    Args:
        training: the training, whose recipe has the interval.
        actor: the strategy on the network in the test, or None.
        samples: the test split.

    Attributes:
        looks: the number of finished steps at each measurement.
        seen: at each measurement the mean test loss, the test accuracy, and the values of the network's `observe`.

    Raises:
        UnsupportedError: the network has no `observe`.
    """

    def __init__(self, training: Training, actor: Actor | None, samples: Samples):
        if not hasattr(training.network, "observe"):
            raise UnsupportedError(
                "watch=... is for networks that have `observe`, as vit:attention=positional has: others show nothing"
            )
        self.training, self.actor, self.samples = training, actor, samples
        self.network = cast(Any, training.network)
        self.first = {name: value.clone() for name, value in self.network.module.state_dict().items()}
        self.looks: list[int] = []
        self.seen: dict[str, list[float]] = {}

    def __call__(self, step: int) -> None:
        """Measure if it is due."""
        if step % self.training.recipe.watch == 0:
            self.measure(step)

    @torch.no_grad()
    def measure(self, step: int) -> None:
        """Measure after a number of steps, unless it was already done."""
        if self.looks and self.looks[-1] == step:
            return
        training = self.training
        steps = cast(Any, self.training.steps)
        steps.store()
        self.looks.append(step)
        if hasattr(steps, "test"):
            loss, accuracy = steps.test(self.actor, self.samples)
        else:
            evaluation = evaluate(self.network, self.actor, self.samples, training.recipe)
            self.network.module.train()
            loss, accuracy = evaluation.loss, evaluation.accuracy
        train = _pass(training.samples, training.actor, training=True)
        values = self.network.observe(train, _pass(self.samples, self.actor))
        for name, value in {"test_loss": loss, "test_accuracy": accuracy, **values}.items():
            self.seen.setdefault(name, []).append(value)

    def iterations(self, success: Callable[[float, float], bool | None]) -> int | None:
        """Return the number of steps at the first successful measurement, or None."""
        looks = zip(self.looks, self.seen["test_loss"], self.seen["test_accuracy"], strict=True)
        return next((step for step, loss, accuracy in looks if success(loss, accuracy)), None)

    @torch.no_grad()
    def series(self) -> dict[str, tuple[float, ...]]:
        """Return all measurements, their steps, and the network's `trained_values`, as samples of a record."""
        trained = self.network.trained_values(self.first, _pass(self.samples, None))
        return {
            "watched_steps": tuple(map(float, self.looks)),
            **{f"watched_{name}": tuple(values) for name, values in self.seen.items()},
            **{f"trained_{name}": values for name, values in trained.items()},
        }


def _pass(samples: Samples, actor: Actor | None, training: bool = False) -> SplitPass:
    acting = None if actor is None else samples.begin(actor, samples.items, visit=0, training=training)
    relevance = samples.items.new_empty(len(samples.items), 0) if samples.relevance is None else samples.relevance
    return SplitPass(samples.inputs, samples.labels, relevance, acting)
