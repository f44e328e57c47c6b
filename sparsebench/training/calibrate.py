"""Finding the token counts with which an adaptive strategy spends what was asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.strategy.budget import AMOUNTS, Budget
from sparsebench.training.evaluate import first_batch, halving
from sparsebench.training.steps import Samples

IMAGES = 256
"""Training images on which it is measured what is spent."""
NEAR = 0.005
"""Share of the asked-for MACs by which it may be off."""
TRIES = 10


class Calibration(NamedTuple):
    """What came out.

    Attributes:
        budget: whose counts are taken.
        ratio: the share of the dense MACs that they come to, mean over the images.
        images: how many these were.
    """

    budget: Budget
    ratio: float
    images: int


def calibrate(network: Network, actor: Actor, samples: Samples) -> Calibration:
    """Give the actor the counts with which it spends the MACs that it was to, as nearly as can be; return them.

    The number of tokens that an adaptive strategy lets go on hangs on the image, and need not be the count it is given:
    with each count as a bound, fewer go on. So the counts are those of another budget, found by bisection between the
    least and a full one on the first of the samples, whose labels are not looked at. A strategy that does not follow
    the counts keeps those it has.
    """
    cost = actor.cost
    dense = cost.macs(cost.dense())
    target = cost.macs(actor.planned) / dense
    rows = samples.items[:IMAGES]
    if actor.budget.counts is not None:  # upper bounds, as they were asked for
        return Calibration(actor.budget, _mean_macs(network, actor, samples, rows) / dense, len(rows))

    def spent(macs: float) -> float:
        actor.spend(Budget(macs=macs, **shape))
        return _mean_macs(network, actor, samples, rows) / dense

    shape = actor.budget.model_dump(exclude=set(AMOUNTS))
    low, high, best, follows = 0.0, 1.0, (np.inf, target, np.nan), True
    first: tuple[float, dict[int, int]] = (np.nan, {})
    for attempt in range(TRIES):
        macs = target if attempt == 0 else (low + high) / 2
        ratio = spent(macs)
        off = abs(ratio - target) if actor.acts else np.inf
        if attempt == 0:
            best, first = (off, macs, ratio), (ratio, actor.keep)
        elif off < best[0]:
            best = off, macs, ratio
        follows = ratio != first[0] or actor.keep == first[1]
        if off <= NEAR * target or not follows:
            break
        # Where it does not act it is the dense network, and what it spends is too much.
        low, high = (macs, high) if actor.acts and ratio < target else (low, macs)
    if best[0] > NEAR * target and high == 1.0 and follows:
        # With all tokens as upper bounds it may still spend less than was asked for.
        ratio = spent(high)
        best = min(best, (abs(ratio - target), high, ratio))
    _, macs, ratio = best
    taken = Budget(macs=macs, **shape)
    actor.spend(taken)
    return Calibration(taken, ratio, len(rows))


@torch.no_grad()
def _mean_macs(network: Network, actor: Actor, samples: Samples, rows: torch.Tensor) -> float:
    """Return the MACs of a sample as it would be tested, mean over the rows."""
    network.module.eval()

    def work(batch: int) -> float:
        spent = []
        for part in rows.split(batch):
            _, acting = samples.forward(network, actor, part, visit=0, training=False)
            assert acting is not None
            spent.append(np.broadcast_to(actor.cost.macs(acting.steps), len(part)))
        return float(np.concatenate(spent).mean())

    return halving(first_batch(network, samples), work)
