"""The loops over batches: training a network, and evaluating a trained one with its times."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import DivergedError
from sparsebench.measure.cost import Step, mean_step
from sparsebench.measure.metrics import Items, group_accuracies
from sparsebench.models.actor import Actor, Pass
from sparsebench.models.base import Network
from sparsebench.strategy.plans import Rest
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import Autograd, Samples, Steps, Teacher, losses, outputs_of, predictions

T = TypeVar("T")

BATCH = 200
"""Samples per batch. Strategies cost small networks a fixed 4 to 10 ms per batch, so that larger batches are faster.
Beyond a few hundred images the activations no longer fit a CPU's cache."""
TIMED_BATCH = 100
"""Largest number of samples per batch for measuring speed."""
CPU_MACS = 2e11
"""Largest MACs of a batch on a CPU: a few seconds of one core, tens of megabytes of activations."""
STATE, EARLY = ("step", "epoch", "mean", "summed", "seen"), ("best", "kept", "weights")
"""Attributes of Training and of EarlyStopping that checkpoints store."""


@dataclass(frozen=True)
class Choice:
    """The selection of a strategy in one block, for n samples of N patches.

    Attributes:
        block: the block; -1 for the patches that are kept at the end, with the scores of the first decision.
        kept: (n, N) booleans, the patches that are present after the block.
        scores: (n, N), NaN for patches that were absent before the block; equal to `kept` without scores.
        scored: whether the strategy gave scores.
        has_choice: whether the strategy made a selection, in at least one batch.
    """

    block: int
    kept: np.ndarray
    scores: np.ndarray
    scored: bool
    has_choice: bool = True


@dataclass(frozen=True, kw_only=True)
class Evaluation(Items):
    """The outcomes of the test items, n samples of N tokens. All groups are 0, since they are not known here.

    Attributes:
        kept: (n, N) booleans, the patches that are present at the end.
        choices: the selection at the end, and in each block with a site of the strategy; empty unless requested.
        steps: realised token counts of each block, mean over samples; empty without a strategy.
        macs: (n,) MACs of each sample, or empty.
        batch: number of samples per batch.
        seconds: wall seconds of network and strategy for each full batch except the first, which includes the
            initialisation of the process.
    """

    kept: np.ndarray
    choices: list[Choice]
    steps: list[Step]
    macs: np.ndarray
    batch: int
    seconds: list[float]


def first_batch(network: Network, samples: Samples) -> int:
    """Return the batch size to try first: `BATCH`, or on a CPU fewer samples, see CPU_MACS."""
    if samples.labels.device.type != "cpu":
        return BATCH
    cost = network.cost
    return max(1, min(BATCH, int(CPU_MACS / cost.macs(cost.dense()))))


def evaluate(
    network: Network,
    actor: Actor | None,
    samples: Samples,
    recipe: Recipe,
    batch: int | None = None,
    *,
    choices: bool = False,
    on_done: Callable[[int], None] | None = None,
) -> Evaluation:
    """Return the evaluation of all samples. A sample's result does not depend on its batch.

    The host waits for the device once, at the end; with `choices` once per batch.

    Args:
        network: the network.
        actor: the strategy on the network, or None.
        samples: n samples of N tokens.
        recipe: the task's recipe.
        batch: samples per batch; `first_batch` by default. It is halved while the device is out of memory.
        choices: whether to return the selection of each block.
        on_done: called after each batch with the number of samples done.
    """
    report = on_done or (lambda done: None)
    first = batch or first_batch(network, samples)
    return halving(first, lambda size: _evaluate(network, actor, samples, recipe, size, choices, report))


def halving(batch: int, work: Callable[[int], T]) -> T:
    """Return `work(batch)`. Halve the batch size while the device is out of memory.

    Raises:
        torch.OutOfMemoryError: even a batch of one sample does not fit.
    """
    while True:
        try:
            return work(batch)
        except torch.OutOfMemoryError:
            if batch == 1:
                raise
        batch //= 2
        torch.cuda.empty_cache()


