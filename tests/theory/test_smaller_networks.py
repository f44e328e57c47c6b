"""First weights, training and observations of the two-layer, the positional and the one-query network."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sparsebench_plugins.random import Random
from sparsebench_theory.models import OneQuery, Positional, TwoLayer
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.sparse_tokens.task import SparseTokens
from sparsebench_theory.spatial.task import Spatial, association

from sparsebench.errors import UserError
from sparsebench.models.actor import Actor, SplitPass
from sparsebench.strategy.budget import Budget
from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, Samples


def look(split, acting=None):
    return SplitPass(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)), acting)


# ---- two layers

TWO_TASK = Overfitting(tokens=7, d=24, signal=2.0, noise=0.2, strong=4, test=5)
TWO_DATA = TWO_TASK.draw(6, 0, {})
TWO_N, TWO_L = 6, 7


def two_network(repetition=0, data=TWO_DATA, precision="float64", shrink=0.3, **options):
    """Return a two-layer network with weights so large that its attention is not uniform."""
    model = TwoLayer(**{"d_h": 10, "d_v": 8, "shrink": shrink, "precision": precision} | options)
    return model.build(data, repetition)


def two_weights(net):
    return [w.detach().double().numpy() for w in (net.W_Q, net.W_K, net.W_V, net.w_O)]


# ---- first weights


def test_first_weights_are_those_of_linear_layers_shrunk():
    data = Overfitting(tokens=3, d=400, test=1).draw(2, 0, {})
    net = TwoLayer(d_h=64, d_v=100, shrink=16).build(data, 0)
    for W, shape in ((net.W_Q, (400, 64)), (net.W_K, (400, 64)), (net.W_V, (400, 100))):
        bound = 1 / 20 / 16
        assert W.shape == shape and W.dtype == torch.float32
        assert float(W.detach().abs().max()) <= bound * (1 + 1e-6) and float(W.detach().abs().max()) > 0.99 * bound
        assert float(W.detach().mean()) == pytest.approx(0, abs=0.03 * bound)
        assert float(W.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)  # uniform
    assert net.w_O.shape == (100,) and 0.09 < float(net.w_O.abs().max()) <= 0.1  # not shrunk
    assert float(net.w_O.std()) == pytest.approx(0.1 / 3**0.5, rel=0.15)
    assert not torch.equal(net.W_Q, net.W_K)
    wider = TwoLayer(d_h=64, d_v=100, shrink=1).build(data, 0)
    assert float(wider.W_Q.detach().abs().max()) == pytest.approx(1 / 20, rel=0.01)


def test_the_read_out_is_frozen_and_the_rest_is_trained():
    net = two_network()
    first = {name: value.clone() for name, value in net.state_dict().items()}
    assert {name for name, _ in net.named_parameters()} == {"W_Q", "W_K", "W_V"}
    recipe = TWO_TASK.model_copy(update={"steps": 5}).recipe()
    split = TWO_DATA.train
    tensors = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    own = Samples(*tensors)
    Training(net, None, own, recipe, ("order",), steps=Autograd(net, None, own, recipe)).run()
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, first[name])}
    assert moved == {"W_Q", "W_K", "W_V"}


# ---- what it shows


@torch.no_grad()
def test_it_shows_loss_attention_values_and_scores():
    """It shows the loss attention values and scores of signal and strong noise."""
    net, result = two_network(), {name: [] for name in two_network().shows}
    W_Q, W_K, W_V, w_O = two_weights(net)
    for x, label, relevance in zip(
        TWO_DATA.train.inputs.astype(float), TWO_DATA.train.labels, TWO_DATA.train.relevance, strict=True
    ):
        y, signal = 2 * label - 1, int(relevance.argmax())
        noise = max((l for l in range(TWO_L) if l != signal), key=lambda l: np.linalg.norm(x[l]))
        scores, values = x @ W_Q @ W_K.T @ x.T, x @ W_V @ w_O
        attention = (np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)).mean(axis=0)
        result["train_loss_then"].append(math.log1p(math.exp(-y * attention @ values)))
        for what, name, s in (("relevant", "signal", signal), ("noise", "noise", noise)):
            result[f"attention_on_{what}"].append(attention[s])
            result[f"value_of_{name}"].append(y * values[s])
            result[f"score_of_{name}"].append(scores[signal, s])
    shown = net.observe(look(TWO_DATA.train), look(TWO_DATA.test))
    assert list(shown) == list(net.shows)
    for name, values in result.items():
        assert shown[name] == pytest.approx(np.mean(values), rel=1e-9), name
    assert len({round(value, 6) for value in shown.values()}) == 7


@torch.no_grad()
def test_what_it_shows_is_of_the_training_samples_with_all_tokens_there():
    net = two_network()
    shown = net.observe(look(TWO_DATA.train), look(TWO_DATA.test))
    actor = Actor(Random(), Budget(keep_rate=0.5), net.cost, None, stream=3)
    acting = actor.begin(torch.arange(TWO_N), 0, look(TWO_DATA.train).relevance, training=False)
    assert net.observe(look(TWO_DATA.train, acting), look(TWO_DATA.train)) == shown
    assert net.observe(look(TWO_DATA.test), look(TWO_DATA.train)) != shown
    assert net.trained_values({}, look(TWO_DATA.train)) == {}


# ---- positional

POSITIONAL_TASK = Spatial(tokens=12, group=3, d=20, test=40, steps=6)
POSITIONAL_DATA = POSITIONAL_TASK.draw(8, 0, {})
POSITIONAL_N, POSITIONAL_D = 8, 12
DIAGONAL = math.log(math.log(20))


def positional_network(repetition=0, data=POSITIONAL_DATA, first=0.5, precision=torch.float64, **options):
    """Return a positional network with weights so large that its attention is not uniform."""
    return Positional(first=first, **options).build(data, repetition).to(precision)


def scores_of(net):
    A = net.A.detach().double().numpy().copy()
    for i in range(len(A)):
        A[i, i] = DIAGONAL
    return A


# ---- first weights, and their training


def test_first_weights_are_small_and_the_diagonal_is_large():
    data = Spatial(tokens=36, group=6, d=400, test=1).draw(2, 0, {})
    net = Positional().build(data, 0)
    assert net.A.dtype == torch.float32 and net.A.shape == (36, 36) and net.head.weight.shape == (1, 400)
    assert float(net.A.detach().std()) == pytest.approx(1e-3, rel=0.06)
    assert float(net.head.weight.detach().std()) == pytest.approx(1e-3, rel=0.1)
    np.testing.assert_allclose(net.scores().diagonal().detach().numpy(), math.log(math.log(400)), rtol=1e-6)
    shares = net.attention().detach()
    own = shares.diagonal() / (shares.sum(dim=1) - shares.diagonal()) * 35
    np.testing.assert_allclose(own.numpy(), math.log(400), rtol=0.01)  # ln d times the attention to another position
    assert float(Positional(first=0.1).build(data, 0).A.detach().std()) == pytest.approx(0.1, rel=0.06)


def positional_after(steps=30, strategy=None, **options):
    """Return a positional network after some training, and its first weights."""
    net = Positional(first=0.1, **options).build(POSITIONAL_DATA, 0)
    first = {name: value.clone() for name, value in net.state_dict().items()}
    recipe = Spatial(tokens=12, group=3, d=20, steps=steps, lr=0.1, lr_attention=5).recipe()
    split = POSITIONAL_DATA.train
    tensors = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    actor = strategy and Actor(strategy, Budget(keep_rate=0.5), net.cost, None, 3)
    Training(net, actor, Samples(*tensors), recipe, ("order",)).run()
    return net, first


@pytest.mark.parametrize("strategy", [None, Random()], ids=["dense", "random"])
def test_training_moves_scores_but_not_the_diagonal(strategy):
    """Training moves scores and read out and not the diagonal."""
    net, first = positional_after(strategy=strategy)
    off = ~torch.eye(POSITIONAL_D, dtype=torch.bool)
    assert (net.A.detach() != first["A"])[off].double().mean() > 0.5
    assert torch.equal(net.A.detach()[~off], first["A"][~off])
    np.testing.assert_allclose(net.scores().diagonal().detach().numpy(), DIAGONAL, rtol=1e-6)
    assert not torch.equal(net.head.weight.detach(), first["head.weight"])


def test_frozen_attention_does_not_move_and_begins_like_a_trained_one():
    net, first = positional_after(attention="frozen")
    assert torch.equal(net.A.detach(), first["A"])
    assert not torch.equal(net.head.weight.detach(), first["head.weight"])
    assert {name for name, w in net.named_parameters() if w.requires_grad} == {"head.weight"}
    trained = Positional(first=0.1).build(POSITIONAL_DATA, 0).state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in first.items())
    assert set(first) == {"A", "head.weight"}  # w* is not a weight


def test_attention_is_trained_before_it_is_frozen():
    assert Positional(attention="frozen", power=3).first_model() == Positional(power=3)


@pytest.mark.parametrize("power", [4, 6])
def test_an_even_power_is_a_user_error(power):
    with pytest.raises(UserError, match=f"must be odd; got power={power}; allowed: odd"):
        Positional(power=power).check(POSITIONAL_TASK)
    Positional(power=power + 1).check(POSITIONAL_TASK)


# ---- what it shows


def share_by_loops(scores, sets):
    """Return association by loops; ties go to the smaller position."""
    right = 0
    for i in range(len(scores)):
        order = sorted(range(len(scores)), key=lambda j: (j != i, -scores[i][j], j))
        size = sum(s == sets[i] for s in sets)
        right += {sets[j] for j in order[:size]} == {sets[i]}
    return right / len(scores)


@torch.no_grad()
def test_it_shows_association_mass_lead_and_alignment():
    net, sets = positional_network(), POSITIONAL_TASK.sets()
    net.A += torch.from_numpy(0.8 * (sets[:, None] == sets))
    A, v = scores_of(net), net.head.weight.numpy()[0]
    inside, outside, mass = [], [], []
    for i in range(POSITIONAL_D):
        e = np.exp(A[i])
        mass.append(sum(e[j] for j in range(POSITIONAL_D) if sets[j] == sets[i]) / e.sum())
        inside += [A[i, j] for j in range(POSITIONAL_D) if sets[j] == sets[i] and j != i]
        outside += [A[i, j] for j in range(POSITIONAL_D) if sets[j] != sets[i]]
    w = POSITIONAL_DATA.patterns[:, 0].astype(float)
    shown = net.observe(look(POSITIONAL_DATA.train), look(POSITIONAL_DATA.test))
    assert list(shown) == list(net.shows)
    assert shown["association"] == share_by_loops(A, sets) and 0.1 < shown["association"] < 0.9
    assert shown["in_group_mass"] == pytest.approx(np.mean(mass), rel=1e-9)
    assert shown["in_group_lead"] == pytest.approx(np.mean(inside) - np.mean(outside), rel=1e-9)
    assert shown["alignment"] == pytest.approx(v @ w / np.linalg.norm(v) / np.linalg.norm(w), rel=1e-6)
    trained_values = net.trained_values({}, look(POSITIONAL_DATA.test))
    assert set(trained_values) == {"scores"}
    np.testing.assert_allclose(np.reshape(trained_values["scores"], (POSITIONAL_D, POSITIONAL_D)), A, rtol=1e-6)


@torch.no_grad()
def test_scores_of_the_sets_have_association_1():
    """Scores that are the sets are association 1 in any order of the patches."""
    for permuted in (False, True):
        task = Spatial(tokens=12, group=3, d=20, test=40, permuted=permuted)
        sets = task.sets()[task.order()]
        data = task.draw(8, 0, {})
        net = positional_network(data=data, first=0.001)
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
    result = association(scores, together)
    assert result == pytest.approx(share_by_loops(scores.tolist(), sets))
    np.fill_diagonal(scores, -99)  # the diagonal counts, whatever its score
    assert association(scores, together) == result
    equal, known = np.zeros((12, 12)), together * (sets > 0)
    assert association(equal, together) == pytest.approx(share_by_loops(equal.tolist(), sets))
    assert association(1.0 * together, known) == 1 and association(-1.0 * together, known) == 0  # one set is left out


@pytest.mark.parametrize("group", [1, 2, 12])
@torch.no_grad()
def test_what_it_shows_is_finite_whatever_the_size_of_the_sets(group):
    data = Spatial(tokens=12, group=group, d=20, test=60).draw(8, 0, {})
    shown = positional_network(data=data).observe(look(data.train), look(data.test))
    assert all(math.isfinite(value) for value in shown.values())
    if group != 2:
        assert shown["in_group_lead"] == 0 and shown["association"] == 1


@torch.no_grad()
def test_a_set_that_no_test_sample_shows_is_left_out():
    net, sets = positional_network(), POSITIONAL_TASK.sets()
    net.A += torch.from_numpy(5.0 * (sets[:, None] == sets) * (sets < 2)[:, None])
    split = POSITIONAL_DATA.test
    some = (split.relevance @ (sets < 2)) > 0
    few = replace(split, **{f: getattr(split, f)[some] for f in ("inputs", "labels", "groups", "relevance")})
    everything, seen = (
        net.observe(look(POSITIONAL_DATA.test), look(split)),
        net.observe(look(POSITIONAL_DATA.test), look(few)),
    )
    assert seen["association"] == 1 > everything["association"]
    assert seen["in_group_mass"] > 0.9 > everything["in_group_mass"]
    assert seen["in_group_lead"] > 4 > everything["in_group_lead"]
    net.A *= -1
    assert net.observe(look(POSITIONAL_DATA.test), look(few))["association"] == 0


# ---- one query

QUERY_TASK = SparseTokens(tokens=7, d=6, relevant=2, theta=2.0, test=5, lr=0.5, steps=2)
QUERY_DATA = QUERY_TASK.draw(12, 0, {})
QUERY_N, QUERY_L = 12, 7


def query_network(data=QUERY_DATA, spread=0.8, **options):
    """Return a one-query network whose weights are not 0."""
    net = OneQuery(**options).build(data, 0).double()
    rng = np.random.default_rng(3)
    with torch.no_grad():
        for weight in (net.q, net.head.weight, net.head.bias):
            weight += torch.from_numpy(spread * rng.standard_normal(weight.shape))
    return net


def query_samples(split=QUERY_DATA.train):
    return split.inputs.astype(float)


def query_weights(net):
    return net.q.detach().numpy(), net.head.weight.detach().numpy()[0], float(net.head.bias.detach())


# ---- training


def query_after(steps, **options):
    """Return a one-query network after some steps in float64."""
    net = OneQuery(**options).build(QUERY_DATA, 0).double()
    recipe = QUERY_TASK.model_copy(update={"steps": steps}).recipe()
    shown = look(QUERY_DATA.train)
    Training(net, None, Samples(shown.inputs.double(), shown.labels, None), recipe, ("order",)).run()
    return net


def test_the_first_step_moves_the_read_out_alone():
    """At weights 0, the gradients of the mean of log(1 + e^(-yf)) equal those by loops."""
    signs, lr = 2.0 * QUERY_DATA.train.labels - 1, 0.5
    w, b, d = np.zeros(6), 0.0, np.zeros(6)
    for y, x in zip(signs, query_samples(), strict=True):
        w += lr / QUERY_N * y / 2 * x.mean(axis=0)
        b += lr / QUERY_N * y / 2
    for y, x in zip(signs, query_samples(), strict=True):
        f, centred = x.mean(axis=0) @ w + b, x - x.mean(axis=0)
        covariance = sum(np.outer(token, token) for token in centred) / QUERY_L
        d += lr / QUERY_N * y / (1 + math.exp(y * f)) * covariance @ w
    one, two = (query_weights(query_after(steps)) for steps in (1, 2))
    assert (one[0] == 0).all()
    np.testing.assert_allclose(one[1], w, rtol=1e-10)
    assert one[2] == pytest.approx(b, rel=1e-10)
    np.testing.assert_allclose(two[0], d, rtol=1e-10)
    assert np.abs(two[0]).min() > 0


def test_all_weights_begin_at_0_and_a_frozen_query_stays_there():
    for options in ({}, {"attention": "frozen"}):
        net = OneQuery(**options).build(QUERY_DATA, 5)
        assert all(float(value.abs().sum()) == 0 for value in net.state_dict().values())
        assert set(net.state_dict()) == {"q", "head.weight", "head.bias"}  # xi is not a weight
    q, w, _ = query_weights(query_after(4, attention="frozen"))
    assert (q == 0).all() and np.abs(w).min() > 0
    assert np.abs(query_weights(query_after(4))[0]).min() > 0


def test_a_query_finds_the_signal_that_the_mean_hides():
    task = SparseTokens(tokens=64, d=8, test=500)
    data = task.draw(300, 0, {})
    errors = {}
    for attention in ("trained", "frozen"):
        net = OneQuery(attention=attention).build(data, 0)
        split, test = look(data.train), look(data.test)
        Training(net, None, Samples(split.inputs, split.labels, None), task.recipe(), ("o",)).run()
        errors[attention] = float(((net(test.inputs) > 0) != test.labels).double().mean())
    assert errors["trained"] < 0.05 < 0.12 < errors["frozen"] < 0.25  # the smallest error of the mean token is 0.159


# ---- observations and MACs


@torch.no_grad()
def test_it_shows_the_cosine_of_query_and_signal_whatever_its_sign():
    net, xi = query_network(), QUERY_DATA.patterns[:, 0]
    q, _, _ = query_weights(net)
    expected = abs(q @ xi) / np.linalg.norm(q)
    assert net.observe(look(QUERY_DATA.train), look(QUERY_DATA.test)) == {
        "alignment": pytest.approx(expected, rel=1e-9)
    }
    net.q *= -1
    assert net.observe(look(QUERY_DATA.train), look(QUERY_DATA.test))["alignment"] == pytest.approx(expected, rel=1e-9)
    net.q.zero_()
    assert net.observe(look(QUERY_DATA.train), look(QUERY_DATA.test)) == {"alignment": 0.0} and list(net.shows) == [
        "alignment"
    ]
    assert net.trained_values({}, look(QUERY_DATA.train)) == {}
