"""Whether answers depend on labels or masks, which no strategy but an oracle may know: a batch with others in place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import StrategyError
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.tasks.base import Data, Recipe, Split
from sparsebench.training.evaluate import Evaluation, evaluate, first_batch
from sparsebench.training.steps import Samples

Array = Tensor | np.ndarray


class Truth(NamedTuple):
    """Arrays that nobody but an oracle may know, of n samples: labels and groups; masks, boxes and foregrounds."""

    labels: list[Array]
    masks: list[Array]


def truth_of(samples: Samples, originals: Sequence[Data | None] = ()) -> Truth:
    """Return the truth of test samples: what lies on the device, and the arrays that it was made from."""
    labels: list[Array] = [samples.labels]
    masks: list[Array] = [] if samples.relevance is None else [samples.relevance]
    for split in [data.test for data in originals if data is not None]:
        labels += _separate(labels, [split.labels, split.groups])
        masks += _separate(masks, _masks(split))
    return Truth(labels, masks)


def _masks(split: Split) -> list[np.ndarray]:
    return [value for value in (split.relevance, split.boxes, split.foregrounds) if value is not None]


def _separate(known: Sequence[Array], arrays: Sequence[np.ndarray]) -> list[Array]:
    """Return the arrays that can be written and share no memory with those that are known."""
    memory = [np.asarray(one) for one in known if not isinstance(one, Tensor) or one.device.type == "cpu"]
    return [array for array in arrays if array.flags.writeable and not any(np.shares_memory(array, m) for m in memory)]


def answers(
    network: Network, actor: Actor | None, samples: Samples, recipe: Recipe, originals: Sequence[Data | None] = (),
    batch: int | None = None,
) -> Evaluation:  # fmt: skip
    """Return what comes out of the first batch where each sample has the label and the mask of another one.

    The batch has `first_batch` samples unless it is given. They are exchanged in place, so that whoever looks for them,
    by whatever way, comes upon these. An oracle, which is given masks, has its own. Random states are afterwards as
    before.
    """
    truth = truth_of(samples, originals)
    if actor is not None and actor.strategy.kind == "oracle":
        truth = truth._replace(masks=[])
    few, batch = copy.copy(samples), batch or first_batch(network, samples)
    few.items = samples.items[:batch]
    with seeds.global_states_kept(), permute(truth):
        return evaluate(network, actor, few, recipe, batch)


@contextmanager
def permute(truth: Truth) -> Iterator[None]:
    """Give every sample the truth of another, of another class where there are enough; and put all back afterwards."""
    order = torch.as_tensor(truth.labels[0]).argsort(stable=True).cpu()
    rows = torch.empty_like(order)
    rows[order] = order.roll(max(1, len(order) // 2))
    _permute(truth, rows)
    try:
        yield
    finally:
        _permute(truth, rows.argsort())


def _permute(truth: Truth, rows: Tensor) -> None:
    for array in truth.labels:
        _put(array, array[_for(array, rows)])
    for array in truth.masks:
        of_others = array[_for(array, rows)]
        if array.ndim == 2 and array.shape[1] != 4:  # masks may be alike in all samples; the four are a box
            of_others = of_others.flip(1) if isinstance(of_others, Tensor) else of_others[:, ::-1]
        _put(array, of_others)


def _for(array: Array, rows: Tensor) -> Any:
    return rows.to(array.device) if isinstance(array, Tensor) else rows.numpy()


def _put(array: Array, values: Any) -> None:
    if isinstance(array, Tensor):
        array.copy_(values)
    else:
        array[...] = values


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
