import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fusing import FUSING
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.feature_norm import FeatureNorm
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from sparsebench_theory.models import OneQuery
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.sparse_tokens.task import SparseTokens
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import Step
from sparsebench.models.actor import Actor
from sparsebench.models.shown import SplitPass
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget
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


def begin(net, strategy, rate=0.5, split=DATA.train):
    relevance = torch.from_numpy(split.relevance)
    return Actor(strategy, Budget(keep_rate=rate), net.cost, None, stream=3).begin(
        torch.arange(len(relevance)), 0, relevance, tokens=L, training=False
    )


def look(split=DATA.train):
    return SplitPass(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)), None)


def samples(split=DATA.train):
    return split.inputs.astype(float)


def weights(net):
    return net.q.detach().numpy(), net.head.weight.detach().numpy()[0], float(net.head.bias.detach())


def formula(net, x, S):
    """Return f of one (L, d) sample with the tokens S, by loops."""
    q, w, b = weights(net)
    e = {s: math.exp(sum(a * c for a, c in zip(x[s], q, strict=True))) for s in S}
    return sum(e[s] / sum(e.values()) * float(x[s] @ w) for s in S) + b


@torch.no_grad()
def test_the_output_is_the_formula():
    net, X = network(), torch.from_numpy(samples())
    expected = [formula(net, x, range(L)) for x in samples()]
    np.testing.assert_allclose(net(X).numpy(), expected, rtol=1e-12)
    assert net(X).shape == (N,) and float(net.attention(X).std()) > 0.05


@torch.no_grad()
def test_with_the_query_at_0_it_is_linear_in_the_mean_of_the_tokens():
    net = network()
    net.q.zero_()
    _, w, b = weights(net)
    np.testing.assert_allclose(net(torch.from_numpy(samples())).numpy(), samples().mean(axis=1) @ w + b, rtol=1e-12)


@pytest.mark.parametrize("strategy", [Random(), Oracle(), AttnTopK(), FeatureNorm()], ids=lambda s: s.name)
@torch.no_grad()
def test_a_removed_token_is_neither_attended_nor_summed(strategy):
    net = network()
    acting = begin(net, strategy)
    out = net(torch.from_numpy(samples()), acting)
    assert acting.index.shape == (N, 3)
    expected = [formula(net, x, S) for x, S in zip(samples(), acting.index.tolist(), strict=True)]
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12)
    assert not np.allclose(out.numpy(), [formula(net, x, range(L)) for x in samples()], rtol=1e-3)
    X = torch.from_numpy(samples())
    if strategy.name == "oracle":
        kept = torch.from_numpy(DATA.train.relevance).gather(1, acting.index).sum(dim=1)
        assert kept.tolist() == (2.0 * torch.from_numpy(DATA.train.labels)).tolist()
    scores = {"attn_topk": net.attention(X), "feature_norm": X.norm(dim=2)}.get(strategy.name)
    if scores is not None:
        assert torch.equal(acting.index, scores.topk(3, dim=1).indices.sort(dim=1).values)


@torch.no_grad()
def test_a_strategy_sees_tokens_and_attention(scripted):
    net, X = network(), torch.from_numpy(samples())
    fields = ("tokens", "keys", "values", "attention", "received_attention", "pixels")
    seen = {}
    strategy = scripted(lambda view, keep: seen.update({f: getattr(view, f) for f in fields}), needs=fields)
    assert torch.equal(net(X, begin(net, strategy)), net(X))
    q, _, _ = weights(net)
    for b, x in enumerate(samples()):
        e = np.exp(x @ q)
        for field, expected in zip(fields[:5], (x, x[None], x[None], e / e.sum(), e / e.sum()), strict=True):
            np.testing.assert_allclose(seen[field][b].numpy(), expected, rtol=1e-10)
    assert seen["pixels"] is None and net.attention_source == "received" and net.grid is None


@pytest.mark.parametrize("need", ["class_attention", "queries"])
def test_what_it_does_not_have_is_unsupported(scripted, need):
    net = network()
    with pytest.raises(UnsupportedError, match=f"needs {need}"):
        net(look().inputs, begin(net, scripted(lambda view, keep: None, needs=(need,))))


@pytest.mark.parametrize("plan", FUSING.values(), ids=FUSING)
def test_tokens_cannot_be_fused_merged_or_mixed(scripted, plan):
    net = network()
    with pytest.raises(UnsupportedError, match=r"theory of plain tokens.*kept or removed"):
        net(look().inputs, begin(net, scripted(plan)))


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


def test_dense_macs_are_half_of_the_counted_operations():
    net = OneQuery().build(SparseTokens(tokens=16, d=200, test=1).draw(2, 0, {}), 0)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        net(torch.zeros(1, 16, 200))
    unseen = 0 if "aten.mv" in str(counter.get_flop_counts()) else 16 * 200
    expected = 16 * (2 * 200 + 1)
    assert net.cost.macs([Step(16, 16)]) == expected == pytest.approx(counter.get_total_flops() / 2 + unseen, rel=0.01)


def test_macs_are_two_products_a_token_and_attention_to_choose_by_is_paid_for():
    net = network()
    by_count = [net.cost.macs(net.cost.steps(Traits("input", {"tokens"}), (0,), (n,))) for n in range(1, L + 1)]
    assert by_count == [n * 13 for n in range(1, L + 1)]
    for n, plain in zip(range(1, L + 1), by_count, strict=True):
        scored = net.cost.macs(net.cost.steps(Traits("attention", {"attention"}), (0,), (n,)))
        assert scored - plain == (0 if n == L else L * 6)


@pytest.mark.parametrize("data", [Theory(tokens=10).draw(2, 0, {}), replace(DATA, patterns=None)], ids=["many", "none"])
def test_data_without_one_feature_are_a_user_error(data):
    with pytest.raises(UserError, match="one feature"):
        OneQuery().build(data, 0)
