import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fusing import FUSING
from sparsebench_plugins.attn_topk import AttnTopK
from sparsebench_plugins.oracle import Oracle
from sparsebench_plugins.random import Random
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting.task import Overfitting
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import Step
from sparsebench.models.actor import Actor
from sparsebench.models.shown import SplitPass
from sparsebench.strategy.base import Traits
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep
from sparsebench.training.loop import train
from sparsebench.training.steps import Autograd, Samples

TASK = Overfitting(tokens=7, d=24, signal=2.0, noise=0.2, strong=4, test=5)
DATA = TASK.draw(6, 0, {})
N, L = 6, 7


def network(repetition=0, data=DATA, precision="float64", shrink=0.3, **options):
    """Return a network with weights so large that its attention is not even."""
    model = TwoLayer(**{"d_h": 10, "d_v": 8, "shrink": shrink, "precision": precision} | options)
    return model.build(data, repetition)


def look(split=DATA.train, acting=None):
    return SplitPass(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)), acting)


def begin(net, strategy, rate=0.5, split=DATA.train):
    relevance = torch.from_numpy(split.relevance)
    return Actor(strategy, Budget(keep_rate=rate), net.cost, None, stream=3).begin(
        torch.arange(len(relevance)), 0, relevance, tokens=net.cost.tokens, training=False
    )


def weights(net):
    return [w.detach().double().numpy() for w in (net.W_Q, net.W_K, net.W_V, net.w_O)]


def rows_of(net, x, S):
    """Return {l: {s: attention of l on s}} by loops, for tokens S of one (L, d) sample."""
    W_Q, W_K, _, _ = weights(net)
    rows = {}
    for l in S:
        e = {s: math.exp(sum(a * b for a, b in zip(x[l] @ W_Q, x[s] @ W_K, strict=True))) for s in S}
        rows[l] = {s: e[s] / sum(e.values()) for s in S}
    return rows


def formula(net, x, S):
    """Return f of one sample with the tokens S, by loops."""
    _, _, W_V, w_O = weights(net)
    total = 0.0
    for row in rows_of(net, x, S).values():
        for s, share in row.items():
            total += share * float(x[s] @ W_V @ w_O)
    return total / len(S)


def samples(split=DATA.train):
    return split.inputs.astype(float)


@torch.no_grad()
def test_the_output_is_the_formula():
    net = network()
    expected = [formula(net, x, range(L)) for x in samples()]
    np.testing.assert_allclose(net(torch.from_numpy(DATA.train.inputs)).numpy(), expected, rtol=1e-12)
    assert np.abs(expected).min() > 1e-3 and net(torch.from_numpy(DATA.train.inputs)).shape == (N,)
    attention = net.attention(torch.from_numpy(samples()))
    for x, found in zip(samples(), attention.numpy(), strict=True):
        rows = rows_of(net, x, range(L))
        np.testing.assert_allclose(found, [[rows[l][s] for s in range(L)] for l in range(L)], rtol=1e-12)
    assert float(attention.std()) > 0.05  # not even


@pytest.mark.parametrize("strategy", [Random(), Oracle(), AttnTopK()], ids=lambda s: s.name)
@torch.no_grad()
def test_a_removed_token_is_no_key_no_value_and_not_in_the_mean(strategy):
    net = network()
    acting = begin(net, strategy)
    out = net(torch.from_numpy(DATA.train.inputs), acting)
    assert acting.index.shape == (N, 3)
    expected = [formula(net, x, S) for x, S in zip(samples(), acting.index.tolist(), strict=True)]
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12)
    assert not np.allclose(out.numpy(), [formula(net, x, range(L)) for x in samples()], rtol=1e-3)
    relevance = torch.from_numpy(DATA.train.relevance)
    if strategy.name == "oracle":
        assert (relevance.gather(1, acting.index).sum(dim=1) == 1).all()
    if strategy.name == "attn_topk":
        received = net.attention(torch.from_numpy(samples())).mean(dim=1)
        assert torch.equal(acting.index, received.topk(3, dim=1).indices.sort(dim=1).values)


@torch.no_grad()
def test_keeping_all_tokens_is_the_network_itself(scripted):
    net, X = network(), torch.from_numpy(DATA.train.inputs)
    for strategy, rate in ((scripted(lambda view, keep: None), 0.5), (scripted(lambda view, keep: None), 1.0)):
        acting = begin(net, strategy, rate)
        assert torch.equal(net(X, acting), net(X)) and acting.steps == [Step(L, L)]


def test_the_gradient_is_that_of_the_kept_tokens(scripted):
    net, X = network(), torch.from_numpy(samples()).requires_grad_()
    net(X, begin(net, scripted(lambda view, keep: Keep(torch.arange(keep).expand(N, keep))))).sum().backward()
    assert (X.grad.abs().sum(dim=2) > 0).tolist() == [[True] * 3 + [False] * 4] * N
    assert {name for name, w in net.named_parameters() if float(w.grad.abs().sum()) > 0} == {"W_Q", "W_K", "W_V"}


