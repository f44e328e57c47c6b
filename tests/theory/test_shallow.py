import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from fusing import FUSING
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT, complete
from sparsebench_theory.shallow.task import Theory

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.cost import Step
from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.plans import Keep
from sparsebench.tasks.base import Data, Split
from sparsebench.training.loop import steps_for, train
from sparsebench.training.steps import Samples, losses, predictions

B, L, D, M = 3, 12, 8, 5
BASIS = np.linalg.qr(np.random.default_rng(5).standard_normal((D, D)))[0]
MU = BASIS[:, :M]


VARIANTS = [{}, {"heads": 3}, {"skip": True}, {"outputs": 2}, {"heads": 2, "skip": True, "outputs": 2}]


def network(sigma=0.1, delta=0.2, xi=0.5, init="assumption", *, m=16, seed=0, tokens=L, **variant):
    first = FirstWeights(sigma, delta, xi, init)
    return ShallowViT(np.random.default_rng(seed), MU, tokens, m=m, first=first, **variant)


def samples(seed=1):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((B, L, D)))


def begin(net, strategy, rate=0.5):
    return Actor(strategy, Budget(keep_rate=rate), net.cost, None, stream=3).begin(
        torch.arange(B), 0, None, tokens=net.cost.tokens, training=False
    )


def equation_1(net, x, S, repacked=False):
    """Return F of one (L, d) sample with the tokens in S, by loops in float64: a number for each output."""
    W_Q, W_K, W_V, W_O, a = (w.detach().numpy() for w in (net.W_Q, net.W_K, net.W_V, net.W_O, net.a))
    total = np.zeros(len(a))
    for place, l in enumerate(S):
        mixed = []
        for h in range(net.heads):
            scores = [x[i] @ W_K[h].T @ W_Q[h] @ x[l] for i in S]
            weights = [math.exp(score - max(scores)) for score in scores]
            v = sum(w * (W_V[h] @ x[i]) for w, i in zip(weights, S, strict=True)) / sum(weights)
            mixed += [*(v + x[l] if net.skip else v)]
        for o in range(len(a)):
            total[o] += a[o, place if repacked else l] @ np.maximum(W_O @ np.array(mixed), 0)
    return total / len(S) if len(a) > 1 else total[0] / len(S)


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_output_is_equation_1(variant):
    net, X = network(**variant).double(), samples()
    expected = [equation_1(net, x.numpy(), range(L)) for x in X]
    np.testing.assert_allclose(net(X).numpy(), expected, rtol=1e-12)
    assert np.abs(expected).min() > 1e-3
    assert net(X).shape == ((B, 2) if "outputs" in variant else (B,))
    assert net.plain == (variant == {})


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_keys_sum_and_share_go_over_the_kept_tokens_only(scripted, variant):
    net, X = network(**variant).double(), samples()
    kept = torch.tensor([[11, 0, 3, 7, 5, 2], [1, 2, 3, 4, 5, 6], [10, 9, 8, 2, 1, 0]])
    acting = begin(net, scripted(lambda view, keep: Keep(kept)))
    expected = [equation_1(net, x.numpy(), sorted(S)) for x, S in zip(X, kept.tolist(), strict=True)]
    np.testing.assert_allclose(net(X, acting).numpy(), expected, rtol=1e-12)
    assert acting.steps == [Step(L, 6, early=True)] == acting.actor.planned


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_repacked_tokens_are_read_out_at_the_first_positions(scripted, variant):
    net, X = network(**variant, repacked=True).double(), samples()
    kept = torch.tensor([[11, 0, 3, 7, 5, 2], [1, 2, 3, 4, 5, 6], [10, 9, 8, 2, 1, 0]])
    out = net(X, begin(net, scripted(lambda view, keep: Keep(kept))))
    S = [sorted(row) for row in kept.tolist()]
    expected = [equation_1(net, x.numpy(), s, repacked=True) for x, s in zip(X, S, strict=True)]
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-12)
    in_place = [equation_1(net, x.numpy(), s) for x, s in zip(X, S, strict=True)]
    assert np.abs(np.array(in_place) - expected).max(axis=0).min() > 1e-3
    assert torch.equal(net(X), network(**variant).double()(X))  # where all tokens stay


