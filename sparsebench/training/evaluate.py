"""Running a trained network over the test split, and timing it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from sparsebench.measure.cost import Step, mean_step
from sparsebench.measure.scores import mean_loss
from sparsebench.models.actor import Actor, Pass
from sparsebench.models.base import Network
from sparsebench.plans import Rest
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
        block: which.
        kept: (n, N) which patches were there after it.
        scores: (n, N), NaN where a patch was not there before it; `kept` where the strategy gave no scores.
        scored: whether it gave some.
    """

    block: int
    kept: np.ndarray
    scores: np.ndarray
    scored: bool


@dataclass(frozen=True)
class Evaluation:
    """What came out of the test split, n samples of N tokens.

    Attributes:
        predicted: (n,) class numbers.
        losses: (n,) of each sample, in single precision.
        kept: (n, N) which input patches were still there at the end.
        scores: (n, N) of the strategy's first decision; constant where it made none; `kept` where it gave no scores.
        choices: what was chosen in each block in which the strategy acted.
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
    scores: np.ndarray
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


def evaluate(network: Network, actor: Actor | None, samples: Samples, recipe: Recipe) -> Evaluation:
    """Return the evaluation of all samples. A sample's result does not depend on the batch it comes in.

    The batch is halved for as long as the device has no memory for it.
    """
    return halving(first_batch(network, samples), lambda batch: _evaluate(network, actor, samples, recipe, batch))


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
def _evaluate(network: Network, actor: Actor | None, samples: Samples, recipe: Recipe, batch: int) -> Evaluation:
    network.module.eval()
    predicted, loss, kept, scores, chosen, steps, macs, rank, sure, seconds = [], [], [], [], [], [], [], [], [], []
    N = network.cost.tokens
    for rows in samples.items.split(batch):
        inputs = samples.take(rows)
        start = _clock(rows.device)
        acting = None if actor is None else samples.begin(actor, rows, visit=0, training=False)
        outputs = outputs_of(network, inputs, acting)
        seconds.append((len(rows), _clock(rows.device) - start))
        predicted.append(predictions(recipe, outputs))
        loss.append(losses(recipe, outputs, samples.labels[rows]).float())
        rank.append(ranks(recipe, outputs, samples.labels[rows]))
        if recipe.loss == "cross-entropy":
            sure.append(outputs.float().softmax(dim=1).amax(dim=1))
        if acting is None:
            kept.append(torch.ones(len(rows), N, dtype=torch.bool, device=rows.device))
            scores.append(kept[-1].float())
            continue
        acting.settle()
        kept.append(patches_in(acting.index, N))
        scores.append(kept[-1].float() if acting.scores is None else acting.scores.float())
        steps.append([(len(rows), step) for step in acting.steps])
        macs.append(np.broadcast_to(network.cost.macs(acting.steps), len(rows)))
        chosen.append(list(_choices(acting, N)))
    return Evaluation(
        torch.cat(predicted).cpu().numpy(),
        torch.cat(loss).cpu().numpy(),
        torch.cat(kept).cpu().numpy(),
        torch.cat(scores).cpu().numpy(),
        [_join(parts) for parts in zip(*chosen, strict=True) if any(part.made for part in parts)],
        [mean_step(block) for block in zip(*steps, strict=True)],
        np.concatenate(macs) if macs else np.empty(0),
        torch.cat(rank).cpu().numpy(),
        torch.cat(sure).cpu().numpy() if sure else None,
        batch,
        [taken for n, taken in seconds[1:] if n == batch],
    )


def _clock(device: torch.device) -> float:
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
    return ((outputs > correct) | ((outputs == correct) & before)).sum(dim=1)


def patches_in(index: Tensor, N: int) -> Tensor:
    """Return (B, N) booleans, which patches are among the (B, M) tokens; -1 stands for no single patch."""
    return _spread(index, torch.ones_like(index, dtype=torch.bool), N)


def _spread(index: Tensor, values: Tensor, N: int) -> Tensor:
    """Return (B, N), for each patch the value of its token among the (B, M), or 0.

    A token that stands for no single patch (-1) is written into a column that is cut off again.
    """
    return values.new_zeros(len(index), N + 1).scatter(1, index % (N + 1), values)[:, :-1]


class _Chosen(NamedTuple):
    """A `Choice` for the (B, N) of one batch, and whether it was made: a strategy may let one pass."""

    block: int
    kept: Tensor
    scores: Tensor
    scored: bool
    made: bool


def _choices(acting: Pass, N: int) -> Iterator[_Chosen]:
    """Yield what became of the patches in each block in which tokens were to leave."""
    decisions = {decision.block: decision for decision in acting.decisions}
    kept = torch.ones(len(acting.index), N, dtype=torch.bool, device=acting.index.device)
    for block in sorted(acting.actor.keep):
        present, decision = kept, decisions.get(block)
        if decision is not None and isinstance(decision.plan, Rest):  # those that rested before are there again
            present = patches_in(decision.before, N)
        if decision is not None:
            kept = patches_in(decision.after, N)
        given = None if decision is None else decision.plan.scores
        scores = kept.float()
        if decision is not None and given is not None:
            scores = _spread(decision.before, given.float(), N)
        yield _Chosen(block, kept, scores.masked_fill(~present, torch.nan), given is not None, decision is not None)


def _join(parts: tuple[_Chosen, ...]) -> Choice:
    kept, scores = (torch.cat(arrays).cpu().numpy() for arrays in ([p.kept for p in parts], [p.scores for p in parts]))
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
        start = _clock(rows.device)
        moved.forward(network, actor, moved.items, visit=0, training=False)
        if repeat:
            seconds.append(_clock(rows.device) - start)
    return len(rows), seconds