@torch.no_grad()
def _evaluate(
    network: Network,
    actor: Actor | None,
    samples: Samples,
    recipe: Recipe,
    batch: int,
    choices: bool,
    on_done: Callable[[int], None],
) -> Evaluation:
    network.module.eval()
    out, seen, steps, macs, times, done = defaultdict[str, list[Tensor]](list), [], [], [], [], 0
    N, device = network.cost.tokens, samples.labels.device
    for rows, inputs in samples.batches(batch):
        start = _mark(device)
        acting = None if actor is None else samples.begin(actor, rows, visit=0, training=False)
        outputs = outputs_of(network, inputs, acting)
        times.append((start, _mark(device)))
        if samples.absent is not None:
            outputs = outputs.masked_fill(samples.absent, -torch.inf)
        out["predicted"].append(predictions(recipe, outputs))
        out["losses"].append(losses(recipe, outputs, samples.labels[rows]).float())
        out["ranks"].append(ranks(recipe, outputs, samples.labels[rows]))
        if recipe.loss == "cross-entropy":
            out["confidence"].append(outputs.float().softmax(dim=1).amax(dim=1))
        if acting is None:
            kept = torch.ones(len(rows), N, dtype=torch.bool, device=rows.device)
        else:
            kept = patches_in(acting.index, N)
            steps.append([(len(rows), step) for step in acting.steps])
            macs.append(np.broadcast_to(network.cost.macs(acting.steps), len(rows)))
        out["kept"].append(kept)
        if choices:
            scores = None if acting is None else acting.scores
            end = _choice(-1, kept, kept if scores is None else scores, scores is not None)
            seen.append([end, *(() if acting is None else _choices(acting, N))])
        done += len(rows)
        on_done(done)
    labels = samples.labels[samples.items].cpu().numpy()
    arrays: dict[str, Any] = {name: torch.cat(parts).cpu().numpy() for name, parts in out.items()}
    return Evaluation(
        **arrays,
        labels=labels,
        groups=np.zeros_like(labels),
        choices=[_join(parts) for parts in zip(*seen, strict=True) if any(part.has_choice for part in parts)],
        steps=[mean_step(block) for block in zip(*steps, strict=True)],
        macs=np.concatenate(macs) if macs else np.empty(0),
        batch=batch,
        seconds=[_seconds(*marks) for marks in times[1 : done // batch]],
    )


def _mark(device: torch.device) -> Any:
    """Return a time mark after the work queued on the device so far, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two marks, after the device has finished."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def clock(device: torch.device) -> float:
    """Wait until the device has finished, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ranks(recipe: Recipe, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return (B,), the number of classes that the logits (B, classes) rank before the label; ties by class number.

    Networks that predict by signs do not rank classes. For them it is 0 if the prediction is right, otherwise 1.
    """
    if recipe.loss != "cross-entropy":
        return (predictions(recipe, outputs) != labels).long()
    correct = outputs.gather(1, labels[:, None])
    before = torch.arange(outputs.shape[1], device=labels.device) < labels[:, None]
    return ((outputs > correct) | ((outputs == correct) & before)).sum(dim=1, dtype=torch.int32)


def patches_in(index: Tensor, N: int) -> Tensor:
    """Return (B, N) booleans, which patches are among the (B, M) tokens `index`; -1 is a token without a patch."""
    return _spread(index, torch.ones_like(index, dtype=torch.bool), N)


def _spread(index: Tensor, values: Tensor, N: int) -> Tensor:
    """Return (B, N), the value of each patch's token among the (B, M) tokens, or 0.

    A token without a patch (-1) is written into an additional column, which is removed.
    """
    return values.new_zeros(len(index), N + 1).scatter(1, index % (N + 1), values)[:, :-1]


def _choice(block: int, kept: Tensor, scores: Tensor, scored: bool, has_choice: bool = True) -> Choice:
    """Return the Choice of one batch from (B, N) tensors."""
    return Choice(block, kept.cpu().numpy(), scores.float().cpu().numpy(), scored, has_choice)


def _choices(acting: Pass, N: int) -> Iterator[Choice]:
    """Yield the selection in each block with a site of the strategy."""
    decisions = {decision.block: decision for decision in acting.decisions}
    kept = torch.ones(len(acting.index), N, dtype=torch.bool, device=acting.index.device)
    for block in sorted(acting.actor.keep):
        if (decision := decisions.get(block)) is None:
            yield _choice(block, kept, kept.float().masked_fill(~kept, torch.nan), scored=False, has_choice=False)
            continue
        # Tokens that rested in earlier blocks are present again.
        present = patches_in(decision.before, N) if isinstance(decision.plan, Rest) else kept
        kept, values = patches_in(decision.after, N), decision.plan.scores
        scores = kept.float() if values is None else _spread(decision.before, values.float(), N)
        yield _choice(block, kept, scores.masked_fill(~present, torch.nan), values is not None)


def _join(parts: Sequence[Choice]) -> Choice:
    kept, scores = (np.concatenate(arrays) for arrays in ([p.kept for p in parts], [p.scores for p in parts]))
    return Choice(parts[0].block, kept, scores, all(part.scored for part in parts))


@torch.no_grad()
def seconds_per_batch(
    network: Network, actor: Actor | None, samples: Samples, batch: int, repeats: int = 7
) -> tuple[int, list[float]]:
    """Return the batch size and the wall seconds of `repeats` forward passes, after one that is not counted.

    The batch has at most `batch` and at most `TIMED_BATCH` samples. It is already on the device, so that only network
    and strategy are timed.
    """
    network.module.eval()
    rows = samples.items[: min(batch, TIMED_BATCH)]
    moved = Samples(
        samples.take(rows), samples.labels[rows], None if samples.relevance is None else samples.relevance[rows]
    )
    seconds = []
    for repeat in range(repeats + 1):
        start = clock(rows.device)
        moved.forward(network, actor, moved.items, visit=0, training=False)
        if repeat:
            seconds.append(clock(rows.device) - start)
    return len(rows), seconds


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
        self, network: Network, actor: Actor | None, samples: Samples, recipe: Recipe, order_seed: tuple[object, ...],
        teacher: Teacher | None = None, early: EarlyStopping | None = None, steps: Steps | None = None,
    ):  # fmt: skip
        self.network, self.actor, self.samples, self.recipe = network, actor, samples, recipe
        self.order_seed, self.teacher, self.early = order_seed, teacher, early
        self.n = len(samples.labels)
        self.batch, self.total = min(recipe.batch or self.n, self.n), recipe.total(self.n)
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
            "network": steps.network.module.state_dict(), "optimiser": steps.opt.state_dict(), "parts": steps.parts,
            "course": {name: getattr(self, name) for name in STATE}, "random": torch.get_rng_state(),
        }  # fmt: skip
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
