import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fusing import FUSING
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from sparsebench_theory.models import Positional
from sparsebench_theory.shallow.task import Theory
from sparsebench_theory.spatial.network import association
from sparsebench_theory.spatial.task import Spatial

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import Step
from sparsebench.models.actor import Actor
from sparsebench.models.shown import SplitPass
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep
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


def begin(net, strategy, rate=0.5, split=DATA.train):
    relevance = torch.from_numpy(split.relevance)
    return Actor(strategy, Budget(keep_rate=rate), net.cost, None, stream=3).begin(
        torch.arange(len(relevance)), 0, relevance, tokens=D, training=False
    )


def samples(split=DATA.train):
    return split.inputs.astype(float)


def scores_of(net):
    A = net.A.detach().double().numpy().copy()
    for i in range(len(A)):
        A[i, i] = DIAGONAL
    return A


def formula(net, x, S, power=5, nu=0.03, scale=1.0):
    """Return F of one (D, d) sample with the positions S, by loops."""
    A, v = scores_of(net), net.head.weight.detach().double().numpy()[0]
    total = 0.0
    for m in S:
        e = {j: math.exp(A[m, j]) for j in S}
        gathered = scale * sum(e[j] / sum(e.values()) * float(x[j] @ v) for j in S)
        total += gathered**power + nu * gathered
    return total


@pytest.mark.parametrize("shape", [{}, {"power": 3, "nu": 0.5, "scale": 2.0}], ids=str)
@torch.no_grad()
def test_the_output_is_the_formula(shape):
    net, X = network(**shape), torch.from_numpy(samples())
    expected = [formula(net, x, range(D), **shape) for x in samples()]
    np.testing.assert_allclose(net(X).numpy(), expected, rtol=1e-10)
    assert np.abs(expected).min() > 1e-5 and net(X).shape == (N,)
    assert float(net.attention().std()) > 0.02  # not even


@pytest.mark.parametrize("shape", [{}, {"power": 3, "nu": 0.5, "scale": 2.0}], ids=str)
@pytest.mark.parametrize("strategy", [Random(), Oracle(), AttnTopK()], ids=lambda s: s.name)
@torch.no_grad()
def test_a_removed_token_is_gone_from_the_softmax_and_both_sums(strategy, shape):
    net = network(precision=torch.float32, **shape)
    acting = begin(net, strategy)
    out = net(torch.from_numpy(DATA.train.inputs), acting)
    assert acting.index.shape == (N, 6)
    expected = [formula(net, x, S, **shape) for x, S in zip(samples(), acting.index.tolist(), strict=True)]
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-4, atol=1e-6)
    assert not np.allclose(expected, [formula(net, x, range(D), **shape) for x in samples()], rtol=0.05)
    if strategy.name == "oracle":
        relevance = torch.from_numpy(DATA.train.relevance)
        assert (relevance.gather(1, acting.index).sum(dim=1) == 3).all()
    if strategy.name == "attn_topk":
        received = net.attention().mean(dim=0)
        assert acting.index.tolist() == [sorted(received.topk(6).indices.tolist())] * N


@torch.no_grad()
def test_what_a_removed_token_holds_changes_nothing(scripted):
    net, X = network(precision=torch.float32), torch.from_numpy(DATA.train.inputs)
    strategy = scripted(lambda view, keep: Keep(torch.arange(keep).expand(N, keep)))
    out, other = net(X, begin(net, strategy)), X.clone()
    other[:, 6:] = 1e3
    assert torch.equal(net(other, begin(net, strategy)), out)
    with torch.no_grad():
        net.A[:, 6:] = 40.0  # nor does how much attention it would have
        net.A[6:] = -7.0
    torch.testing.assert_close(net(X, begin(net, strategy)), out, rtol=1e-2, atol=1e-5)
    other[:, 5] = 1e3
    assert not torch.allclose(net(other, begin(net, strategy)), out)


@torch.no_grad()
def test_in_another_order_each_token_keeps_the_attention_of_its_position(scripted):
    net, X = network(precision=torch.float32), torch.from_numpy(DATA.train.inputs)
    kept = torch.tensor([[11, 0, 3, 7, 5, 2]] * N)
    out = [net(X, begin(net, scripted(lambda view, keep, o=o: Keep(kept, ordered=o)))) for o in (False, True)]
    torch.testing.assert_close(*out)


@torch.no_grad()
def test_keeping_all_tokens_is_the_network_itself(scripted):
    net, X = network(precision=torch.float32), torch.from_numpy(DATA.train.inputs)
    acting = begin(net, scripted(lambda view, keep: None))
    assert torch.equal(net(X, acting), net(X)) and acting.steps == [Step(D, D)]


