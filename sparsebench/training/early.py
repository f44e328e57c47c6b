"""Ending a training when the validation result gets no better."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsebench.measure.scores import group_accuracies
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.tasks.base import Recipe
from sparsebench.training.evaluate import evaluate
from sparsebench.training.steps import Samples, under


class EarlyStopping:
    """Looks at the validation split after each pass, and keeps the weights of the best one.

    Args:
        network: what is trained.
        actor: what acts on it in the test, or None.
        samples: the validation split.
        groups: (n,) its groups.
        recipe: says what the result is, and after how many passes without a better one training ends.

    Attributes:
        best: the best result so far, -1 before the first; one that is as good is not better.
        kept: the pass that it is from.
    """

    def __init__(self, network: Network, actor: Actor | None, samples: Samples, groups: np.ndarray, recipe: Recipe):
        self.network, self.actor, self.samples, self.groups, self.recipe = network, actor, samples, groups, recipe
        self.best, self.kept = -1.0, 0
        self.weights: dict[str, Tensor] = {}

    def over(self, epoch: int) -> bool:
        """Look after that many passes; say whether training is to end."""
        result = self._result()
        if result > self.best:
            self.best, self.kept = result, epoch
            self.weights = {name: value.clone() for name, value in self.network.module.state_dict().items()}
        return epoch - self.kept >= self.recipe.patience

    def restore(self) -> None:
        """Put the weights of the best pass into the network."""
        self.network.module.load_state_dict(self.weights)

    def state(self) -> dict[str, Tensor]:
        """Return what its decisions depend on."""
        weights = {f"weights.{name}": value for name, value in self.weights.items()}
        return weights | {"best": torch.tensor(self.best, dtype=torch.float64), "kept": torch.tensor(self.kept)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from that state."""
        self.best, self.kept, self.weights = float(state["best"]), int(state["kept"]), under("weights.", state)

    def _result(self) -> float:
        evaluation = evaluate(self.network, self.actor, self.samples, self.recipe)
        self.network.module.train()
        correct = evaluation.predicted == self.samples.labels.cpu().numpy()
        if self.recipe.validate_by == "accuracy":
            return float(correct.mean())
        return float(np.nanmin(group_accuracies(correct, self.groups, int(self.groups.max()) + 1)))
