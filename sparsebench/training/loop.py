"""The plain training loop, one for every task and model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench import seeds
from sparsebench.errors import DivergedError
from sparsebench.models.acting import Actor, Pass
from sparsebench.models.base import Network
from sparsebench.tasks.base import Recipe


def losses(recipe: Recipe, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the (B,) losses: hinge max(0, 1 - yF) with y = +-1, or cross-entropy."""
    if recipe.loss == "hinge":
        return torch.relu(1 - (2 * labels - 1) * outputs)
    return F.cross_entropy(outputs, labels, reduction="none")


def predictions(recipe: Recipe, outputs: Tensor) -> Tensor:
    """Return the (B,) predicted class numbers."""
    return (outputs > 0).long() if recipe.loss == "hinge" else outputs.argmax(dim=1)


def optimiser(recipe: Recipe, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Return the recipe's optimiser; vectors (biases, norms) are not decayed."""
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=recipe.lr)
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, weight_decay=recipe.weight_decay)


class Samples:
    """A split on the device, with what a pass over it needs."""

    def __init__(self, inputs: Tensor, labels: Tensor, relevance: Tensor):
        self.inputs, self.labels, self.relevance = inputs, labels, relevance
        self.items = torch.arange(len(labels), device=labels.device)

    def forward(
        self, network: Network, actor: Actor | None, rows: Tensor, *, visit: int, training: bool
    ) -> tuple[Tensor, Pass | None]:
        """Return the network's outputs for those rows, and the pass (None where nothing acts)."""
        inputs = self.inputs[rows]
        if actor is None:
            return network(inputs), None
        acting = actor.begin(
            self.items[rows], visit, self.relevance[rows], tokens=self.relevance.shape[1], training=training
        )
        return network(inputs, acting), acting


def train(
    network: Network,
    actor: Actor | None,
    samples: Samples,
    recipe: Recipe,
    order_seed: tuple[object, ...],
    on_step: Callable[[int], None] | None = None,
) -> dict[str, float]:
    """Train in place. Batches are drawn without replacement, pass by pass.

    Args:
        network: what is trained.
        actor: the strategy that removes tokens, or None.
        samples: the training split.
        recipe: how.
        order_seed: dimensions that name the order of the samples.
        on_step: called with the number of steps done.

    Returns:
        steps done, passes done, and the last pass's mean loss.

    Raises:
        DivergedError: the loss or a weight became NaN or infinite.
    """
    n = len(samples.labels)
    batch = min(recipe.batch, n)
    per_epoch = math.ceil(n / batch)
    total = min(recipe.steps, recipe.epochs * per_epoch)
    parameters = [p for p in network.module.parameters() if p.requires_grad]
    opt = optimiser(recipe, parameters)
    network.module.train()
    step, epoch, mean = 0, 0, math.nan
    while step < total:
        order = torch.from_numpy(seeds.generator(*order_seed, epoch).permutation(n)).to(samples.labels.device)
        summed, visit = torch.zeros((), device=order.device), 0 if recipe.fixed_selection else epoch
        seen = 0
        for rows in order.split(batch)[: total - step]:
            if recipe.optimizer == "adamw":
                for group in opt.param_groups:
                    group["lr"] = recipe.lr * 0.5 * (1 + math.cos(math.pi * step / total))
            outputs, _ = samples.forward(network, actor, rows, visit=visit, training=True)
            loss = losses(recipe, outputs, samples.labels[rows])
            opt.zero_grad(set_to_none=True)
            loss.mean().backward()
            opt.step()
            summed += loss.detach().sum()
            step, seen = step + 1, seen + len(rows)
            if on_step is not None:
                on_step(step)
        epoch += 1
        mean = summed.item() / seen
        if not math.isfinite(mean):
            raise DivergedError(f"training diverged: the loss of pass {epoch} is {mean}")
        if recipe.stop_at_zero_loss and mean == 0.0 and seen == n:
            break
    if not all(bool(p.isfinite().all()) for p in parameters):
        raise DivergedError("training diverged: the weights after the last step are not finite")
    return {"steps": float(step), "epochs": float(epoch), "train_loss": mean}
