"""The loops over batches: training a network, and running a trained one over the test split, with its times."""

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
"""On small networks a fixed 4 to 10 ms a batch is what strategies cost, so that larger batches are quicker; past a few
hundred images activations no longer fit a CPU's cache."""
TIMED_BATCH = 100
CPU_MACS = 2e11
"""On a CPU a batch makes no more products than these: a few seconds of one core, tens of megabytes of activations."""
STATE, EARLY = ("step", "epoch", "mean", "summed", "seen"), ("best", "kept", "weights")
"""What the rest of a training depends on, of itself and of early stopping."""


@dataclass(frozen=True)
class Choice:
    """What a strategy chose in one block, for n samples of N patches.

    Attributes:
        block: which; -1 for what came out at the end, with the scores of the first decision.
        kept: (n, N) which patches were there after it.
        scores: (n, N), NaN where a patch was not there before it; `kept` where the strategy gave no scores.
        scored: whether it gave some.
        has_choice: whether it chose at all, in some batch.
    """

    block: int
    kept: np.ndarray
    scores: np.ndarray
    scored: bool
    has_choice: bool = True


@dataclass(frozen=True, kw_only=True)
class Evaluation(Items):
    """What came out of the test split, n samples of N tokens: the items, whose groups are not known here, and more.

    Attributes:
        choices: the end, and what was chosen in each block in which the strategy acted; empty where nobody asked.
        steps: realised token counts, block by block, mean over samples; empty where nothing acted.
        macs: (n,) of each sample, or empty.
        batch: how many samples came at a time.
        seconds: wall seconds of the network and the strategy for each batch of so many, but the first one, with which
            what a process does once is done.
    """

    kept: np.ndarray
    choices: list[Choice]
    steps: list[Step]
    macs: np.ndarray
    batch: int
    seconds: list[float]


def first_batch(network: Network, samples: Samples) -> int:
    """Return how many samples are tried at a time: `BATCH`, or fewer of those that are much work for a CPU."""
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
    """Return the evaluation of all samples. A sample's result does not depend on the batch it comes in.

    The device is waited for once, at the end; where choices are wanted, once a batch.

    Args:
        network: the network.
        actor: what acts on it, if anything.
        samples: n samples of N tokens.
        recipe: of the task.
        batch: how many come at a time, `first_batch` unless it is given; halved for as long as the device has no memory
            for it.
        choices: whether what is chosen block by block is wanted.
        on_done: called after each batch with how many samples are done.
    """
    report = on_done or (lambda done: None)
    first = batch or first_batch(network, samples)
    return halving(first, lambda size: _evaluate(network, actor, samples, recipe, size, choices, report))


def halving(batch: int, work: Callable[[int], T]) -> T:
    """Return what the work makes of batches of that size, or of half of it for as long as the device has no memory.

    Raises:
        torch.OutOfMemoryError: not even one fits.
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
    """Return the time when all that was asked of the device so far is done; it is not waited for meanwhile."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two marks of a device that has come to its end."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def clock(device: torch.device) -> float:
    """Return the time in seconds when all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def ranks(recipe: Recipe, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return (B,), how many classes come before the label: by their logits (B, classes), of equal ones the first.

    Networks that tell classes apart by signs do not order them: there it is 0 or 1.
    """
    if recipe.loss != "cross-entropy":
        return (predictions(recipe, outputs) != labels).long()
    correct = outputs.gather(1, labels[:, None])
    before = torch.arange(outputs.shape[1], device=labels.device) < labels[:, None]
    return ((outputs > correct) | ((outputs == correct) & before)).sum(dim=1, dtype=torch.int32)


def patches_in(index: Tensor, N: int) -> Tensor:
    """Return (B, N) booleans, which patches are among the (B, M) tokens; -1 stands for no single patch."""
    return _spread(index, torch.ones_like(index, dtype=torch.bool), N)


def _spread(index: Tensor, values: Tensor, N: int) -> Tensor:
    """Return (B, N), for each patch the value of its token among the (B, M), or 0.

    A token that stands for no single patch (-1) is written into a column that is cut off again.
    """
    return values.new_zeros(len(index), N + 1).scatter(1, index % (N + 1), values)[:, :-1]