@torch.no_grad()
def test_a_choice_is_positions_in_order_or_none(scripted):
    net, X = network(), samples().float()
    kept = torch.tensor([[11, 0, 3, 7, 5, 2]] * B)
    assert torch.equal(net.choose(begin(net, scripted(lambda view, keep: Keep(kept))), X), kept.sort(dim=1).values)
    assert net.choose(begin(net, scripted(lambda view, keep: None)), X) is None
    assert net.choose(begin(net, scripted(lambda view, keep: Keep(kept)), rate=1.0), X) is None


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_in_another_order_each_position_is_read_out_by_its_own_vector(scripted, variant):
    net, X = network(**variant).double(), samples()
    kept = torch.tensor([[11, 0, 3, 7, 5, 2]] * B)
    actings = [begin(net, scripted(lambda view, keep, o=o: Keep(kept, ordered=o))) for o in (False, True)]
    out = [net(X, acting) for acting in actings]
    torch.testing.assert_close(*out, rtol=1e-12, atol=1e-12)
    assert actings[1].index.tolist() == kept.tolist() != actings[0].index.tolist()


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


@pytest.mark.parametrize("plan", FUSING.values(), ids=FUSING)
def test_tokens_with_read_outs_of_their_own_cannot_be_fused_merged_or_mixed(scripted, plan):
    net = network()
    with pytest.raises(UnsupportedError, match="kept or removed"):
        net(samples().float(), begin(net, scripted(plan)))


@pytest.mark.parametrize("heads", [1, 3])
@torch.no_grad()
def test_a_strategy_sees_tokens_parts_and_attention(scripted, heads):
    net, X = network(heads=heads).double(), samples()
    fields = ("tokens", "queries", "keys", "values", "attention", "received_attention", "pixels")
    seen = {}
    strategy = scripted(lambda view, keep: seen.update({f: getattr(view, f) for f in fields}), needs=fields)
    net(X, begin(net, strategy))
    for b, x in enumerate(X.numpy()):
        Q, K, V = (np.stack([x @ w.T for w in W.detach().numpy()]) for W in (net.W_Q, net.W_K, net.W_V))
        exp = np.exp(Q @ K.transpose(0, 2, 1))
        attention = exp / exp.sum(axis=2, keepdims=True)
        np.testing.assert_allclose(net.attention(X)[b].numpy(), attention, rtol=1e-10)
        received = attention.mean(axis=(0, 1))
        for field, expected in zip(fields[:6], (x, Q, K, V, received, received), strict=True):
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
    net = ShallowViT(np.random.default_rng(0), data.patterns, 50, m=8, first=FirstWeights(0.1, 0.2, 0.01))
    net.W_Q.copy_(0.5**0.5 * torch.eye(10))
    net.W_K.copy_(0.5**0.5 * torch.eye(10))
    attention = net.attention(torch.from_numpy(data.train.inputs))
    relevant = torch.from_numpy(data.train.relevance)
    assert float((attention * relevant[:, None, None]).sum(dim=3).mean()) == pytest.approx(0.540, abs=0.005)


def images(net, name, head=0):
    """Return (d, M), the images of the patterns under a head's matrix."""
    return getattr(net, name)[head].detach().numpy().astype(float) @ MU


@pytest.mark.parametrize("init", ["assumption", "scale", "worst"])
def test_the_value_matrix_errs_by_sigma_from_orthonormal_images_of_the_patterns(init):
    p, erring = (images(network(sigma=sigma, init=init), "W_V") for sigma in (0.0, 0.1))
    np.testing.assert_allclose(p.T @ p, np.eye(M), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(erring - p, axis=0), 0.1, rtol=1e-4)


