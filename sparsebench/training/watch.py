"""Looking at the test split while a shallow network trains. Nothing that is seen goes back into the training."""

from __future__ import annotations

import torch

from sparsebench.models.acting import Actor
from sparsebench.models.shallow import ShallowViT
from sparsebench.tasks.theory import Theory
from sparsebench.training.closed_form import ClosedForm, applies
from sparsebench.training.evaluate import evaluate
from sparsebench.training.steps import Samples, Steps


class Watch:
    """Called after each step, looks every few of them.

    Args:
        task: says how often to look; the first look is before the first step.
        steps, network: what trains, and what it trains.
        actor, samples: the strategy in the test, or None, and the test split.

    Attributes:
        at: steps done at each look.
        losses: mean test loss at each.
        masses: share of the attention that lies on relevant tokens, mean over samples, heads and attending tokens.
    """

    def __init__(self, task: Theory, steps: Steps, network: ShallowViT, actor: Actor | None, samples: Samples):
        self.task, self.steps, self.network, self.actor, self.samples = task, steps, network, actor, samples
        self.recipe = task.recipe()
        self.tester = None
        if applies(network, self.recipe):
            self.tester = ClosedForm(network, actor, samples, self.recipe, training=False)
        self.at: list[int] = []
        self.losses: list[float] = []
        self.masses: list[float] = []

    def __call__(self, step: int) -> None:
        """Look, if it is time to."""
        if step % self.task.watch == 0:
            self.look(step)

    @torch.no_grad()
    def look(self, step: int) -> None:
        """Measure loss and attention after that many steps, unless that was done."""
        if self.at and self.at[-1] == step:
            return
        self.steps.store()
        self.at.append(step)
        self.losses.append(self._loss())
        acting = None
        if self.actor is not None:
            N = self.samples.relevance.shape[1]
            acting = self.actor.begin(self.samples.items, 0, self.samples.relevance, tokens=N, training=False)
        mass = self.network.attention_on(self.samples.relevance, self.samples.inputs, acting)
        self.masses.append(float(mass.double().mean()))

    def _loss(self) -> float:
        if self.tester is not None:
            self.tester.load()
            return float(self.tester.losses().mean(dtype=float))
        loss = evaluate(self.network, self.actor, self.samples, self.recipe).loss
        self.network.train()
        return loss

    def iterations(self) -> int | None:
        """Return the steps done at the first look with a loss below the task's threshold, or None."""
        looks = zip(self.at, self.losses, strict=True)
        return next((step for step, loss in looks if loss < self.task.threshold), None)
