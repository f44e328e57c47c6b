"""What a strategy says of the step size of the network's own weights, and that others train as ever."""

import copy
from typing import ClassVar

import numpy as np
import pytest
import torch
from sparsebench_plugins.dynamic_vit import DynamicViT

from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.base import Strategy
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep, Mask
from sparsebench.tasks.images import Composite
from sparsebench.training.steps import Autograd, Samples, step_size

TASK = Composite(canvas=16, foreground=10, test=2, epochs=4, batch=8, lr=0.01, weight_decay=0.3, pretrain_epochs=0,
                 warmup=0.2)  # fmt: skip
DATA, RECIPE = TASK.draw(24, 0, {}), TASK.recipe()
STEPS = 12  # three a pass


class Gate(Strategy):
    """Weighs tokens by a linear layer of its own."""

    name: ClassVar[str] = "gate"
    site: ClassVar[str] = "block"
    trained: ClassVar[bool] = True

    def module(self, place):
        return torch.nn.Linear(place.width, 1)

    def plan(self, view, keep):
        weights = view.learned(view.tokens)[:, :, 0].sigmoid()
        return Mask(weights) if view.training else Keep.top(weights, keep)


class Slow(Gate):
    """Leaves the network as it is at first, and then lets it learn slowly."""

    name: ClassVar[str] = "slow"

    def network_rate(self, done):
        return 0.0 if done < 0.25 else 0.1


def begun(strategy, recipe=RECIPE):
    network = Vit(dim=16, depth=2, heads=2, patch=4).build(DATA, 0)
    actor = Actor(strategy, Budget(keep_rate=0.5), network.cost, network.grid, 3)
    network.module.add_module(LEARNED, torch.nn.ModuleDict({str(b): m for b, m in actor.learned.items()}))
    split = DATA.train
    samples = Samples(*map(torch.from_numpy, (split.inputs, split.labels, split.relevance_on((4, 4)))))
    return Autograd(network, actor, samples, recipe)


def weights(steps):
    return {name: value.clone() for name, value in steps.network.module.state_dict().items()}


def by_hand(steps, taken, rate):
    """Return the weights after some steps by torch's AdamW; `rate` gives a weight's step size from its name."""
    other = copy.deepcopy(steps)
    named = dict(other.network.module.named_parameters())
    groups = [{"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in named.values()]
    opt = torch.optim.AdamW(groups, lr=RECIPE.lr)
    for step in range(taken):
        other._gradients(torch.arange(8) + 8 * (step % 3), 0)
        for (name, p), group in zip(named.items(), opt.param_groups, strict=True):
            group["lr"] = rate(name, step)
            p.grad = None if group["lr"] == 0 else p.grad
        opt.step()
    return {name: p.detach() for name, p in named.items()}


def rate_of(strategy, name, step):
    size = step_size(RECIPE, step / STEPS, STEPS)
    return size if name.startswith("strategy.") else size * strategy.network_rate(step / STEPS)


@pytest.mark.parametrize("strategy", [Gate(), Slow()], ids=lambda s: s.name)
def test_each_weight_has_its_step_size_to_the_bit(strategy):
    steps = begun(strategy)
    expected = by_hand(steps, STEPS, lambda name, step: rate_of(strategy, name, step))
    for step in range(STEPS):
        steps.step(np.arange(8) + 8 * (step % 3), 0, step / STEPS)
    found = weights(steps)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_dynamic_vit_freezes_a_sixth_and_then_has_a_hundredth():
    rates = [DynamicViT().network_rate(epoch / 30) for epoch in range(30)]
    assert rates == [0.0] * 5 + [0.01] * 25
    assert DynamicViT(frozen=0, backbone_rate=1).network_rate(0.0) == 1
    assert {Gate().network_rate(done) for done in (0.0, 0.5)} == {1.0}
