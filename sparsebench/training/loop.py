"""The training loop, one for every task, model and way to take a step: its batches, its early end, its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import DivergedError
from sparsebench.measure.metrics import group_accuracies
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.tasks.base import Recipe
from sparsebench.training.evaluate import evaluate
from sparsebench.training.steps import Autograd, Samples, Steps, Teacher

COURSE, EARLY = ("step", "epoch", "mean", "summed", "seen"), ("best", "kept", "weights")
"""What of a course, and of early stopping, the rest of a training depends on."""


def steps_for(
    network: Network, actor: Actor | None, samples: Samples, recipe: Recipe, teacher: Teacher | None = None
) -> Steps:
    """Return the steps of the network's own trainer, where it brings one for such a training, else autograd's."""
    if hasattr(network, "trainer"):
        steps: Steps | None = network.trainer(actor, samples, recipe)
        if steps is not None:
            return steps
    return Autograd(network, actor, samples, recipe, teacher)


class Batch(NamedTuple):
    """Samples of one step, and where in the training it is.

    Attributes:
        rows: which samples.
        visit: which pass it is to a strategy that draws anew in each.
        done: share of the training that is done, in [0, 1).
        ends_pass: whether the pass ends with it.
    """

    rows: np.ndarray
    visit: int
    done: float
    ends_pass: bool


class Course:
    """Which batches a training has, pass by pass without replacement, and when it is over.

    Args:
        n: number of training samples.
        recipe: how.
        order_seed: dimensions that name the order of the samples.

    Attributes:
        step, epoch: steps and passes done.
        mean: mean loss of the last pass.
        summed, seen: of the pass under way the sum of the losses, and their number.
        fitted: whether the loss was low enough to end.
    """

    def __init__(self, n: int, recipe: Recipe, order_seed: tuple[object, ...]):
        self.n, self.recipe, self.order_seed = n, recipe, order_seed
        self.batch, self.total = min(recipe.batch or n, n), recipe.total(n)
        self.step, self.epoch, self.mean = 0, 0, math.nan
        self.fitted, self.finished = False, self.total == 0
        self.summed: Tensor | float = 0.0
        self.seen = 0

    def batches(self) -> Iterator[Batch]:
        """Yield the batches that are left in their order, whatever the losses."""
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
        """Take note of the summed loss of the next batch.

        Raises:
            DivergedError: the loss became NaN or infinite.
        """
        self.summed, self.seen, self.step = self.summed + loss, self.seen + len(batch.rows), self.step + 1
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
        """Return steps and passes done, the last pass's mean loss, and 1 if that was low enough to end, else 0.

        The last is there where the recipe says what is low enough.
        """
        out = {"steps": float(self.step), "epochs": float(self.epoch), "train_loss": self.mean}
        ends = self.recipe.stop_at_zero_loss or self.recipe.stop_below > 0
        return out | ({"fitted": float(self.fitted)} if ends else {})


class EarlyStopping:
    """Looks at the validation split after each pass, and keeps the weights of the best one.

    Args:
        network: what is trained.
        actor: what acts on it in the test, or None.
        samples: the validation split.
        groups: (n,) its groups.
        recipe: says what the result is, and after how many passes without a better one training ends.

    Attributes:
        best: the best result so far, -1 before the first; one that is as good is not better.
        kept: the pass that it is from; `weights` those of that pass.
    """

    def __init__(self, network: Network, actor: Actor | None, samples: Samples, groups: np.ndarray, recipe: Recipe):
        self.network, self.actor, self.samples, self.groups, self.recipe = network, actor, samples, groups, recipe
        self.best, self.kept = -1.0, 0
        self.weights: dict[str, Tensor] = {}

    def over(self, epoch: int) -> bool:
        """Look after that many passes; say whether training is to end."""
        result = self._result()
        if result > self.best:
            self.best, self.kept = result, epoch
            self.weights = {name: value.clone() for name, value in self.network.module.state_dict().items()}
        return epoch - self.kept >= self.recipe.patience

    def restore(self) -> None:
        """Put the weights of the best pass into the network."""
        self.network.module.load_state_dict(self.weights)

    def _result(self) -> float:
        evaluation = evaluate(self.network, self.actor, self.samples, self.recipe)
        self.network.module.train()
        correct = evaluation.predicted == self.samples.labels.cpu().numpy()
        if self.recipe.validate_by == "accuracy":
            return float(correct.mean())
        return float(np.nanmin(group_accuracies(correct, self.groups, int(self.groups.max()) + 1)))


@dataclass(eq=False)
class JointTraining:
    """A training that may run in one program with others, see `Network`.

    Attributes:
        actor: the strategy on the network, or None.
        course: where it is; trained to the end it is `finished`.
        failure: why it has no outcome, or None.
    """

    network: Network
    actor: Actor | None
    samples: Samples
    recipe: Recipe
    course: Course
    failure: Exception | None = None


class Training:
    """A training under way.

    Args:
        steps: what is trained.
        course: where it is.
        early: what ends it early, or None.
    """

    def __init__(self, steps: Steps, course: Course, early: EarlyStopping | None = None):
        self.steps, self.course, self.early = steps, course, early

    def run(self, on_step: Callable[[int], None] | None = None) -> dict[str, float]:
        """Train to the end of the course; the weights are in the network then.

        Args:
            on_step: called with the number of steps done, before the first and after each.

        Returns:
            see `Course.outcome`; with early stopping the pass too that the weights are from.

        Raises:
            DivergedError: the loss became NaN or infinite.
        """
        course = self.course
        if on_step is not None and course.step == 0:
            on_step(0)
        for batch in course.batches():
            course.tell(batch, self.steps.step(batch.rows, batch.visit, batch.done))
            if batch.ends_pass and self.early is not None:
                self.steps.store()
                course.finished |= self.early.over(course.epoch)
            if on_step is not None:
                on_step(course.step)
            if course.finished:
                break
        self.steps.store()
        if self.early is None:
            return course.outcome()
        self.early.restore()
        return course.outcome() | {"kept_epoch": float(self.early.kept)}

    def state(self) -> dict[str, Any]:
        """Return all that the rest depends on, of steps by autograd: tensors, numbers and words."""
        steps = cast(Autograd, self.steps)
        state: dict[str, Any] = {
            "network": steps.network.module.state_dict(), "optimiser": steps.opt.state_dict(), "parts": steps.parts,
            "course": {name: getattr(self.course, name) for name in COURSE}, "random": torch.get_rng_state(),
        }  # fmt: skip
        if self.early is not None:
            state["early"] = {name: getattr(self.early, name) for name in EARLY}
        if (device := steps.samples.labels.device).type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(device)
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state of this training, which is not its end; its tensors lie on the CPU."""
        steps = cast(Autograd, self.steps)
        steps.network.module.load_state_dict(state["network"])
        steps.opt.load_state_dict(state["optimiser"])
        steps.parts = state["parts"]
        vars(self.course).update(state["course"])
        if self.early is not None:
            vars(self.early).update(state["early"])
        torch.set_rng_state(state["random"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], steps.samples.labels.device)