def test_the_gradient_is_that_of_the_kept_tokens(scripted):
    net = network(precision=torch.float32)
    X = torch.from_numpy(DATA.train.inputs).requires_grad_()
    net(X, begin(net, scripted(lambda view, keep: Keep(torch.arange(keep).expand(N, keep))))).sum().backward()
    assert (X.grad.abs().sum(dim=2) > 0).tolist() == [[True] * 6 + [False] * 6] * N
    expected = torch.zeros(D, D, dtype=torch.bool)
    expected[:6, :6] = ~torch.eye(6, dtype=torch.bool)
    assert torch.equal(net.A.grad.abs() > 1e-5 * net.A.grad.abs().max(), expected)


@torch.no_grad()
def test_a_strategy_sees_tokens_values_and_attention(scripted):
    net, X = network(precision=torch.float32), torch.from_numpy(DATA.train.inputs)
    fields = ("tokens", "values", "attention", "received_attention", "pixels")
    seen = {}
    strategy = scripted(lambda view, keep: seen.update({f: getattr(view, f) for f in fields}), needs=fields)
    net(X, begin(net, strategy))
    exp = np.exp(scores_of(net))
    received = np.tile((exp / exp.sum(axis=1, keepdims=True)).mean(axis=0), (N, 1))
    values = (samples() @ net.head.weight.double().numpy().T)[:, None]
    for field, expected in zip(fields[:4], (samples(), values, received, received), strict=True):
        np.testing.assert_allclose(seen[field].numpy(), expected, rtol=1e-4, atol=1e-6)
    assert seen["pixels"] is None and net.attention_source == "received" and net.grid is None


@pytest.mark.parametrize("need", ["queries", "keys", "class_attention"])
def test_what_it_does_not_have_a_strategy_cannot_see(scripted, need):
    net = network(precision=torch.float32)
    with pytest.raises(UnsupportedError, match=f"needs {need}"):
        net(look(DATA.train).inputs, begin(net, scripted(lambda view, keep: None, needs=(need,))))


@pytest.mark.parametrize("plan", FUSING.values(), ids=FUSING)
def test_tokens_cannot_be_fused_merged_or_mixed(scripted, plan):
    net = network(precision=torch.float32)
    with pytest.raises(UnsupportedError, match=r"pair of positions.*kept or removed"):
        net(look(DATA.train).inputs, begin(net, scripted(plan)))


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


def test_a_repetition_has_its_own_first_weights_and_always_the_same():
    first, again, other = (Positional().build(DATA, repetition) for repetition in (0, 0, 1))
    shaped = Positional(power=3, nu=0, scale=12).build(DATA, 0)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]) and torch.equal(value, shaped.state_dict()[name])
        assert not torch.equal(value, other.state_dict()[name])


@pytest.mark.parametrize("power", [4, 6])
def test_an_even_power_is_a_user_error(power):
    with pytest.raises(UserError, match=f"keeps the sign; got power={power}; allowed: odd"):
        Positional(power=power).check(TASK)
    Positional(power=power + 1).check(TASK)


@pytest.mark.parametrize("data", [Theory(tokens=10).draw(2, 0, {}), replace(DATA, patterns=None)], ids=["many", "none"])
def test_data_without_a_feature_are_a_user_error(data):
    with pytest.raises(UserError, match="one feature"):
        Positional().build(data, 0)


def test_macs_are_a_value_a_token_and_a_product_a_pair_and_scores_are_free():
    net = network()
    by_count = [net.cost.macs(net.cost.steps(Traits("input", {"tokens"}), (0,), (n,))) for n in range(1, D + 1)]
    assert by_count == [n * 20 + n * n for n in range(1, D + 1)] == sorted(set(by_count))
    assert [
        net.cost.macs(net.cost.steps(Traits("attention", {"attention"}), (0,), (n,))) for n in range(1, D + 1)
    ] == by_count


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
    found = float(association(torch.from_numpy(scores), torch.from_numpy(together)))
    assert found == pytest.approx(share_by_loops(scores.tolist(), sets))
    np.fill_diagonal(scores, -99)  # the own place counts in whatever its score
    assert float(association(torch.from_numpy(scores), torch.from_numpy(together))) == pytest.approx(found)


def test_equal_scores_associate_only_the_positions_that_come_first():
    together = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]).bool()
    assert float(association(torch.zeros(4, 4), together)) == 0.5
    assert float(association(together.double(), together)) == 1 and float(association(-1.0 * together, together)) == 0


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