@pytest.mark.parametrize("init", ["assumption", "scale", "worst"])
def test_queries_and_keys_begin_equal_and_err_by_delta(init):
    exact, erring = (network(delta=delta, init=init) for delta in (0.0, 0.2))
    r = images(exact, "W_Q")
    np.testing.assert_allclose(r.T @ r, np.eye(M), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(images(erring, "W_Q") - r, axis=0), 0.2, rtol=1e-4)
    assert torch.equal(erring.W_Q, erring.W_K)
    assert erring.W_Q.data_ptr() != erring.W_K.data_ptr()


def test_an_error_of_scale_shortens_all_images_and_leaves_the_scores_of_other_patterns_at_nought():
    net = network(sigma=0.3, delta=0.2, init="scale")
    V, Q = images(net, "W_V"), images(net, "W_Q")
    np.testing.assert_allclose(V.T @ V, 0.7**2 * np.eye(M), atol=1e-6)
    np.testing.assert_allclose(images(net, "W_K").T @ Q, 0.8**2 * np.eye(M), atol=1e-6)


@pytest.mark.parametrize(("outputs", "rivals"), [(1, [1, 0]), (2, [3, 2, 1, 0])])
def test_the_worst_error_points_from_each_discriminative_image_to_its_rivals(outputs, rivals):
    p, worst, usual = (
        images(network(sigma=sigma, init=init, outputs=outputs), "W_V")
        for sigma, init in ((0, "worst"), (0.1, "worst"), (0.1, "assumption"))
    )
    number = len(rivals)
    np.testing.assert_allclose(worst[:, :number], p[:, :number] + 0.1 * p[:, rivals], atol=1e-6)
    np.testing.assert_allclose(worst[:, number:], usual[:, number:], atol=1e-6)


def test_the_literal_weights_are_those_the_paper_prints():
    net = network(sigma=0.1, delta=0.2, init="literal")
    for W in (net.W_Q, net.W_K):
        np.testing.assert_allclose(W[0].detach().numpy(), 400 * np.eye(D), rtol=1e-6)
    W_V = net.W_V[0].detach().numpy()
    np.testing.assert_allclose(W_V.T @ W_V, 1e4 * np.eye(D), atol=1e-2)
    assert np.abs(W_V / 100 - np.eye(D)).max() > 0.1


def test_each_head_begins_on_its_own():
    net = network(heads=3)
    assert all(w.shape == (3, D, D) for w in (net.W_Q, net.W_K, net.W_V)) and net.W_O.shape == (16, 3 * D)
    for name, exact, error in (("W_V", {"sigma": 0}, 0.1), ("W_Q", {"delta": 0}, 0.2)):
        for head in range(3):
            away = images(net, name, head) - images(network(heads=3, **exact), name, head)
            np.testing.assert_allclose(np.linalg.norm(away, axis=0), error, rtol=1e-4)
            assert np.abs(images(net, name, head) - images(net, name, (head + 1) % 3)).max() > 0.05


def test_frozen_attention_is_not_trained_and_begins_like_a_trained_one_and_one_with_a_skip():
    data = Theory(tokens=10, relevant=0.3, confusion=0.1).draw(4, 0, {})
    frozen, trained = (Shallow(m=8, attention=how).build(data, 0) for how in ("frozen", "trained"))
    learns = {name for name, w in frozen.named_parameters() if w.requires_grad}
    assert learns == {"W_V", "W_O"} and all(w.requires_grad for w in trained.parameters())
    skipping, repacked = (Shallow(m=8, **{what: True}).build(data, 0) for what in ("skip", "repacked"))
    for name, first in trained.state_dict().items():
        assert all(torch.equal(first, other.state_dict()[name]) for other in (frozen, skipping, repacked))
    frozen(torch.from_numpy(data.train.inputs)).sum().backward()
    assert frozen.W_Q.grad is None and frozen.W_V.grad is not None


@pytest.mark.parametrize("outputs", [1, 2])
def test_output_weights_are_frozen_signs_of_their_own_at_each_position_and_output(outputs):
    net = network(m=64, xi=0.01, outputs=outputs)
    assert not net.a.requires_grad and net.a.shape == (outputs, L, 64)
    assert net.a.abs().unique().tolist() == [0.125]
    assert abs(float(net.a.mean())) < 0.02
    assert len({tuple(row.tolist()) for row in net.a.flatten(0, 1)}) == L * outputs
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


