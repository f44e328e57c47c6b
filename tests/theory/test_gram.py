import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.perturbation import Perturbation
from sparsebench_plugins.random import Random
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting.gram import InSpan, Member, Span
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.together import Trial, fits, train_together

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.training.loop import Course, steps_for, train
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


def test_storing_twice_changes_nothing():
    network, actor, samples = problem()
    steps = InSpan(network, actor, samples, RECIPE)
    for _ in range(3):
        steps.step(np.arange(6), 0, 0.0)
    steps.store()
    once = copy.deepcopy(network.state_dict())
    steps.store()
    assert all(torch.equal(value, once[name]) for name, value in network.state_dict().items())


def test_the_span_is_used_where_it_is_the_shorter_way():
    few, many = problem(n=6), problem(n=40)
    assert isinstance(steps_for(*few, RECIPE), InSpan)
    assert isinstance(steps_for(*many, RECIPE), Autograd)  # 200 tokens in 80 dimensions


def trial(strategy, repetition, n=6):
    network, actor, samples = problem(strategy, n, repetition)
    return Trial(network, actor, samples, RECIPE, Course(n, RECIPE, ("order",)))


@pytest.mark.parametrize("strategy", STRATEGIES[:3], ids=ids[:3])
def test_many_trials_in_one_program_are_each_as_alone(strategy):
    together = [trial(strategy, repetition, n) for repetition in range(3) for n in (4, 6)]
    assert all(fits(t.network, t.actor, t.samples, t.recipe) for t in together)
    train_together(together)
    assert len({t.course.step for t in together}) > 1  # they end at different steps
    for one in together:
        network, actor, samples = problem(strategy, one.course.n, together.index(one) // 2)
        steps = InSpan(network, actor, samples, RECIPE)
        alone = train(steps, one.course.n, RECIPE, ("order",))
        steps.store()
        assert one.course.outcome() == pytest.approx(alone)
        mine, theirs = ([p.detach() for p in net.parameters()] for net in (one.network, network))
        assert furthest(mine, theirs) < 1e-12


def test_a_choice_that_changes_with_the_weights_is_trained_alone():
    network, actor, samples = problem(AttnTopK())
    assert not fits(network, actor, samples, RECIPE)


def test_a_span_of_a_fixed_choice_holds_only_what_stays():
    network, actor, samples = problem(Random())
    assert Span([Member(network, actor, samples, RECIPE)]).L == 3
    network, actor, samples = problem(AttnTopK())
    assert Span([Member(network, actor, samples, RECIPE)]).L == 5


def test_trials_that_end_by_other_rules_do_not_share_a_program():
    """One that ends early leaves the others, and its own weights, as they are alone."""
    rules = [RECIPE, replace(RECIPE, stop_below=0.1), replace(RECIPE, steps=7)]
    together = []
    for recipe in rules:
        network, actor, samples = problem()
        together.append(Trial(network, actor, samples, recipe, Course(6, recipe, ("order",))))
    train_together(together)
    for one in together:
        network, actor, samples = problem()
        steps = InSpan(network, actor, samples, one.recipe)
        alone = train(steps, 6, one.recipe, ("order",))
        steps.store()
        assert one.course.outcome() == pytest.approx(alone)
        assert furthest(*([p.detach() for p in net.parameters()] for net in (one.network, network))) < 1e-12
