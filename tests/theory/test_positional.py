import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sparsebench_plugins.random import Random
from sparsebench_theory.models import Positional
from sparsebench_theory.spatial.task import Spatial, association

from sparsebench.errors import UserError
from sparsebench.models.actor import Actor
from sparsebench.models.shown import SplitPass
from sparsebench.strategy.budget import Budget
from sparsebench.training.loop import train
from sparsebench.training.steps import Autograd, Samples

TASK = Spatial(tokens=12, group=3, d=20, test=40, steps=6)
DATA = TASK.draw(8, 0, {})
N, D = 8, 12
DIAGONAL = math.log(math.log(20))


def network(repetition=0, data=DATA, first=0.5, precision=torch.float64, **options):
    """Return a network with weights so large that its attention is not even."""
    return Positional(first=first, **options).build(data, repetition).to(precision)


def look(split=DATA.test):
    return SplitPass(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)), None)


def scores_of(net):
    A = net.A.detach().double().numpy().copy()
    for i in range(len(A)):
        A[i, i] = DIAGONAL
    return A


# ---- first weights, and what training moves


def test_first_weights_are_small_and_the_diagonal_is_large():
    data = Spatial(tokens=36, group=6, d=400, test=1).draw(2, 0, {})
    net = Positional().build(data, 0)
    assert net.A.dtype == torch.float32 and net.A.shape == (36, 36) and net.head.weight.shape == (1, 400)
    assert float(net.A.detach().std()) == pytest.approx(1e-3, rel=0.06)
    assert float(net.head.weight.detach().std()) == pytest.approx(1e-3, rel=0.1)
    np.testing.assert_allclose(net.scores().diagonal().detach().numpy(), math.log(math.log(400)), rtol=1e-6)
    shares = net.attention().detach()
    own = shares.diagonal() / (shares.sum(dim=1) - shares.diagonal()) * 35
    np.testing.assert_allclose(own.numpy(), math.log(400), rtol=0.01)  # ln d times as much as to another
    assert float(Positional(first=0.1).build(data, 0).A.detach().std()) == pytest.approx(0.1, rel=0.06)


def after(steps=30, strategy=None, **options):
    """Return a network before and after some training."""
    net = Positional(first=0.1, **options).build(DATA, 0)
    first = {name: value.clone() for name, value in net.state_dict().items()}
    recipe = Spatial(tokens=12, group=3, d=20, steps=steps, lr=0.1, lr_attention=5).recipe()
    split = DATA.train
    tensors = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    actor = strategy and Actor(strategy, Budget(keep_rate=0.5), net.cost, None, 3)
    train(Autograd(net, actor, Samples(*tensors), recipe), N, recipe, ("order",))
    return net, first


@pytest.mark.parametrize("strategy", [None, Random()], ids=["dense", "random"])
def test_training_moves_scores_and_read_out_and_not_the_diagonal(strategy):
    net, first = after(strategy=strategy)
    off = ~torch.eye(D, dtype=torch.bool)
    assert (net.A.detach() != first["A"])[off].double().mean() > 0.5
    assert torch.equal(net.A.detach()[~off], first["A"][~off])
    np.testing.assert_allclose(net.scores().diagonal().detach().numpy(), DIAGONAL, rtol=1e-6)
    assert not torch.equal(net.head.weight.detach(), first["head.weight"])


def test_frozen_attention_does_not_move_and_begins_like_a_trained_one():
    net, first = after(attention="frozen")
    assert torch.equal(net.A.detach(), first["A"])
    assert not torch.equal(net.head.weight.detach(), first["head.weight"])
    assert {name for name, w in net.named_parameters() if w.requires_grad} == {"head.weight"}
    trained = Positional(first=0.1).build(DATA, 0).state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in first.items())
    assert set(first) == {"A", "head.weight"}  # w* is no weight


def test_attention_is_trained_before_it_is_frozen():
    assert Positional(attention="frozen", power=3).first_model() == Positional(power=3)


@pytest.mark.parametrize("power", [4, 6])
def test_an_even_power_is_a_user_error(power):
    with pytest.raises(UserError, match=f"keeps the sign; got power={power}; allowed: odd"):
        Positional(power=power).check(TASK)
    Positional(power=power + 1).check(TASK)


# ---- what it shows