def _choice(block: int, kept: Tensor, scores: Tensor, scored: bool, has_choice: bool = True) -> Choice:
    """Return what was chosen for the (B, N) of one batch."""
    return Choice(block, kept.cpu().numpy(), scores.float().cpu().numpy(), scored, has_choice)


def _choices(acting: Pass, N: int) -> Iterator[Choice]:
    """Yield what became of the patches in each block in which tokens were to leave."""
    decisions = {decision.block: decision for decision in acting.decisions}
    kept = torch.ones(len(acting.index), N, dtype=torch.bool, device=acting.index.device)
    for block in sorted(acting.actor.keep):
        if (decision := decisions.get(block)) is None:
            yield _choice(block, kept, kept.float().masked_fill(~kept, torch.nan), scored=False, has_choice=False)
            continue
        # Of tokens that rest those that rested before are there again.
        present = patches_in(decision.before, N) if isinstance(decision.plan, Rest) else kept
        kept, values = patches_in(decision.after, N), decision.plan.scores
        scores = kept.float() if values is None else _spread(decision.before, values.float(), N)
        yield _choice(block, kept, scores.masked_fill(~present, torch.nan), values is not None)


def _join(parts: Sequence[Choice]) -> Choice:
    kept, scores = (np.concatenate(arrays) for arrays in ([p.kept for p in parts], [p.scores for p in parts]))
    return Choice(parts[0].block, kept, scores, all(part.scored for part in parts))


@torch.no_grad()
def seconds_per_batch(
    network: Network, actor: Actor | None, samples: Samples, batch: int = TIMED_BATCH, repeats: int = 7
) -> tuple[int, list[float]]:
    """Return the batch size and the wall seconds of each of `repeats` forward passes, after one that is not counted.

    The batch has `batch` samples, `TIMED_BATCH` at most, or all there are. It is on the device before: what is timed is
    the network with the strategy, not how the samples get there.
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


@dataclass(eq=False)
class EarlyStopping:
    """Looks at the validation split after each pass, and keeps the weights of the best one.

    Attributes:
        actor: what acts on the network in the test, or None.
        samples: the validation split.
        groups: (n,) its groups.
        best: the best result so far, -1 before the first; one that is as good is not better.
        kept: the pass that it is from; `weights` those of that pass.
    """

    actor: Actor | None
    samples: Samples
    groups: np.ndarray
    best: float = -1.0
    kept: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)

    def over(self, network: Network, recipe: Recipe, epoch: int) -> bool:
        """Look after that many passes; say whether training is to end."""
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
    """A training: which batches it has, pass by pass without replacement, where it is, and when it is over.

    Args:
        network: what is trained.
        actor: the strategy on it, or None.
        samples: n training samples.
        recipe: how.
        order_seed: dimensions that name the order of the samples.
        teacher: what a strategy learns from, or None.
        early: what ends it early, or None.
        steps: what takes the steps; unless given the network's own trainer, where it brings one, else autograd.

    Attributes:
        step, epoch: steps and passes done.
        mean: mean loss of the last pass.
        summed, seen: of the pass under way the sum of the losses, and their number.
        fitted: whether the loss was low enough to end.
        finished: whether it is at its end.
        failure: why it has no outcome where it ran in one program with others, see `Network`; or None.
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
        """Go back to the beginning; the network stays as it is."""
        self.step, self.epoch, self.mean = 0, 0, math.nan
        self.fitted, self.finished = False, self.total == 0
        self.summed: Tensor | float = 0.0
        self.seen = 0
        self.failure: Exception | None = None

    @cached_property
    def steps(self) -> Steps:
        """The steps of the network's own trainer, where it brings one for such a training, else autograd's."""
        args = self.network, self.actor, self.samples, self.recipe
        trainer: Steps | None = self.network.trainer(*args[1:]) if hasattr(self.network, "trainer") else None
        return Autograd(*args, self.teacher) if trainer is None else trainer

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

    def run(self, on_step: Callable[[int], None] | None = None) -> dict[str, float]:
        """Train to the end; the weights are in the network then.

        Args:
            on_step: called with the number of steps done, before the first and after each.

        Returns:
            see `outcome`; with early stopping the pass too that the weights are from.

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
        """Return all that the rest depends on, of steps by autograd: tensors, numbers and words."""
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
        """Go on from a state of this training, which is not its end; its tensors lie on the CPU."""
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
