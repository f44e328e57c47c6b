"""The choice of a schedule: at equal MACs, the schedule whose outputs are closest to those of the dense network.

Neither labels nor test images are used. Distances are rounded, so that the number of threads and the size of batches
cannot decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from torch import Tensor

from sparsebench.errors import DivergedError
from sparsebench.measure.schedule import Candidate, candidates
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.records.record import ScheduleCandidate, ScheduleChoice
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.training.evaluation import first_batch, halving
from sparsebench.training.steps import Samples, outputs_of

FEW, MANY = 32, 128
"""Images on which all candidates are compared, and images on which the best ones are."""
BEST = 3
"""Number of candidates that are compared on `MANY` images."""
DIGITS = 3
"""Decimals of a distance."""
COLDEST, HOTTEST = 1 / 32, 32.0
"""Limits of the temperature."""


@dataclass(frozen=True)
class Chosen:
    """A chosen schedule.

    Attributes:
        budget: the budget with the chosen blocks and kind of schedule.
        choice: the candidates with their distances, as records store them.
    """

    budget: Budget
    choice: ScheduleChoice

    @property
    def counts(self) -> Budget:
        """The chosen token counts as a budget, which is the same on every later version of the network."""
        return Budget(counts=self.choice.best.counts, blocks=self.choice.best.blocks)


def choose(
    network: Network,
    strategy: Strategy,
    budget: Budget,
    samples: Samples,
    rows: Tensor,
    stream: int,
    *,
    classifies: bool = True,
    source: str = "training images",
) -> Chosen:
    """Choose the schedule of a strategy on a trained network.

    All candidates are compared on the first `FEW` images, and the best `BEST` of them on all images. Of the candidates
    whose mean distance exceeds the smallest by at most one standard error of the paired differences, the first is
    chosen.

    Args:
        network: the network, with trained weights.
        strategy: the strategy; it may have several schedules, see `only_schedule`.
        budget: the budget, with schedule=auto.
        samples, rows: the samples, and the (n,) numbers of those to use; `MANY` are enough. Labels are not read.
        stream: the seed of the strategy's random numbers, other than in the test.
        classifies: whether the outputs are logits; otherwise they are features, see `distances`.
        source: what the images are, for the record.
    """
    proposed = candidates(budget, strategy.traits(), network.cost)
    measured = [np.empty(0)] * len(proposed)
    if len(proposed) > 1:
        dense = outputs_in_test(network, None, samples, rows)

        def outputs_with(index: int, part: Tensor) -> np.ndarray:
            actor = Actor(strategy, proposed[index].schedule.budget, network.cost, network.grid, stream)
            return outputs_in_test(network, actor, samples, part)

        few = [outputs_with(index, rows[:FEW]) for index in range(len(proposed))]
        measured = [distances(dense[:FEW], outputs, classifies) for outputs in few]
        by_distance = sorted(range(len(proposed)), key=lambda index: (_mean(measured[index]), index))
        best = sorted(by_distance[:BEST])  # in the order of candidates again, which breaks ties
        if len(rows) > FEW:
            for index in best:
                outputs = np.concatenate([few[index], outputs_with(index, rows[FEW:])])
                measured[index] = distances(dense, outputs, classifies)
        chosen = _first_of_the_closest(best, measured)
    else:
        chosen = 0
    choice = ScheduleChoice(
        chosen=chosen,
        distance="KL divergence" if classifies else "squared error",
        source=source if len(proposed) > 1 else "",
        candidates=tuple(map(_described, proposed, measured)),
    )
    return Chosen(proposed[chosen].schedule.budget, choice)


def _first_of_the_closest(indices: Sequence[int], measured: Sequence[np.ndarray]) -> int:
    """Return the first of these candidates that is not clearly farther from dense than the closest one.

    Raises:
        DivergedError: no candidate has finite outputs.
    """
    indices = [index for index in indices if np.isfinite(measured[index]).all()]
    if not indices:
        raise DivergedError("the outputs of the network are not finite on schedule images; check weights and precision")
    closest = min(indices, key=lambda index: (_mean(measured[index]), index))

    def is_close(index: int) -> bool:
        difference = measured[index] - measured[closest]
        return _mean(difference) <= _standard_error(difference)

    return next(index for index in indices if is_close(index))  # the closest one is close to itself


def _mean(values: np.ndarray) -> float:
    return round(float(values.mean()), DIGITS)


def _standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean; 0 for one value."""
    if len(values) < 2:
        return 0.0
    return round(float(values.std(ddof=1)) / math.sqrt(len(values)), DIGITS)


def _described(candidate: Candidate, measured: np.ndarray) -> ScheduleCandidate:
    """Return a candidate for the record; without distance if it was the only one."""
    schedule = candidate.schedule
    return ScheduleCandidate(
        name=candidate.name,
        blocks=schedule.blocks,
        counts=schedule.counts,
        macs_ratio=round(candidate.share, 4),
        distance=_mean(measured) if len(measured) else None,
        error=_standard_error(measured) if len(measured) else None,
        images=len(measured),
    )


@torch.no_grad()
def outputs_in_test(network: Network, actor: Actor | None, samples: Samples, rows: Tensor) -> np.ndarray:
    """Return the (n, classes) or (n, features) outputs in evaluation mode for these (n,) samples, as float64."""
    network.module.eval()

    def work(batch: int) -> np.ndarray:
        parts = []
        for part in rows.split(batch):
            acting = None if actor is None else samples.begin(actor, part, visit=0, training=False)
            parts.append(outputs_of(network, samples.take(part), acting).double())
        return torch.cat(parts).cpu().numpy()

    return halving(first_batch(network, samples), work)


def distances(dense: np.ndarray, outputs: np.ndarray, classifies: bool) -> np.ndarray:
    """Return the (n,) distances of the outputs of n images from those of the dense network, (n, classes or features).

    For logits this is the Kullback-Leibler divergence of the class probabilities. The logits of the outputs are first
    divided by the temperature for which the mean divergence is smallest, because removed tokens change how sure a
    network is, which does not change its answers. For features it is the mean squared error, after both are
    standardised by the means and standard deviations of the dense features.
    """
    if not classifies:
        mean, std = dense.mean(axis=0), dense.std(axis=0)
        std = np.where(std > 0, std, 1.0)
        squares = ((outputs - mean) / std - (dense - mean) / std) ** 2
        return squares.reshape(len(squares), -1).mean(axis=1)
    target = log_softmax(dense, axis=1)

    def divergence(log_temperature: float) -> np.ndarray:
        scaled = log_softmax(outputs / math.exp(log_temperature), axis=1)
        return (np.exp(target) * (target - scaled)).sum(axis=1)

    limits = math.log(COLDEST), math.log(HOTTEST)
    fitted = minimize_scalar(lambda value: divergence(value).mean(), bounds=limits, method="bounded")
    return divergence(fitted.x)
