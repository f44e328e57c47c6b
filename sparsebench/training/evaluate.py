"""Running a trained network over the test split, and timing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsebench.measure.cost import Step, mean_step
from sparsebench.measure.metrics import mean_loss
from sparsebench.models.actor import Actor, Pass
from sparsebench.models.base import Network
from sparsebench.strategy.plans import Rest
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import Samples, losses, outputs_of, predictions

T = TypeVar("T")

BATCH = 200
"""On small networks a fixed 4 to 10 ms a batch is what strategies cost, so that larger batches are quicker; past a few
hundred images activations no longer fit a CPU's cache."""
TIMED_BATCH = 100
CPU_MACS = 2e11
"""On a CPU a batch makes no more products than these: a few seconds of one core, tens of megabytes of activations."""


@dataclass(frozen=True)
class Choice:
    """What a strategy chose in one block, for n samples of N patches.

    Attributes:
        block: which; -1 for what came out at the end, with the scores of the first decision.
        kept: (n, N) which patches were there after it.
        scores: (n, N), NaN where a patch was not there before it; `kept` where the strategy gave no scores.
        scored: whether it gave some.
        made: whether it chose at all, in some batch.
    """

    block: int
    kept: np.ndarray
    scores: np.ndarray
    scored: bool
    made: bool = True


@dataclass(frozen=True)
class Evaluation:
    """What came out of the test split, n samples of N tokens.

    Attributes:
        predicted: (n,) class numbers.
        losses: (n,) of each sample, in single precision.
        kept: (n, N) which input patches were still there at the end.
        choices: the end, and what was chosen in each block in which the strategy acted; empty where nobody asked.
        steps: realised token counts, block by block, mean over samples; empty where nothing acted.
        macs: (n,) of each sample, or empty.
        rank: (n,) how many classes come before the sample's own: 0 where it is the predicted one.
        confidence: (n,) the probability of the predicted class; None where the loss is no cross-entropy.
        batch: how many samples came at a time.
        seconds: wall seconds of the network and the strategy for each batch of so many, but the first one, with which
            what a process does once is done.
    """

    predicted: np.ndarray
    losses: np.ndarray
    kept: np.ndarray
    choices: list[Choice]
    steps: list[Step]
    macs: np.ndarray
    rank: np.ndarray
    confidence: np.ndarray | None
    batch: int
    seconds: list[float]

    @property
    def loss(self) -> float:
        """The mean loss."""
        return mean_loss(self.losses)


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
    told = on_done or (lambda done: None)
    first = batch or first_batch(network, samples)
    return halving(first, lambda size: _evaluate(network, actor, samples, recipe, size, choices, told))


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
    predicted, loss, kept, seen, steps, macs, rank, sure, done = [], [], [], [], [], [], [], [], 0
    N, times = network.cost.tokens, _Times(samples.labels.device)
    never = None if samples.absent is None else torch.where(samples.absent, -torch.inf, 0.0)
    for rows, inputs in samples.batches(batch):
        times.note()
        acting = None if actor is None else samples.begin(actor, rows, visit=0, training=False)
        outputs = outputs_of(network, inputs, acting)
        times.note(len(rows))
        if never is not None:
            outputs = outputs + never.to(outputs.dtype)  # several times as fast as `masked_fill`
        predicted.append(predictions(recipe, outputs))
        loss.append(losses(recipe, outputs, samples.labels[rows]).float())
        rank.append(ranks(recipe, outputs, samples.labels[rows]))
        if recipe.loss == "cross-entropy":
            sure.append(outputs.float().softmax(dim=1).amax(dim=1))
        if acting is None:
            kept.append(torch.ones(len(rows), N, dtype=torch.bool, device=rows.device))
        else:
            kept.append(patches_in(acting.index, N))
            steps.append([(len(rows), step) for step in acting.steps])
            macs.append(np.broadcast_to(network.cost.macs(acting.steps), len(rows)))
        if choices:
            scores = None if acting is None else acting.scores
            end = _choice(-1, kept[-1], kept[-1] if scores is None else scores, scores is not None)
            seen.append([end, *(() if acting is None else _choices(acting, N))])
        done += len(rows)
        on_done(done)
    return Evaluation(
        torch.cat(predicted).cpu().numpy(),
        torch.cat(loss).cpu().numpy(),
        torch.cat(kept).cpu().numpy(),
        [_join(parts) for parts in zip(*seen, strict=True) if any(part.made for part in parts)],
        [mean_step(block) for block in zip(*steps, strict=True)],
        np.concatenate(macs) if macs else np.empty(0),
        torch.cat(rank).cpu().numpy(),
        torch.cat(sure).cpu().numpy() if sure else None,
        batch,
        [taken for n, taken in times.seconds()[1:] if n == batch],
    )


class _Times:
    """Times of a device, which are read when it has come to its end: it is not waited for meanwhile."""

    def __init__(self, device: torch.device):
        self.device = device
        self.noted: list[Any] = []
        self.sizes: list[int] = []

    def note(self, size: int | None = None) -> None:
        """Note the time when all that was asked of the device so far is done; at the end of a batch with its size."""
        if self.device.type == "cuda":
            self.noted.append(torch.cuda.Event(enable_timing=True))
            self.noted[-1].record(torch.cuda.current_stream(self.device))
        else:
            self.noted.append(time.perf_counter())
        self.sizes += [] if size is None else [size]

    def seconds(self) -> list[tuple[int, float]]:
        """Return of each batch its size and its seconds; the device has done its work."""
        pairs = zip(self.noted[::2], self.noted[1::2], strict=True)
        events = self.device.type == "cuda"
        taken = [start.elapsed_time(end) / 1000 if events else end - start for start, end in pairs]
        return list(zip(self.sizes, taken, strict=True))


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


def _choice(block: int, kept: Tensor, scores: Tensor, scored: bool, made: bool = True) -> Choice:
    """Return what was chosen for the (B, N) of one batch."""
    return Choice(block, kept.cpu().numpy(), scores.float().cpu().numpy(), scored, made)


def _choices(acting: Pass, N: int) -> Iterator[Choice]:
    """Yield what became of the patches in each block in which tokens were to leave."""
    decisions = {decision.block: decision for decision in acting.decisions}
    kept = torch.ones(len(acting.index), N, dtype=torch.bool, device=acting.index.device)
    for block in sorted(acting.actor.keep):
        if (decision := decisions.get(block)) is None:
            yield _choice(block, kept, kept.float().masked_fill(~kept, torch.nan), scored=False, made=False)
            continue
        # Of tokens that rest those that rested before are there again.
        present = patches_in(decision.before, N) if isinstance(decision.plan, Rest) else kept
        kept, given = patches_in(decision.after, N), decision.plan.scores
        scores = kept.float() if given is None else _spread(decision.before, given.float(), N)
        yield _choice(block, kept, scores.masked_fill(~present, torch.nan), given is not None)


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