def share_by_loops(scores, sets):
    """Return association by loops: with ties to the smaller position."""
    right = 0
    for i in range(len(scores)):
        order = sorted(range(len(scores)), key=lambda j: (j != i, -scores[i][j], j))
        size = sum(s == sets[i] for s in sets)
        right += {sets[j] for j in order[:size]} == {sets[i]}
    return right / len(scores)


@torch.no_grad()
def test_it_shows_association_mass_lead_and_alignment():
    net, sets = network(), TASK.sets()
    net.A += torch.from_numpy(0.8 * (sets[:, None] == sets))
    A, v = scores_of(net), net.head.weight.numpy()[0]
    inside, outside, mass = [], [], []
    for i in range(D):
        e = np.exp(A[i])
        mass.append(sum(e[j] for j in range(D) if sets[j] == sets[i]) / e.sum())
        inside += [A[i, j] for j in range(D) if sets[j] == sets[i] and j != i]
        outside += [A[i, j] for j in range(D) if sets[j] != sets[i]]
    w = DATA.patterns[:, 0].astype(float)
    shown = net.observe(look(DATA.train), look())
    assert list(shown) == list(net.shows)
    assert shown["association"] == share_by_loops(A, sets) and 0.1 < shown["association"] < 0.9
    assert shown["in_group_mass"] == pytest.approx(np.mean(mass), rel=1e-9)
    assert shown["in_group_lead"] == pytest.approx(np.mean(inside) - np.mean(outside), rel=1e-9)
    assert shown["alignment"] == pytest.approx(v @ w / np.linalg.norm(v) / np.linalg.norm(w), rel=1e-6)
    trained_values = net.trained_values({}, look())
    assert set(trained_values) == {"scores"}
    np.testing.assert_allclose(np.reshape(trained_values["scores"], (D, D)), A, rtol=1e-6)


@torch.no_grad()
def test_scores_that_are_the_sets_are_association_1_in_any_order_of_the_patches():
    for permuted in (False, True):
        task = Spatial(tokens=12, group=3, d=20, test=40, permuted=permuted)
        sets = task.sets()[task.order()]
        data = task.draw(8, 0, {})
        net = network(data=data, first=0.001)
        assert net.observe(look(data.train), look(data.test))["association"] < 0.5
        net.A += torch.from_numpy(0.1 * (sets[:, None] == sets))
        shown = net.observe(look(data.train), look(data.test))
        assert shown["association"] == 1 and shown["in_group_lead"] == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize("seed", range(6))
def test_association_is_a_ranking_with_ties_to_the_smaller_position(seed):
    rng = np.random.default_rng(seed)
    sets = rng.permutation(np.arange(12) // 3)
    together = sets[:, None] == sets
    scores = rng.integers(0, 2, (12, 12)) + 1.0 * together * (rng.random((12, 12)) < 0.6)
    found = association(scores, together)
    assert found == pytest.approx(share_by_loops(scores.tolist(), sets))
    np.fill_diagonal(scores, -99)  # the own place counts in whatever its score
    assert association(scores, together) == found
    equal, known = np.zeros((12, 12)), together * (sets > 0)
    assert association(equal, together) == pytest.approx(share_by_loops(equal.tolist(), sets))
    assert association(1.0 * together, known) == 1 and association(-1.0 * together, known) == 0  # one set left out


@pytest.mark.parametrize("group", [1, 2, 12])
@torch.no_grad()
def test_what_it_shows_is_finite_whatever_the_size_of_the_sets(group):
    data = Spatial(tokens=12, group=group, d=20, test=60).draw(8, 0, {})
    shown = network(data=data).observe(look(data.train), look(data.test))
    assert all(math.isfinite(value) for value in shown.values())
    if group != 2:
        assert shown["in_group_lead"] == 0 and shown["association"] == 1


@torch.no_grad()
def test_a_set_that_no_test_sample_shows_is_left_out():
    net, sets = network(), TASK.sets()
    net.A += torch.from_numpy(5.0 * (sets[:, None] == sets) * (sets < 2)[:, None])
    split = DATA.test
    some = (split.relevance @ (sets < 2)) > 0
    few = replace(split, **{f: getattr(split, f)[some] for f in ("inputs", "labels", "groups", "relevance")})
    everything, seen = net.observe(look(), look(split)), net.observe(look(), look(few))
    assert seen["association"] == 1 > everything["association"]
    assert seen["in_group_mass"] > 0.9 > everything["in_group_mass"]
    assert seen["in_group_lead"] > 4 > everything["in_group_lead"]
    net.A *= -1
    assert net.observe(look(), look(few))["association"] == 0