@pytest.mark.parametrize("tokens", ["shared", "known"])
@torch.no_grad()
def test_a_strategy_sees_tokens_parts_and_attention(scripted, tokens):
    net, X = network(), torch.from_numpy(DATA.train.inputs)
    fields = ("tokens", "queries", "keys", "values", "attention", "received_attention", "pixels")
    seen = {}
    strategy = scripted(lambda view, keep: seen.update({f: getattr(view, f) for f in fields}), needs=fields)
    W_Q, W_K, W_V, _ = weights(net)
    known = None
    if tokens == "known":
        known = tuple(torch.from_numpy(2 * samples() @ W) for W in (W_Q, W_K))  # others than its own, to tell
    assert net.choose(begin(net, strategy), X, known) is None
    factor = 1 if known is None else 2
    for b, x in enumerate(samples()):
        Q, K, V = factor * x @ W_Q, factor * x @ W_K, x @ W_V
        exp = np.exp(Q @ K.T)
        received = (exp / exp.sum(axis=1, keepdims=True)).mean(axis=0)
        for field, expected in zip(fields[:6], (x, Q[None], K[None], V[None], received, received), strict=True):
            np.testing.assert_allclose(seen[field][b].numpy(), expected, rtol=1e-10)
    assert seen["pixels"] is None and net.attention_source == "received" and net.grid is None


def test_there_is_no_class_attention(scripted):
    with pytest.raises(UnsupportedError, match="needs class_attention"):
        net = network()
        net(look().inputs, begin(net, scripted(lambda view, keep: None, needs=("class_attention",))))


@pytest.mark.parametrize("plan", FUSING.values(), ids=FUSING)
def test_tokens_cannot_be_fused_merged_or_mixed(scripted, plan):
    net = network()
    with pytest.raises(UnsupportedError, match=r"theory of plain tokens.*kept or removed"):
        net(look().inputs, begin(net, scripted(plan)))


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


def test_a_repetition_has_its_own_first_weights_and_always_the_same_in_any_precision():
    first, again, double, other = network(), network(), network(precision="float32"), network(1)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]) and not torch.equal(value, other.state_dict()[name])
        assert value.dtype == torch.float64 and torch.equal(value, double.state_dict()[name].double())
    assert set(first.state_dict()) == {"W_Q", "W_K", "W_V", "w_O"}


def test_the_read_out_is_frozen_and_the_rest_is_trained():
    net = network()
    first = {name: value.clone() for name, value in net.state_dict().items()}
    assert {name for name, _ in net.named_parameters()} == {"W_Q", "W_K", "W_V"}
    recipe = TASK.model_copy(update={"steps": 5}).recipe()
    split = DATA.train
    tensors = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    train(Autograd(net, None, Samples(*tensors), recipe), N, recipe, ("order",))
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, first[name])}
    assert moved == {"W_Q", "W_K", "W_V"}


def test_four_classes_are_a_user_error():
    with pytest.raises(UserError, match=r"two_layer.*got 4; allowed: 2"):
        TwoLayer().build(replace(DATA, classes=("a", "b", "c", "d")), 0)


# ---- cost


def test_dense_macs_are_half_of_the_counted_operations():
    data = Overfitting(tokens=16, d=256, test=1).draw(2, 0, {})
    net = TwoLayer(d_h=128, d_v=64).build(data, 0)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        net(torch.from_numpy(data.train.inputs[:1]))
    counted = counter.get_total_flops() / 2 - net.W_V.numel() * ("aten.mv" in str(counter.get_flop_counts()))
    expected = 2 * 16 * 256 * 128 + 16 * 16 * 128 + 16 * 256 + 16
    assert net.cost.macs([Step(16, 16)]) == expected == pytest.approx(counted, rel=5e-3)


def test_macs_fall_with_the_tokens_and_scoring_by_attention_is_paid_for():
    net = TwoLayer(d_h=32, d_v=16).build(DATA, 0)
    by_count = [net.cost.macs(net.cost.steps(Traits("input", {"tokens"}), (0,), (n,))) for n in range(1, L + 1)]
    assert by_count == [2 * n * 24 * 32 + n * n * 32 + n * 25 for n in range(1, L + 1)] == sorted(set(by_count))
    for n, plain in zip(range(1, L + 1), by_count, strict=True):
        scored = net.cost.macs(net.cost.steps(Traits("attention", {"attention"}), (0,), (n,)))
        assert scored - plain == (0 if n == L else 2 * L * 24 * 32 + L * L * 32)


# ---- what it shows


@torch.no_grad()
def test_it_shows_the_loss_attention_values_and_scores_of_signal_and_strong_noise():
    net, found = network(), {name: [] for name in network().shows}
    W_Q, W_K, W_V, w_O = weights(net)
    for x, label, relevance in zip(samples(), DATA.train.labels, DATA.train.relevance, strict=True):
        y, signal = 2 * label - 1, int(relevance.argmax())
        noise = max((l for l in range(L) if l != signal), key=lambda l: np.linalg.norm(x[l]))
        rows = rows_of(net, x, range(L))
        found["train_loss_then"].append(math.log1p(math.exp(-y * formula(net, x, range(L)))))
        for what, s in (("relevant", signal), ("noise", noise)):
            found[f"attention_on_{what}"].append(np.mean([rows[l][s] for l in range(L)]))
        for what, s in (("signal", signal), ("noise", noise)):
            found[f"value_of_{what}"].append(y * (x[s] @ W_V @ w_O))
            found[f"score_of_{what}"].append(x[signal] @ W_Q @ W_K.T @ x[s])
    shown = net.observe(look(), look(DATA.test))
    assert list(shown) == list(net.shows)
    for name, values in found.items():
        assert shown[name] == pytest.approx(np.mean(values), rel=1e-9), name
    assert len({round(value, 6) for value in shown.values()}) == 7


@torch.no_grad()
def test_what_it_shows_is_of_the_training_samples_with_all_tokens_there():
    net = network()
    shown = net.observe(look(), look(DATA.test))
    assert net.observe(look(acting=begin(net, Random())), look(DATA.train)) == shown
    assert net.observe(look(DATA.test), look()) != shown
    assert net.trained_values({}, look()) == {}
