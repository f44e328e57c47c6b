"""Whether answers depend on labels or masks, which no strategy but an oracle may know: a batch with others in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import StrategyError
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.tasks.base import Recipe
from sparsebench.training.evaluate import Evaluation, evaluate, first_batch
from sparsebench.training.steps import Samples


def answers(
    network: Network, actor: Actor | None, samples: Samples, recipe: Recipe, batch: int | None = None
) -> Evaluation:
    """Return what comes out of the first batch where each sample has the label and the mask of another one.

    The batch has `first_batch` samples unless it is given. They are exchanged in place, so that whoever looks for them,
    by whatever way, comes upon these. An oracle, which is given masks, has its own. Random states are afterwards as
    before.
    """
    mask = None if actor is not None and actor.strategy.kind == "oracle" else samples.relevance
    few, batch = copy.copy(samples), batch or first_batch(network, samples)
    few.items = samples.items[:batch]
    with seeds.global_states_kept(), _exchanged(samples.labels, mask):
        return evaluate(network, actor, few, recipe, batch)


@contextmanager
def _exchanged(labels: Tensor, mask: Tensor | None) -> Iterator[None]:
    """Give every sample the label (n,) and the mask (n, N) of another; of another class where there are enough.

    Masks may be alike in all samples, and so have their tokens in reverse order, too. All is put back afterwards.
    """
    order = labels.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = order.roll(max(1, len(order) // 2))
    before = labels.clone(), None if mask is None else mask.clone()
    labels.copy_(before[0][rows])
    if mask is not None and before[1] is not None:
        mask.copy_(before[1][rows].flip(1))
    try:
        yield
    finally:
        labels.copy_(before[0])
        if mask is not None and before[1] is not None:
            mask.copy_(before[1])


def check(other: Evaluation, evaluation: Evaluation) -> None:
    """Raise StrategyError if the first batch came out otherwise with the labels and masks of other samples."""
    n = len(other.predicted)
    kept = (other.kept != evaluation.kept[:n]).any(axis=1)
    if kept.any():
        raise StrategyError(
            f"with labels and masks of other samples it kept other tokens of {kept.sum()} of {n}: it knows what only "
            "an oracle may, or does not choose the same twice"
        )
    predicted = other.predicted != evaluation.predicted[:n]
    if predicted.any():
        raise StrategyError(
            f"with labels and masks of other samples {predicted.sum()} of {n} had another prediction: what classes "
            "them knows the labels, or does not do the same twice"
        )
