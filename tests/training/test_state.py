from dataclasses import replace
from functools import cache
from io import BytesIO

import numpy as np
import pytest
import torch
from sparsebench_plugins.dynamic_vit import DynamicViT
from sparsebench_plugins.random import Random
from token_sets import SetCost
from torch import nn

from sparsebench.models.actor import LEARNED, Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.budget import Budget
from sparsebench.tasks.base import Recipe
from sparsebench.tasks.images import Spurious
from sparsebench.training.fit import modules_of
from sparsebench.training.loop import EarlyStopping, Training
from sparsebench.training.steps import Augmentation, Samples

TASK = Spurious(
    canvas=16, foreground=10, test=8, batch=7, epochs=5, lr=0.01, warmup=0.3, flip=True, shift=2, smoothing=0.1,
    pretrain_epochs=0, validation=0.2, patience=2,
)  # fmt: skip
DATA = TASK.draw(25, 0, {}).hold_back(0.2)


def samples_of(split, augmentation=None):
    return Samples(*map(torch.from_numpy, (split.inputs, split.labels, split.relevance_on((4, 4)))), augmentation)


def begun(early=True, strategy=None):
    """Return a training with dropout, in the initial random state of a cell."""
    network = Vit(dim=16, depth=2, heads=2, patch=4).build(DATA, 0)
    for block in network.module.blocks:
        block.mlp.drop1.p = block.attn.proj_drop.p = 0.3
    recipe = TASK.recipe()
    actor = Actor(strategy or Random(), Budget(keep_rate=0.5), network.cost, network.grid, 3)
    network.module.add_module(LEARNED, modules_of(actor))
    moved = Augmentation(5, True, 2, torch.from_numpy(DATA.train.boxes), (4, 4))
    validation = DATA.validation
    stopping = EarlyStopping(actor, samples_of(validation), validation.groups) if early else None
    torch.manual_seed(1)
    return Training(network, actor, samples_of(DATA.train, moved), recipe, ("order",), early=stopping)


def weights(training):
    return {name: value.clone() for name, value in training.steps.network.module.state_dict().items()}


class StoppedError(Exception):
    pass


def stopped_after(training, k):
    def stop(step):
        if step >= k:
            raise StoppedError

    with pytest.raises(StoppedError):
        training.run(stop)
    content = BytesIO()
    torch.save(training.state(), content)
    content.seek(0)
    return torch.load(content, weights_only=True)


@cache
def undisturbed(*how):
    training = begun(*how)
    return training.run(), weights(training)


@pytest.mark.parametrize(
    ("k", "early", "strategy"),
    [(0, False, None), (3, True, None), (8, False, None), (8, True, None), (4, False, DynamicViT())],
)
def test_a_resumed_training_ends_as_an_undisturbed_one_to_the_bit(k, early, strategy):
    done, expected = undisturbed(early, strategy)
    if k >= done["steps"]:
        return
    state = stopped_after(begun(early, strategy), k)
    training = begun(early, strategy)
    torch.manual_seed(99)
    training.load(state)
    assert training.run() == done
    here = weights(training)
    assert here.keys() == expected.keys() and all(torch.equal(here[name], expected[name]) for name in here)


LONG = Recipe("cross-entropy", "adamw", lr=0.1, batch=0, epochs=50, steps=10**9, patience=2)


class Scripted:
    """A network with a given number of right predictions of 10 samples after each pass, whatever it learns."""

    cost = SetCost(tokens=1, d=2, m=2)

    def __init__(self, right):
        self.module, self.right, self.looks, self.acted = nn.Linear(2, 2), right, 0, []

    def __call__(self, inputs, acting=None):
        if self.module.training:
            return self.module(inputs)
        self.acted.append(acting)
        right = torch.arange(len(inputs)) < self.right[self.looks]
        self.looks += 1
        return nn.functional.one_hot(1 - right.long(), 2).float()


def ten():
    generator = torch.Generator().manual_seed(0)
    return Samples(torch.randn(10, 2, generator=generator), torch.zeros(10, dtype=torch.long), torch.ones(10, 1))


def run(right, patience, groups=None, by="accuracy"):
    """Return the outcome, the weights after each pass, and those at the end."""
    recipe = replace(LONG, patience=patience, epochs=len(right), validate_by=by)
    network, weights = Scripted(right), []
    early = EarlyStopping(None, ten(), np.zeros(10, int) if groups is None else groups)
    training = Training(network, None, ten(), recipe, ("order",), early=early)
    done = training.run(lambda step: weights.append(network.module.weight.detach().clone()))
    return done, weights, network.module.weight.detach()


@pytest.mark.parametrize(
    ("right", "patience", "passes", "kept"),
    [
        ([5, 6, 4, 4, 9], 2, 4, 2),
        ([5, 6, 4, 7, 4, 4], 2, 6, 4),
        ([5, 6, 6, 6, 9], 2, 4, 2),
        ([0, 0, 9, 0, 0], 2, 5, 3),
        ([0, 0, 0, 9], 2, 3, 1),
        ([9, 8], 1, 2, 1),
        ([3, 8, 5, 5], 10, 4, 2),
    ],
)
def test_training_ends_when_the_validation_result_gets_no_better(right, patience, passes, kept):
    done, weights, last = run(right, patience)
    assert (done["epochs"], done["kept_epoch"]) == (passes, kept)
    assert torch.equal(last, weights[kept]) and not torch.equal(last, weights[passes])


def test_the_worst_group_may_be_the_result():
    groups = np.array([0] * 4 + [2] * 6)  # group 1 is empty; right samples come first
    done, *_ = run([4, 9, 5, 5], 2, groups=groups, by="worst_group")
    assert done["kept_epoch"] == 2
    done, *_ = run([2, 3, 4, 4], 2, groups=groups, by="worst_group")
    assert done["kept_epoch"] == 1  # no sample of group 2 is right in any pass


def test_looking_changes_nothing():
    after = []
    for looks in (True, False):
        training, seen = begun(looks), []
        training.run(lambda step, training=training, seen=seen: seen.append(weights(training)))
        after.append(seen)
    assert len(after[0]) > 6
    for one, other in zip(*after, strict=False):  # up to the early end of the first
        assert all(torch.equal(one[name], other[name]) for name in one)
