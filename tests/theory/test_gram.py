import numpy as np
import pytest
import torch
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.perturbation import Perturbation
from sparsebench_plugins.random import Random
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting.gram import InSpan
from sparsebench_theory.overfitting.task import Overfitting

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.training.loop import steps_for, train
from sparsebench.training.steps import Autograd, Samples

TASK = Overfitting(tokens=5, d=80, signal=12, test=10, steps=200)
RECIPE = TASK.recipe()
STRATEGIES = [None, Random(), Oracle(), AttnTopK(), Perturbation()]
ids = ["dense", "random", "oracle", "attn_topk", "perturbation"]


def problem(strategy=None, n=6, repetition=0, precision="float64"):
    data = TASK.draw(n, repetition, {})
    network = TwoLayer(d_h=12, d_v=9, shrink=2, precision=precision).build(data, repetition)
    actor = strategy and Actor(strategy, Budget(keep_rate=0.6), network.cost, None, 3)
    split = data.train
    return network, actor, Samples(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)))


def trained(kind, strategy, n=6, precision="float64"):
    network, actor, samples = problem(strategy, n, precision=precision)
    steps = kind(network, actor, samples, RECIPE)
    outcome = train(steps, n, RECIPE, ("order",))
    steps.store()
    return outcome, [p.detach().double() for p in network.parameters()]


def furthest(a, b):
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=ids)
def test_the_span_takes_the_steps_of_automatic_differentiation(strategy):
    first = [p.detach().clone() for p in problem(strategy)[0].parameters()]
    mine, theirs = trained(InSpan, strategy), trained(Autograd, strategy)
    assert mine[0]["steps"] == theirs[0]["steps"] and mine[0]["train_loss"] == pytest.approx(theirs[0]["train_loss"])
    assert furthest(first, theirs[1]) > 0.05
    assert furthest(mine[1], theirs[1]) < 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES, ids=ids)
def test_float32_stays_near_float64(strategy):
    assert furthest(trained(InSpan, strategy, precision="float32")[1], trained(InSpan, strategy)[1]) < 1e-4


def test_gradient_descent_ends_with_the_step_before_which_the_loss_was_low():
    outcome, _ = trained(InSpan, None)
    assert outcome["steps"] < 200 and outcome["train_loss"] < 0.01
    network, actor, samples = problem()
    steps = InSpan(network, actor, samples, RECIPE)
    losses = [float(steps.step(np.arange(6), 0, 0.0)) / 6 for _ in range(int(outcome["steps"]))]
    assert losses[-1] == pytest.approx(outcome["train_loss"]) and min(losses[:-1]) >= 0.01


def test_the_span_is_used_where_it_is_the_shorter_way():
    few, many = problem(n=6), problem(n=40)
    assert isinstance(steps_for(*few, RECIPE), InSpan)
    assert isinstance(steps_for(*many, RECIPE), Autograd)  # 200 tokens in 80 dimensions
