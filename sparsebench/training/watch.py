"""Looking at a network and the test split while it trains. Nothing that is seen goes back into the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sparsebench.errors import UnsupportedError
from sparsebench.models.actor import Actor
from sparsebench.models.base import Network
from sparsebench.models.shown import SplitPass
from sparsebench.tasks.base import Recipe
from sparsebench.training.evaluate import evaluate
from sparsebench.training.steps import Samples, Steps


class Watch:
    """Called after each step, looks every few of them.

    Args:
        recipe: says how often to look; the first look is before the first step.
        steps, network: what trains, and what it trains.
        train, test: each split with the strategy that acts on it, or None.

    Attributes:
        at: steps done at each look.
        seen: at each, the mean test loss, the test accuracy, and what the network shows of itself.

    Raises:
        UnsupportedError: the network shows nothing.
    """

    def __init__(
        self,
        recipe: Recipe,
        steps: Steps,
        network: Network,
        train: tuple[Samples, Actor | None],
        test: tuple[Samples, Actor | None],
    ):
        if not hasattr(network, "observe"):
            raise UnsupportedError(
                "watch=... is for networks that have `observe`, as vit:attention=positional has: others show nothing"
            )
        self.recipe, self.train, self.test = recipe, train, test
        self.steps: Any = steps
        self.network: Any = network
        self.first = {name: value.clone() for name, value in network.module.state_dict().items()}
        self.at: list[int] = []
        self.seen: dict[str, list[float]] = {}

    def __call__(self, step: int) -> None:
        """SplitPass, if it is time to."""
        if step % self.recipe.watch == 0:
            self.look(step)

    @torch.no_grad()
    def look(self, step: int) -> None:
        """Measure after that many steps, unless that was done."""
        if self.at and self.at[-1] == step:
            return
        self.steps.store()
        self.at.append(step)
        loss, accuracy = self._test()
        shown = self.network.observe(_look(*self.train, training=True), _look(*self.test))
        for name, value in {"test_loss": loss, "test_accuracy": accuracy, **shown}.items():
            self.seen.setdefault(name, []).append(value)

    @torch.no_grad()
    def trained_values(self) -> dict[str, tuple[float, ...]]:
        """Return what the network keeps of its trained weights."""
        kept: dict[str, tuple[float, ...]] = self.network.trained_values(self.first, _look(self.test[0], None))
        return kept

    def _test(self) -> tuple[float, float]:
        """Return mean loss and accuracy over the test split."""
        samples, actor = self.test
        if hasattr(self.steps, "test"):
            loss, accuracy = self.steps.test(actor, samples)
            return loss, accuracy
        evaluation = evaluate(self.network, actor, samples, self.recipe)
        self.network.module.train()
        return evaluation.loss, float((evaluation.predicted == samples.labels.cpu().numpy()).mean())

    def iterations(self, success: Callable[[float, float], bool | None]) -> int | None:
        """Return the steps done at the first look at which loss and accuracy are a success, or None."""
        looks = zip(self.at, self.seen["test_loss"], self.seen["test_accuracy"], strict=True)
        return next((step for step, loss, accuracy in looks if success(loss, accuracy)), None)


def _look(samples: Samples, actor: Actor | None, training: bool = False) -> SplitPass:
    acting = None if actor is None else samples.begin(actor, samples.items, visit=0, training=training)
    relevance = samples.items.new_empty(len(samples.items), 0) if samples.relevance is None else samples.relevance
    return SplitPass(samples.inputs, samples.labels, relevance, acting)
