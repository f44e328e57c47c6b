import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from sparsebench_theory import together as trials
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.together import Trial, fits
from sparsebench_theory.together import _train_all as train_together

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.training.loop import Course, steps_for, train
from sparsebench.training.steps import Samples

TASK = Theory(tokens=20, relevant=0.4, confusion=0.1, test=20, batch=6, steps=80, lr=0.5)
MATRICES = ("W_Q", "W_K", "W_V", "W_O")


def samples_of(split, dtype):
    tensors = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    inputs, labels, relevance = tensors
    return Samples(inputs.to(dtype), labels, relevance)


def trial(n, repetition, strategy=None, recipe=None, dtype=torch.float64, **model):
    data = TASK.draw(n, repetition, {})
    network = Shallow(m=24, **model).build(data, repetition).to(dtype)
    actor = None if strategy is None else Actor(strategy, Budget(keep_rate=0.5), network.cost, None, repetition)
    recipe = recipe or TASK.recipe()
    return Trial(network, actor, samples_of(data.train, dtype), recipe, Course(n, recipe, ("order", n, repetition)))


def alone(one):
    """Return the network and outcome of the same trial, trained by itself in the ordinary way."""
    network = copy.deepcopy(one.network)
    actor = one.actor
    steps = steps_for(network, actor, one.samples, one.recipe)
    outcome = train(steps, one.course.n, one.recipe, one.course.order_seed)
    steps.store()
    return network, outcome


def difference(network, other):
    parts = ((getattr(network, name), getattr(other, name)) for name in MATRICES)
    return max(float(((a - b).norm() / b.norm()).detach()) for a, b in parts)


def assert_as_alone(group, tolerance=1e-10):
    expected = [alone(one) for one in group]
    train_together(group)
    for one, (network, outcome) in zip(group, expected, strict=True):
        assert one.course.outcome() == pytest.approx(outcome, rel=tolerance)
        assert difference(one.network, network) < tolerance


@pytest.mark.parametrize("attention", ["trained", "frozen"])
def test_trials_of_different_sizes_train_together_as_alone(attention):
    assert_as_alone([trial(n, k, attention=attention) for n in (1, 5, 6, 13, 30) for k in range(2)])


@pytest.mark.parametrize("repacked", [False, True])
def test_trials_that_remove_tokens_train_together_with_those_that_do_not(repacked):
    assert_as_alone([trial(8, k, s, repacked=repacked) for k in range(2) for s in (None, Random(), Oracle())])


def test_trials_that_end_early_wait_for_the_others_without_moving():
    group = [trial(n, 0, recipe=replace(TASK.recipe(), steps=400, epochs=400)) for n in (2, 40)]
    assert_as_alone(group)
    steps = [one.course.step for one in group]
    assert max(steps) > min(steps) + trials.AHEAD


def test_in_single_precision_they_agree_while_no_mask_flips():
    assert_as_alone([trial(n, 0, dtype=torch.float32, recipe=replace(TASK.recipe(), steps=10)) for n in (6, 9)], 1e-5)


def test_one_that_diverges_fails_alone():
    group = [trial(8, 0), trial(8, 1)]
    group[1].samples.inputs[3, 2, 1] = torch.nan
    network, outcome = alone(group[0])
    train_together(group)
    assert group[1].failure is not None and "diverged" in str(group[1].failure)
    assert group[0].failure is None and difference(group[0].network, network) < 1e-10
    assert group[0].course.outcome() == pytest.approx(outcome)


def test_too_little_memory_makes_smaller_groups(monkeypatch, caplog):
    group = [trial(n, k) for n in (5, 8) for k in range(3)]
    expected = [alone(one) for one in group]
    whole, sizes = trials._train, []

    def small(some):
        sizes.append(len(some))
        if len(some) > 2:
            some[0].course.tell(next(some[0].coming), 1.0)  # it had begun
            raise torch.OutOfMemoryError
        whole(some)

    monkeypatch.setattr(trials, "_train", small)
    train_together(group)
    assert sizes == [6, 3, 2, 2, 2] and "out of memory" in caplog.text
    for one, (network, outcome) in zip(group, expected, strict=True):
        assert one.course.outcome() == pytest.approx(outcome, rel=1e-9)
        assert difference(one.network, network) < 1e-10


def test_a_single_trial_that_does_not_fit_fails(monkeypatch):
    def never(some):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(trials, "_train", never)
    group = [trial(4, 0), trial(4, 1)]
    train_together(group)
    assert all(isinstance(one.failure, torch.OutOfMemoryError) for one in group)


class Raises(Random):
    def plan(self, view, keep):
        raise ValueError("no idea")


@pytest.mark.parametrize("bad", [{0}, {4}, {1, 2}, {0, 1, 2, 3, 4}])
def test_strategies_that_raise_fail_alone(bad):
    group = [trial(8, k, Raises() if k in bad else Random()) for k in range(5)]
    expected = {k: alone(one) for k, one in enumerate(group) if k not in bad}
    train_together(group)
    assert {k for k, one in enumerate(group) if isinstance(one.failure, ValueError)} == bad
    for k, (network, outcome) in expected.items():
        assert group[k].failure is None and group[k].course.outcome() == pytest.approx(outcome)
        assert difference(group[k].network, network) < 1e-10


def test_only_plain_networks_with_a_choice_made_once_train_together():
    recipe = TASK.recipe()
    plain = trial(4, 0)
    assert fits(plain.network, None, plain.samples, recipe)
    assert fits(plain.network, trial(4, 0, Oracle()).actor, plain.samples, recipe)
    assert not fits(plain.network, trial(4, 0, AttnTopK()).actor, plain.samples, recipe)
    assert not fits(plain.network, trial(4, 0, Random()).actor, plain.samples, replace(recipe, fixed_selection=False))
    assert not fits(trial(4, 0, heads=2).network, None, plain.samples, recipe)
    assert not fits(torch.nn.Linear(1, 1), None, plain.samples, recipe)


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
        summed, gradients = trials.gradients_of(X, y, weight, a, *W, frozen=False)
    torch.testing.assert_close(summed, (losses * (weight > 0)).sum(dim=1), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_on_cuda_a_trial_agrees_with_the_cpu_and_with_itself_alone():
    group = [trial(n, 0, dtype=torch.float32, recipe=replace(TASK.recipe(), steps=10)) for n in (6, 9)]
    expected = [alone(one)[0] for one in group]
    for one in group:
        one.network.to("cuda")
        one.samples = Samples(one.samples.inputs.cuda(), one.samples.labels.cuda(), one.samples.relevance.cuda())
    train_together(group)
    for one, network in zip(group, expected, strict=True):
        assert difference(one.network.to("cpu"), network) < 1e-4
