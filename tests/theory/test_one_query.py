import math

import numpy as np
import pytest
import torch
from sparsebench_theory.models import OneQuery
from sparsebench_theory.sparse_tokens.task import SparseTokens

from sparsebench.models.shown import SplitPass
from sparsebench.training.loop import train
from sparsebench.training.steps import Autograd, Samples

TASK = SparseTokens(tokens=7, d=6, relevant=2, theta=2.0, test=5, lr=0.5, steps=2)
DATA = TASK.draw(12, 0, {})
N, L = 12, 7


def network(data=DATA, spread=0.8, **options):
    """Return a network whose weights are not 0."""
    net = OneQuery(**options).build(data, 0).double()
    rng = np.random.default_rng(3)
    with torch.no_grad():
        for weight in (net.q, net.head.weight, net.head.bias):
            weight += torch.from_numpy(spread * rng.standard_normal(weight.shape))
    return net


def look(split=DATA.train):
    return SplitPass(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)), None)


def samples(split=DATA.train):
    return split.inputs.astype(float)


def weights(net):
    return net.q.detach().numpy(), net.head.weight.detach().numpy()[0], float(net.head.bias.detach())


# ---- training


def after(steps, **options):
    """Return a network after so many steps in float64."""
    net = OneQuery(**options).build(DATA, 0).double()
    recipe = TASK.model_copy(update={"steps": steps}).recipe()
    shown = look()
    train(Autograd(net, None, Samples(shown.inputs.double(), shown.labels, None), recipe), N, recipe, ("order",))
    return net


def test_the_first_step_moves_the_read_out_alone_and_the_second_the_query_by_the_covariances():
    """At 0 the gradients of the mean of log(1 + e^(-yf)) are those of the loops."""
    signs, lr = 2.0 * DATA.train.labels - 1, 0.5
    w, b, d = np.zeros(6), 0.0, np.zeros(6)
    for y, x in zip(signs, samples(), strict=True):
        w += lr / N * y / 2 * x.mean(axis=0)
        b += lr / N * y / 2
    for y, x in zip(signs, samples(), strict=True):
        f, centred = x.mean(axis=0) @ w + b, x - x.mean(axis=0)
        covariance = sum(np.outer(token, token) for token in centred) / L
        d += lr / N * y / (1 + math.exp(y * f)) * covariance @ w
    one, two = (weights(after(steps)) for steps in (1, 2))
    assert (one[0] == 0).all()
    np.testing.assert_allclose(one[1], w, rtol=1e-10)
    assert one[2] == pytest.approx(b, rel=1e-10)
    np.testing.assert_allclose(two[0], d, rtol=1e-10)
    assert np.abs(two[0]).min() > 0


def test_all_weights_begin_at_0_and_a_frozen_query_stays_there():
    for options in ({}, {"attention": "frozen"}):
        net = OneQuery(**options).build(DATA, 5)
        assert all(float(value.abs().sum()) == 0 for value in net.state_dict().values())
        assert set(net.state_dict()) == {"q", "head.weight", "head.bias"}  # xi is no weight
    q, w, _ = weights(after(4, attention="frozen"))
    assert (q == 0).all() and np.abs(w).min() > 0
    assert np.abs(weights(after(4))[0]).min() > 0


def test_a_query_finds_the_signal_that_the_mean_hides():
    task = SparseTokens(tokens=64, d=8, test=500)
    data = task.draw(300, 0, {})
    errors = {}
    for attention in ("trained", "frozen"):
        net = OneQuery(attention=attention).build(data, 0)
        split, test = look(data.train), look(data.test)
        train(Autograd(net, None, Samples(split.inputs, split.labels, None), task.recipe()), 300, task.recipe(), ("o",))
        errors[attention] = float(((net(test.inputs) > 0) != test.labels).double().mean())
    assert errors["trained"] < 0.05 < 0.12 < errors["frozen"] < 0.25  # the least error of the mean is 0.159


# ---- what it shows, and what it costs


@torch.no_grad()
def test_it_shows_the_cosine_of_query_and_signal_whatever_its_sign():
    net, xi = network(), DATA.patterns[:, 0]
    q, _, _ = weights(net)
    expected = abs(q @ xi) / np.linalg.norm(q)
    assert net.observe(look(), look(DATA.test)) == {"alignment": pytest.approx(expected, rel=1e-9)}
    net.q *= -1
    assert net.observe(look(), look(DATA.test))["alignment"] == pytest.approx(expected, rel=1e-9)
    net.q.zero_()
    assert net.observe(look(), look(DATA.test)) == {"alignment": 0.0} and list(net.shows) == ["alignment"]
    assert net.trained_values({}, look()) == {}