def test_four_classes_have_two_outputs_and_other_numbers_of_classes_are_a_user_error():
    for classes, outputs in ((2, 1), (4, 2)):
        data = Theory(tokens=10, d=6, classes=classes, relevant=0.3, confusion=0.1).draw(4, 0, {})
        assert Shallow(m=8).build(data, 0).a.shape == (outputs, 10, 8)
    with pytest.raises(UserError, match="got 3; allowed: 2 or 4"):
        Shallow().build(replace(data, classes=("a", "b", "c")), 0)


def test_the_parameters_of_the_model_reach_the_network():
    data = Theory(tokens=10, d=6, relevant=0.3, confusion=0.1).draw(4, 0, {})
    net = Shallow(m=8, init="literal", heads=2, skip=True, repacked=True).build(data, 0)
    assert (net.heads, net.skip, net.repacked, net.plain) == (2, True, True, False)
    torch.testing.assert_close(net.W_Q.detach(), 400 * torch.eye(6).expand(2, 6, 6))


TWO = Theory(tokens=20, relevant=0.4, confusion=0.1, test=50)
FOUR = Theory(tokens=20, classes=4, relevant=0.5, confusion=0.15, test=50)


@pytest.mark.parametrize(
    ("task", "changes"),
    [(TWO, {"heads": 2}), (TWO, {"skip": True}), (TWO, {"attention": "frozen"}), (TWO, {"init": "worst"}), (FOUR, {})],
)
def test_each_variant_learns(task, changes):
    data = task.draw(100, 0, {})
    net, recipe = Shallow(m=128, **changes).build(data, 0), task.recipe()
    before = net.W_Q.detach().clone()
    (inputs, labels), (fresh, truth) = (
        (torch.from_numpy(split.inputs), torch.from_numpy(split.labels)) for split in (data.train, data.test)
    )
    descent = torch.optim.SGD([w for w in net.parameters() if w.requires_grad], lr=1.0)
    for _ in range(200):
        descent.zero_grad()
        losses(recipe, net(inputs), labels).mean().backward()
        descent.step()
    with torch.no_grad():
        assert float(losses(recipe, net(fresh), truth).mean()) < 0.05
        assert (predictions(recipe, net(fresh)) == truth).float().mean() >= 0.98
    assert torch.equal(before, net.W_Q.detach()) == (changes == {"attention": "frozen"})


def test_in_double_precision_it_starts_from_the_same_weights_and_trains_on_the_same_samples():
    task = Theory(tokens=20, relevant=0.4, confusion=0.1, test=10, steps=6)
    data = task.draw(8, 0, {})
    outputs = {}
    for precision in ("float32", "float64"):
        network = Shallow(m=16, precision=precision).build(data, 0)
        samples = Samples(*(torch.from_numpy(x) for x in (data.train.inputs, data.train.labels, data.train.relevance)))
        steps = steps_for(network, None, samples, task.recipe())
        before = network.W_O.detach().clone()
        train(steps, 8, task.recipe(), ("order",))
        steps.store()
        outputs[precision] = before, network(torch.from_numpy(data.test.inputs)).detach()
    (one, F), (other, G) = outputs["float32"], outputs["float64"]
    assert torch.equal(one.double(), other) and G.dtype == torch.float64
    torch.testing.assert_close(F.double(), G, rtol=1e-3, atol=1e-5)
    assert not torch.equal(F.double(), G)


def test_a_network_of_one_layer_hints_at_no_other_site(scripted):
    net, X = network(), samples().float()
    with pytest.raises(
        UnsupportedError, match=r"needs class_attention, which this model cannot give .*\(it gives [a-z_, ]*\)$"
    ):
        net.choose(begin(net, scripted(lambda view, keep: None, needs=("class_attention",))), X)
