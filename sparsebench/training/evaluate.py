"""Running a trained network over the test split, and timing it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from sparsebench.measure.cost import Step
from sparsebench.models.acting import Actor
from sparsebench.models.base import Network
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import Samples, losses, predictions

BATCH = 100


@dataclass(frozen=True)
class Evaluation:
    """What came out of the test split, n samples of N tokens.

    Attributes:
        predicted: (n,) class numbers.
        loss: mean loss.
        kept: (n, N) which input patches were still there at the end.
        scores: (n, N) of the strategy's first decision; constant where it made none; `kept` where it gave no scores.
        steps: realised token counts, block by block, mean over samples; empty where nothing acted.
    """

    predicted: np.ndarray
    loss: float
    kept: np.ndarray
    scores: np.ndarray
    steps: list[Step]


@torch.no_grad()
def evaluate(network: Network, actor: Actor | None, samples: Samples, recipe: Recipe) -> Evaluation:
    """Return the evaluation of all samples. A sample's result does not depend on the batch it comes in."""
    network.module.eval()
    predicted, loss, kept, scores, steps = [], [], [], [], []
    for rows in samples.items.split(BATCH):
        outputs, acting = samples.forward(network, actor, rows, visit=0, training=False)
        predicted.append(predictions(recipe, outputs))
        loss.append(losses(recipe, outputs, samples.labels[rows]).double())
        there = torch.ones(len(rows), network.cost.tokens, dtype=torch.bool, device=rows.device)
        if acting is None:
            kept.append(there)
            scores.append(there.float())
            continue
        # A token that stands for no single patch (-1) is scattered into a column that is cut off again.
        wide = torch.zeros(len(rows), there.shape[1] + 1, dtype=torch.bool, device=rows.device)
        kept.append(wide.scatter(1, acting.index.clamp(min=-1) % wide.shape[1], True)[:, :-1])
        scores.append(kept[-1].float() if acting.scores is None else acting.scores.float())
        steps.append((len(rows), acting.steps))
    return Evaluation(
        torch.cat(predicted).cpu().numpy(),
        float(torch.cat(loss).mean()),
        torch.cat(kept).cpu().numpy(),
        torch.cat(scores).cpu().numpy(),
        _mean_steps(steps),
    )


def _mean_steps(batches: list[tuple[int, list[Step]]]) -> list[Step]:
    if not batches:
        return []
    weights = [n for n, _ in batches]
    return [
        Step(
            float(np.average([s.tokens_in for s in block], weights=weights)),
            float(np.average([s.tokens_out for s in block], weights=weights)),
            block[0].early,
            block[0].scoring,
            block[0].projected,
        )
        for block in zip(*(steps for _, steps in batches), strict=True)
    ]


@torch.no_grad()
def seconds_per_batch(
    network: Network, actor: Actor | None, samples: Samples, repeats: int = 7
) -> tuple[int, list[float]]:
    """Return the batch size and the wall seconds of each of `repeats` forward passes, after one that is not counted."""
    network.module.eval()
    rows = samples.items[:BATCH]
    cuda = rows.device.type == "cuda"
    seconds = []
    for repeat in range(repeats + 1):
        if cuda:
            torch.cuda.synchronize(rows.device)
        start = time.perf_counter()
        samples.forward(network, actor, rows, visit=0, training=False)
        if cuda:
            torch.cuda.synchronize(rows.device)
        if repeat:
            seconds.append(time.perf_counter() - start)
    return len(rows), seconds
