"""What a training step is: the samples, the losses, and one update of a network by automatic differentiation."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench.models.acting import Actor, Pass
from sparsebench.models.base import Network
from sparsebench.tasks.base import Recipe

FIXED = frozenset({"tokens", "pixels", "relevance"})
"""What a strategy may look at for its choice to be the same in every step."""


def chooses_once(actor: Actor | None, recipe: Recipe) -> bool:
    """Say whether the same tokens stay in every step: nothing acts, or what acts sees nothing that training changes."""
    return actor is None or (actor.requires <= FIXED and recipe.fixed_selection)


def losses(recipe: Recipe, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the (B,) losses: hinge, logistic or cross-entropy.

    Hinge is max(0, 1 - yF) and logistic log(1 + e^(-yF)), with y = -1 for class 0 and +1 for class 1. For outputs
    (B, 2) hinge is summed over both, with y = (-1,-1), (-1,+1), (+1,-1), (+1,+1) for classes 0 to 3.
    """
    if recipe.loss == "cross-entropy":
        return F.cross_entropy(outputs, labels, reduction="none")
    if recipe.loss == "logistic":
        return F.softplus((1 - 2 * labels) * outputs)
    if outputs.ndim == 1:
        return torch.relu(1 - (2 * labels - 1) * outputs)
    signs = 2 * torch.stack([labels // 2, labels % 2], dim=1) - 1
    return torch.relu(1 - signs * outputs).sum(dim=1)


def predictions(recipe: Recipe, outputs: Tensor) -> Tensor:
    """Return the (B,) predicted class numbers: the signs of the outputs, numbered as in `losses`, or the largest."""
    if recipe.loss == "cross-entropy":
        return outputs.argmax(dim=1)
    positive = (outputs > 0).long()
    return positive if outputs.ndim == 1 else 2 * positive[:, 0] + positive[:, 1]


def optimiser(recipe: Recipe, module: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the recipe's optimiser of what is trained; vectors (biases, norms) are not decayed."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    if recipe.optimizer == "sgd":
        return torch.optim.SGD([{"params": [p], "lr": recipe.rates.get(name, recipe.lr)} for name, p in named.items()])
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)


class Samples:
    """A split on the device, with what a pass over it needs; relevance is None where nobody knows it."""

    def __init__(self, inputs: Tensor, labels: Tensor, relevance: Tensor | None):
        self.inputs, self.labels, self.relevance = inputs, labels, relevance
        self.items = torch.arange(len(labels), device=labels.device)

    def forward(
        self, network: Network, actor: Actor | None, rows: Tensor, *, visit: int, training: bool
    ) -> tuple[Tensor, Pass | None]:
        """Return the network's outputs for those rows, and the pass (None where nothing acts)."""
        inputs = self.inputs if rows is self.items else self.inputs[rows]  # all of them need not be copied
        if actor is None:
            return network(inputs), None
        acting = self.begin(actor, rows, visit=visit, training=training)
        return network(inputs, acting), acting

    def begin(self, actor: Actor, rows: Tensor, *, visit: int, training: bool) -> Pass:
        """Return the strategy's pass over those rows."""
        relevance = self.relevance if rows is self.items or self.relevance is None else self.relevance[rows]
        return actor.begin(self.items[rows], visit, relevance, tokens=actor.tokens, training=training)


class Steps(Protocol):
    """What takes the steps: one update each."""

    def step(self, rows: np.ndarray, visit: int, done: float) -> Tensor | float:
        """Update the network with the samples `rows` and return the sum of their losses before the update.

        Args:
            rows: which samples.
            visit: which pass it is to a strategy that draws anew in each.
            done: share of the training that is done, in [0, 1).
        """

    def store(self) -> None:
        """Put the weights into the network, if they are kept elsewhere while training."""


class Autograd:
    """Steps by automatic differentiation: any network, any strategy, any device."""

    def __init__(self, network: Network, actor: Actor | None, samples: Samples, recipe: Recipe):
        self.network, self.actor, self.samples, self.recipe = network, actor, samples, recipe
        self.opt = optimiser(recipe, network.module)
        network.module.train()

    def step(self, rows: np.ndarray, visit: int, done: float) -> Tensor:
        """See `Steps.step`."""
        samples = self.samples
        chosen = samples.items if self.recipe.batch == 0 else torch.from_numpy(rows).to(samples.labels.device)
        if self.recipe.optimizer == "adamw":
            for group in self.opt.param_groups:
                group["lr"] = self.recipe.lr * 0.5 * (1 + math.cos(math.pi * done))
        outputs, _ = samples.forward(self.network, self.actor, chosen, visit=visit, training=True)
        loss = losses(self.recipe, outputs, samples.labels[chosen])
        self.opt.zero_grad(set_to_none=True)
        loss.mean().backward()
        self.opt.step()
        return loss.detach().sum()

    def store(self) -> None:
        """See `Steps.store`: they are there."""
