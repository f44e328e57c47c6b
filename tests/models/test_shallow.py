import math

import numpy as np
import pytest
import torch

from sparsebench.budget import Budget
from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import Step
from sparsebench.models.acting import Actor
from sparsebench.models.base import Shallow
from sparsebench.models.shallow import ShallowViT, complete
from sparsebench.strategy import Keep, Merge, Mix
from sparsebench.tasks.base import Data, Split
from sparsebench.tasks.theory import Theory

B, L, D, M = 3, 12, 8, 5
BASIS = np.linalg.qr(np.random.default_rng(5).standard_normal((D, D)))[0]
MU = BASIS[:, :M]


def network(sigma=0.1, delta=0.2, xi=0.5, m=16, seed=0, tokens=L):
    return ShallowViT(np.random.default_rng(seed), MU, tokens, m=m, sigma=sigma, delta=delta, xi=xi)


def samples(seed=1):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((B, L, D)))


def begin(net, strategy, rate=0.5):
    return Actor(strategy, Budget(keep_rate=rate), net.cost, None, stream=3).begin(
        torch.arange(B), 0, None, tokens=net.cost.tokens, training=False
    )


def equation_1(net, x, S):
    """Return F of one (L, d) sample with the tokens in S, by loops in float64."""
    W_Q, W_K, W_V, W_O, a = (w.detach().numpy() for w in (net.W_Q, net.W_K, net.W_V, net.W_O, net.a))
    total = 0.0
    for l in S:  # noqa: E741
        scores = [x[i] @ W_K.T @ W_Q @ x[l] for i in S]
        weights = [math.exp(score - max(scores)) for score in scores]
        v = sum(w * (W_V @ x[i]) for w, i in zip(weights, S, strict=True)) / sum(weights)
        total += a[l] @ np.maximum(W_O @ v, 0)
    return total / len(S)


@torch.no_grad()
def test_the_output_is_equation_1():
    net, X = network().double(), samples()
    expected = [equation_1(net, x.numpy(), range(L)) for x in X]
    np.testing.assert_allclose(net(X).numpy(), expected, rtol=1e-12)
    assert min(map(abs, expected)) > 1e-3


@torch.no_grad()
def test_keys_sum_and_share_go_over_the_kept_tokens_only(scripted):
    net, X = network().double(), samples()
    kept = torch.tensor([[11, 0, 3, 7, 5, 2], [1, 2, 3, 4, 5, 6], [10, 9, 8, 2, 1, 0]])
    acting = begin(net, scripted(lambda view, keep: Keep(kept)))
    expected = [equation_1(net, x.numpy(), sorted(S)) for x, S in zip(X, kept.tolist(), strict=True)]
    np.testing.assert_allclose(net(X, acting).numpy(), expected, rtol=1e-12)
    assert acting.steps == [Step(L, 6, early=True)] == acting.actor.planned


@torch.no_grad()
def test_a_removed_token_is_no_key_and_no_query_and_is_not_read_out(scripted):
    net, X = network().double(), samples()
    strategy = scripted(lambda view, keep: Keep(torch.arange(keep).expand(B, keep)))
    out = net(X, begin(net, strategy))
    changed = X.clone()
    changed[:, 6:] = 1e3
    assert torch.equal(net(changed, begin(net, strategy)), out)
    changed[:, 5] = 1e3
    assert not torch.allclose(net(changed, begin(net, strategy)), out)


@torch.no_grad()
def test_keeping_all_tokens_is_the_network_itself(scripted):
    net, X = network(), samples().float()
    acting = begin(net, scripted(lambda view, keep: None))
    assert torch.equal(net(X, acting), net(X))
    assert acting.steps == [Step(L, L)]
    assert torch.equal(net(X, begin(net, scripted(lambda view, keep: Keep(view.index)), rate=1.0)), net(X))


def test_the_gradient_is_that_of_the_kept_tokens(scripted):
    net, X = network().double(), samples().requires_grad_()
    acting = begin(net, scripted(lambda view, keep: Keep(torch.arange(keep).expand(B, keep))))
    net(X, acting).sum().backward()
    assert (X.grad.abs().sum(dim=2) > 0).tolist() == [[True] * 6 + [False] * 6] * B
    assert all(float(w.grad.abs().sum()) > 0 for w in net.parameters())
    assert {name for name, _ in net.named_parameters()} == {"W_Q", "W_K", "W_V", "W_O"}


@pytest.mark.parametrize(
    "plan",
    [
        lambda keep: Merge(torch.arange(L).expand(B, L) % keep),
        lambda keep: Mix(torch.rand(B, keep, L)),
        lambda keep: Keep(torch.arange(keep - 1).expand(B, keep - 1), fuse=torch.rand(B, L)),
    ],
    ids=["merge", "mix", "fuse"],
)
def test_tokens_with_read_outs_of_their_own_cannot_be_fused_merged_or_mixed(scripted, plan):
    net = network()
    with pytest.raises(UnsupportedError, match="kept or removed"):
        net(samples().float(), begin(net, scripted(lambda view, keep: plan(keep))))


