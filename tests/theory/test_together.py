"""Many trainings in one program have the results of separate trainings; and steps in the span of the tokens."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.perturbation import Perturbation
from sparsebench_plugins.random import Random
from sparsebench_theory import together
from sparsebench_theory.models import Shallow, TwoLayer
from sparsebench_theory.overfitting.gram import InSpan
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.task import Theory

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, Samples

SHALLOW = Theory(tokens=20, d=6, relevant=0.4, confusion=0.1, test=20, batch=6, steps=80, lr=0.5)
TWO_LAYERS = Overfitting(tokens=5, d=80, signal=12, test=10, steps=200)


def training(n, repetition=0, strategy=None, changes=None, dtype=torch.float64, task=SHALLOW, **model):
    data = task.draw(n, repetition, {})
    kind = TwoLayer(d_h=12, d_v=9, shrink=2) if task is TWO_LAYERS else Shallow(m=24, **model)
    network = kind.build(data, repetition).to(dtype)
    actor = None if strategy is None else Actor(strategy, Budget(keep_rate=0.5), network.cost, None, repetition)
    split, recipe = data.train, replace(task.recipe(), **changes or {})
    inputs, labels, relevance = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    samples = Samples(inputs.to(dtype), labels, relevance)
    return Training(network, actor, samples, recipe, ("order", n, repetition))


def alone(one):
    """Return the network and outcome of the same training alone."""
    network = copy.deepcopy(one.network)
    return network, Training(network, one.actor, one.samples, one.recipe, one.order_seed).run()


def difference(network, other):
    pairs = zip(network.parameters(), other.parameters(), strict=True)
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in pairs)


def assert_as_alone(group, tolerance=1e-10, failing=()):
    expected = {k: alone(one) for k, one in enumerate(group) if k not in failing}
    assert all(together.fits(one) for one in group)
    together.train_together(group)
    assert {k for k, one in enumerate(group) if one.failure is not None} == set(failing)
    for k, (network, outcome) in expected.items():
        assert group[k].finished and group[k].outcome() == pytest.approx(outcome, rel=tolerance)
        assert difference(group[k].network, network) < tolerance
    return [one.step for one in group]


class Raises(Random):
    def plan(self, view, keep):
        raise ValueError("no idea")


@pytest.mark.parametrize("attention", ["trained", "frozen"])
def test_trainings_of_different_sizes(attention):
    assert_as_alone([training(n, k, attention=attention) for n in (1, 5, 6, 13, 30) for k in range(2)])


@pytest.mark.parametrize("repacked", [False, True])
def test_those_that_remove_tokens_with_those_that_do_not(repacked):
    assert_as_alone([training(8, k, s, repacked=repacked) for k in range(2) for s in (None, Random(), Oracle())])


def test_those_that_end_early_wait_for_the_others_without_moving():
    steps = assert_as_alone([training(n, changes={"steps": 400, "epochs": 400}) for n in (1, 40)])
    assert max(steps) > min(steps) + together.AHEAD


def test_two_layers_of_different_sizes_strategies_and_ends():
    changes = ({}, {"stop_below": 0.1}, {"steps": 7})
    group = [training(n, k, task=TWO_LAYERS, strategy=s) for k in range(3) for n in (4, 6) for s in (None, Oracle())]
    steps = assert_as_alone(group + [training(6, task=TWO_LAYERS, changes=change) for change in changes])
    assert len(set(steps)) > 3


def test_in_single_precision_they_agree_while_no_mask_flips():
    task = SHALLOW.model_copy(update={"d": 10})  # the width of the other tests, which is compiled already
    assert_as_alone([training(n, dtype=torch.float32, changes={"steps": 10}, task=task) for n in (6, 9)], 1e-5)


def test_one_that_diverges_fails_alone():
    group = [training(8, 0), training(8, 1)]
    group[1].samples.inputs[3, 2, 1] = torch.nan
    assert_as_alone(group, failing={1})
    assert "diverged" in str(group[1].failure)


@pytest.mark.parametrize("bad", [{0}, {4}, {1, 2}, {0, 1, 2, 3, 4}])
def test_strategies_that_raise_fail_alone(bad):
    group = [training(8, k, Raises() if k in bad else Random()) for k in range(5)]
    assert_as_alone(group, failing=bad)
    assert all(isinstance(group[k].failure, ValueError) for k in bad)


@pytest.mark.parametrize(("fit", "sizes"), [(2, [6, 3, 2, 2, 2]), (0, [6, 3, 2, 1, 1, 1, 1, 1, 1])])
def test_too_little_memory_makes_smaller_groups(monkeypatch, caplog, fit, sizes):
    """Too little memory makes smaller groups and one that does not fit alone fails."""
    group = [training(n, k) for n in (5, 8) for k in range(3)]
    whole, tried = together._train, []

    def small(some):
        tried.append(len(some))
        if len(some) > fit:
            some[0].tell(next(some[0].batches()), 1.0)  # it has begun
            raise torch.OutOfMemoryError
        whole(some)

    monkeypatch.setattr(together, "_train", small)
    assert_as_alone(group, failing=() if fit else range(6))
    assert tried == sizes and "out of memory" in caplog.text


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({}, True), ({"strategy": Oracle()}, True), ({"strategy": AttnTopK()}, False), ({"heads": 2}, False),
        ({"strategy": Random(), "changes": {"fixed_selection": False}}, False),
        ({"task": TWO_LAYERS, "strategy": Random()}, True), ({"task": TWO_LAYERS, "strategy": AttnTopK()}, False),
    ],
)  # fmt: skip
def test_only_plain_networks_with_a_choice_made_once_train_together(options, fits):
    one = training(4, **options)
    assert together.fits(one) is fits
    together.train_together([one] * (not fits))
    assert one.step == 0 and one.failure is None  # a training that does not fit is unchanged
    one.network = torch.nn.Linear(1, 1)
    assert not together.fits(one)


def test_the_gradients_are_those_of_autograd():
    rng = np.random.default_rng(0)
    T, B, S, d, m = 3, 4, 5, 6, 7

    def tensor(*shape):
        return torch.from_numpy(rng.standard_normal(shape))

    X, a, weights = tensor(T, B, S, d), tensor(T, 1, S, m), [tensor(T, d, d) * 0.3 for _ in range(3)]
    W = [matrix.requires_grad_() for matrix in (*weights, tensor(T, m, d) * 0.3)]
    y = torch.from_numpy(rng.choice([-1.0, 1.0], (T, B)))
    weight = torch.full((T, B), 0.25, dtype=torch.float64)
    weight[1, 2:] = 0
    Q, K, V, W_O = W
    attention = torch.softmax((X @ Q.mT[:, None]) @ (X @ K.mT[:, None]).mT, dim=3)
    F = (torch.relu(attention @ (X @ V.mT[:, None]) @ W_O.mT[:, None]) * a).sum(dim=(2, 3)) / S
    losses = torch.relu(1 - y * F)
    expected = torch.autograd.grad((losses * weight).sum(), W)
    with torch.no_grad():
        summed, gradients = together.gradients_of(X, y, weight, a, *W, frozen=False)
    torch.testing.assert_close(summed, (losses * (weight > 0)).sum(dim=1), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_cuda_a_training_agrees_with_the_cpu():
    group = [training(n, dtype=torch.float32, changes={"steps": 10}) for n in (6, 9)]
    expected = [alone(one)[0] for one in group]
    for one in group:
        one.network.to("cuda")
        one.samples = Samples(one.samples.inputs.cuda(), one.samples.labels.cuda(), one.samples.relevance.cuda())
    together.train_together(group)
    for one, network in zip(group, expected, strict=True):
        assert difference(one.network.to("cpu"), network) < 1e-4


# ---- in the span of the tokens


def trained(kind, strategy, dtype=torch.float64, changes=None):
    """Return the network and outcome of a training with this kind of steps."""
    one = training(6, strategy=strategy, task=TWO_LAYERS, dtype=dtype, changes=changes)
    steps = kind(one.network, one.actor, one.samples, one.recipe)
    outcome = Training(one.network, one.actor, one.samples, one.recipe, ("order",), steps=steps).run()
    return one.network.double(), outcome


@pytest.mark.parametrize("strategy", [None, Random(), Oracle(), AttnTopK(), Perturbation()])
def test_the_span_takes_the_steps_of_automatic_differentiation(strategy):
    few = {"steps": 60}
    (mine, outcome), (theirs, expected) = (trained(kind, strategy, changes=few) for kind in (InSpan, Autograd))
    assert outcome["steps"] == expected["steps"] and outcome["train_loss"] == pytest.approx(expected["train_loss"])
    assert difference(training(6, task=TWO_LAYERS).network, theirs) > 0.05
    assert difference(mine, theirs) < 1e-12
    assert difference(trained(InSpan, strategy, torch.float32, few)[0], mine) < 1e-4


def test_gradient_descent_ends_with_the_step_before_which_the_loss_was_low():
    _, outcome = trained(InSpan, None)
    assert outcome["steps"] < 200 and outcome["train_loss"] < 0.01
    one = training(6, task=TWO_LAYERS)
    steps = InSpan(one.network, None, one.samples, one.recipe)
    losses = [float(steps.step(np.arange(6), 0, 0.0)) / 6 for _ in range(int(outcome["steps"]))]
    assert losses[-1] == pytest.approx(outcome["train_loss"]) and min(losses[:-1]) >= 0.01


@pytest.mark.parametrize(("n", "kind"), [(6, InSpan), (40, Autograd)])  # 40 samples are 200 tokens in 80 dimensions
def test_the_span_is_used_where_it_is_the_shorter_way(n, kind):
    one = training(n, task=TWO_LAYERS)
    assert isinstance(one.steps, kind)
