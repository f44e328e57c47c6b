import copy
import math
from dataclasses import replace
from itertools import chain

import pytest
import torch
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.task import Theory
from torch import nn

from sparsebench.errors import DivergedError
from sparsebench.models.actor import Actor
from sparsebench.models.vits import Vit
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep
from sparsebench.tasks.base import Recipe
from sparsebench.tasks.images import Composite
from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, Samples, losses, optimiser, predictions

pytestmark = pytest.mark.theory
TASK = Theory(tokens=20, relevant=0.4, confusion=0.1, batch=5, test=20)
DATA = TASK.draw(20, 0, {})
SGD = Recipe("hinge", "sgd", lr=0.0, batch=4, epochs=3, steps=10**9)


def train(network, actor, samples, recipe, order_seed):
    steps = Autograd(network, actor, samples, recipe)
    return Training(network, actor, samples, recipe, order_seed, steps=steps).run()


def samples_of(split, grid=None):
    return Samples(
        torch.from_numpy(split.inputs), torch.from_numpy(split.labels), torch.from_numpy(split.relevance_on(grid))
    )


def shallow():
    return Shallow(m=32).build(DATA, 0)


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.module.parameters()])


class Recorder:
    """A network that stores its batches; samples are their own numbers."""

    def __init__(self):
        self.module, self.batches = nn.Linear(1, 1), []

    def __call__(self, inputs, acting=None):
        self.batches.append(inputs[:, 0].long().tolist())
        return self.module(inputs)[:, 0]


def numbered(n):
    return Samples(torch.arange(float(n))[:, None], torch.arange(n) % 2, torch.ones(n, 1))


def order_of(n, batch, epochs, seed=("order", 0), **changes):
    network = Recorder()
    done = train(network, None, numbered(n), replace(SGD, batch=batch, epochs=epochs, **changes), seed)
    return network.batches, done