@torch.no_grad()
def test_a_strategy_sees_tokens_parts_and_attention(scripted):
    net, X = network().double(), samples()
    fields = ("tokens", "queries", "keys", "values", "attention", "received_attention", "pixels")
    seen = {}
    strategy = scripted(lambda view, keep: seen.update({f: getattr(view, f) for f in fields}), needs=fields)
    net(X, begin(net, strategy))
    for b, x in enumerate(X.numpy()):
        Q, K, V = (x @ w.detach().numpy().T for w in (net.W_Q, net.W_K, net.W_V))
        exp = np.exp(Q @ K.T)
        received = (exp / exp.sum(axis=1, keepdims=True)).mean(axis=0)
        for field, expected in zip(fields[:6], (x, [Q], [K], [V], received, received), strict=True):
            np.testing.assert_allclose(seen[field][b].numpy(), expected, rtol=1e-10)
    assert seen["pixels"] is None and net.attention_source == "received" and net.grid is None


def test_there_is_no_class_attention(scripted):
    net = network()
    with pytest.raises(UnsupportedError, match="needs class_attention"):
        net(samples().float(), begin(net, scripted(lambda view, keep: None, needs=("class_attention",))))


@torch.no_grad()
def test_the_first_attention_mass_on_relevant_tokens_is_that_of_the_closed_form():
    task = Theory(tokens=50, d=10, patterns=5, relevant=0.5, confusion=0.05, noise=0.01)
    data = task.draw(20, 0, {})
    net = ShallowViT(np.random.default_rng(0), data.patterns, 50, m=8, sigma=0.1, delta=0.2, xi=0.01)
    net.W_Q.copy_(0.5**0.5 * torch.eye(10))
    net.W_K.copy_(0.5**0.5 * torch.eye(10))
    attention = net._attention(torch.from_numpy(data.train.inputs))
    relevant = torch.from_numpy(data.train.relevance)
    assert float((attention * relevant[:, None]).sum(dim=2).mean()) == pytest.approx(0.540, abs=0.005)


def test_the_value_matrix_errs_by_sigma_from_orthonormal_images_of_the_patterns():
    exact, erring = (network(sigma=sigma).W_V.detach().numpy() for sigma in (0.0, 0.1))
    p = exact @ MU
    np.testing.assert_allclose(p.T @ p, np.eye(M), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(erring @ MU - p, axis=0), 0.1, rtol=1e-4)


def test_queries_and_keys_begin_equal_and_err_by_delta():
    exact, erring = (network(delta=delta) for delta in (0.0, 0.2))
    r = exact.W_Q.detach().numpy() @ MU
    np.testing.assert_allclose(r.T @ r, np.eye(M), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(erring.W_Q.detach().numpy() @ MU - r, axis=0), 0.2, rtol=1e-4)
    assert torch.equal(erring.W_Q, erring.W_K)
    assert erring.W_Q.data_ptr() != erring.W_K.data_ptr()


def test_output_weights_are_frozen_signs_of_their_own_at_each_position():
    net = network(m=64, xi=0.01)
    assert not net.a.requires_grad and net.a.shape == (L, 64)
    assert net.a.abs().unique().tolist() == [0.125]
    assert abs(float(net.a.mean())) < 0.02 and len({tuple(row.tolist()) for row in net.a}) == L
    assert float(net.W_O.detach().std()) == pytest.approx(0.01, rel=0.1)


def test_a_basis_is_completed_and_not_changed():
    q = complete(np.random.default_rng(0), MU)
    np.testing.assert_allclose(q[:, :M], MU, atol=1e-12)
    np.testing.assert_allclose(q.T @ q, np.eye(D), atol=1e-12)
    np.testing.assert_allclose(complete(np.random.default_rng(0), BASIS), BASIS, atol=1e-12)


def test_a_repetition_has_its_own_first_weights_and_always_the_same():
    data = Theory(tokens=10, relevant=0.3, confusion=0.1).draw(4, 0, {})
    first, again, other = (Shallow(m=8).build(data, repetition) for repetition in (0, 0, 1))
    for a, b, c in zip(
        first.state_dict().values(), again.state_dict().values(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_task_without_patterns_is_a_user_error():
    split = Split(np.zeros((2, 3, 4), np.float32), np.zeros(2), np.zeros(2), np.zeros((2, 3)))
    with pytest.raises(UserError, match="patterns"):
        Shallow().build(Data(split, split, ("a", "b")), 0)