def test_each_pass_takes_every_sample_once():
    """Each pass takes every sample once in a new order that depends on its seed alone."""
    batches, done = order_of(10, batch=4, epochs=3)
    assert [len(batch) for batch in batches] == [4, 4, 2] * 3
    passes = [list(chain(*batches[i : i + 3])) for i in (0, 3, 6)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert (done["steps"], done["epochs"]) == (9, 3)
    assert order_of(10, 4, 2)[0] == batches[:6] != order_of(10, 4, 2, seed=("order", 1))[0]
    assert list(chain(*order_of(10, 5, 3)[0])) == list(chain(*batches))


def test_the_first_limit_reached_ends_training():
    for epochs, steps, expected in ((2, 100, (6, 2)), (100, 4, (4, 2)), (100, 3, (3, 1)), (1, 1, (1, 1))):
        batches, done = order_of(10, 4, epochs, steps=steps)
        assert (done["steps"], done["epochs"]) == expected
        assert len(batches) == expected[0]


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_the_reported_loss_is_the_mean_over_the_samples_of_the_last_pass(steps):
    network, samples = Recorder(), numbered(10)
    recipe = replace(SGD, steps=steps)
    done = train(network, None, samples, recipe, ("order",))
    seen = list(chain(*network.batches[3 * ((steps - 1) // 3) :]))
    with torch.no_grad():
        expected = losses(recipe, network.module(samples.inputs)[:, 0], samples.labels)[seen].mean()
    assert done["train_loss"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "outputs", "labels", "expected", "predicted"),
    [
        ("hinge", [2.0, 0.5, -0.5, -2.0], [1, 1, 1, 0], [0, 0.5, 1.5, 0], [1, 1, 0, 0]),
        (
            "hinge",
            [[-1.5, -0.5], [-2.0, 1.0], [0.25, -3.0], [4.0, -1.0]],
            [0, 1, 2, 3],
            [0.5, 0, 0.75, 2],
            [0, 1, 2, 2],
        ),
        ("hinge", [[-1.5, -0.5], [-2.0, 1.0]], [3, 2], [4, 5], [0, 1]),
        ("cross-entropy", [[0.0, math.log(3)], [math.log(3), 0.0]], [1, 1], [-math.log(0.75), -math.log(0.25)], [1, 0]),
    ],
)
def test_losses_and_predictions_are_those_of_the_recipe(loss, outputs, labels, expected, predicted):
    recipe, outputs = replace(SGD, loss=loss), torch.tensor(outputs)
    assert losses(recipe, outputs, torch.tensor(labels)).tolist() == pytest.approx(expected)
    assert predictions(recipe, outputs).tolist() == predicted


def test_stopping_at_zero_loss_changes_nothing():
    network, samples = shallow(), samples_of(DATA.train)
    recipe = replace(TASK.recipe(), steps=400, lr=1.0)
    done = train(network, None, samples, recipe, ("order", 0))
    assert done["train_loss"] == 0 and done["steps"] < 400
    before = train(shallow(), None, samples, replace(recipe, epochs=int(done["epochs"]) - 1), ("order", 0))
    assert before["train_loss"] > 0  # at least one sample has a loss
    stopped = copy.deepcopy(network)
    further = replace(recipe, steps=60, stop_at_zero_loss=False)
    assert train(network, None, samples, further, ("order", 1))["steps"] == 60
    assert torch.equal(weights(network), weights(stopped))
    whole = shallow()
    train(whole, None, samples, replace(recipe, stop_at_zero_loss=False), ("order", 0))
    assert torch.equal(weights(whole), weights(stopped))


def test_a_step_is_that_of_plain_gradient_descent():
    network, samples = shallow(), samples_of(DATA.train)
    reference = copy.deepcopy(network)
    train(network, None, samples, replace(TASK.recipe(), batch=20, steps=1, lr=0.3), ("order",))
    torch.relu(1 - (2 * samples.labels - 1) * reference(samples.inputs)).mean().backward()
    expected = torch.cat([(p - 0.3 * p.grad).detach().flatten() for p in reference.parameters()])
    torch.testing.assert_close(weights(network), expected, atol=1e-6, rtol=1e-5)


def test_the_step_size_falls_to_zero_by_a_cosine():
    """The step size of AdamW falls to zero by a cosine and vectors do not decay."""
    images = Composite(canvas=16, foreground=10, test=2, epochs=3, batch=10, lr=0.01, weight_decay=0.3)
    data = images.draw(24, 0, {})
    network = Vit(dim=16, depth=1, heads=2, patch=8).build(data, 0)
    samples = samples_of(data.train, network.grid)
    reference = copy.deepcopy(network)
    train(network, None, samples, images.recipe(), ("order",))

    decayed, kept = [], []
    for p in reference.module.parameters():
        (decayed if p.ndim > 1 else kept).append(p)
    opt = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": kept, "weight_decay": 0}], lr=0.01)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=9)
    order = Recorder()
    train(order, None, numbered(24), replace(SGD, batch=10), ("order",))
    for batch in order.batches:
        opt.zero_grad()
        nn.functional.cross_entropy(reference(samples.inputs[batch]), samples.labels[batch]).backward()
        opt.step()
        cosine.step()
    torch.testing.assert_close(weights(network), weights(reference), atol=1e-5, rtol=1e-4)


def test_a_parameter_has_its_own_step_size_where_the_recipe_says_so():
    module = torch.nn.Linear(2, 3)
    groups = optimiser(replace(SGD, rates={"bias": 7.0}), module).param_groups
    assert {id(p): group["lr"] for group in groups for p in group["params"]} == {
        id(module.weight): SGD.lr, id(module.bias): 7.0,
    }  # fmt: skip


@pytest.mark.parametrize("lr", [1e20, math.inf])
def test_a_loss_that_is_no_number_ends_training_with_an_error(lr):
    with pytest.raises(DivergedError, match="training diverged: the loss of pass"):
        train(shallow(), None, samples_of(DATA.train), replace(TASK.recipe(), lr=lr), ("order",))


@pytest.mark.parametrize("fixed", [True, False])
def test_a_fixed_selection_is_the_same_in_every_pass(scripted, fixed):
    """A fixed selection is the same in every pass and another one is not."""
    kept = {}

    def decide(view, keep):
        assert view.training and network.training
        plan = Keep.top(view.random(), keep)
        for item, tokens in zip(view.tokens[:, 0, 0].tolist(), plan.index.tolist(), strict=True):
            kept.setdefault(item, []).append(tuple(tokens))
        return plan

    network = shallow()
    actor = Actor(scripted(decide), Budget(keep_rate=0.5), network.cost, None, 3)
    recipe = replace(TASK.recipe(), epochs=3, lr=1e-6, fixed_selection=fixed)
    train(network, actor, samples_of(DATA.train), recipe, ("order",))
    assert len(kept) == 20 and all(len(passes) == 3 for passes in kept.values())
    assert all((len(set(passes)) == 1) == fixed for passes in kept.values())
