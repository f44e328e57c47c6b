"""The shallow network: first weights, values after training, and the quantities of the paper's theorems."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sparsebench_theory.models import PRUNED, Shallow
from sparsebench_theory.shallow import theorems as theory
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT, complete
from sparsebench_theory.shallow.task import Theory

from sparsebench.models.actor import SplitPass
from sparsebench.training.loop import Training
from sparsebench.training.steps import Autograd, Samples, losses, predictions

B, L, D, M = 3, 12, 8, 5
BASIS = np.linalg.qr(np.random.default_rng(5).standard_normal((D, D)))[0]
MU = BASIS[:, :M]


def network(sigma=0.1, delta=0.2, xi=0.5, init="assumption", *, m=16, seed=0, tokens=L, **variant):
    first = FirstWeights(sigma, delta, xi, init)
    return ShallowViT(np.random.default_rng(seed), MU, tokens, m=m, first=first, **variant)


def images(net, name, head=0):
    """Return (d, M), the images of the patterns under a head's matrix."""
    return getattr(net, name)[head].detach().numpy().astype(float) @ MU


@pytest.mark.parametrize("init", ["assumption", "scale", "worst"])
def test_the_value_matrix_errs_by_sigma(init):
    """The value matrix errs by sigma from orthonormal images of the patterns."""
    p, erring = (images(network(sigma=sigma, init=init), "W_V") for sigma in (0.0, 0.1))
    np.testing.assert_allclose(p.T @ p, np.eye(M), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(erring - p, axis=0), 0.1, rtol=1e-4)


@pytest.mark.parametrize("init", ["assumption", "scale", "worst"])
def test_queries_and_keys_err_by_delta(init):
    """Queries and keys begin equal and err by delta."""
    exact, erring = (network(delta=delta, init=init) for delta in (0.0, 0.2))
    r = images(exact, "W_Q")
    np.testing.assert_allclose(r.T @ r, np.eye(M), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(images(erring, "W_Q") - r, axis=0), 0.2, rtol=1e-4)
    assert torch.equal(erring.W_Q, erring.W_K)
    assert erring.W_Q.data_ptr() != erring.W_K.data_ptr()


def test_an_error_of_scale_shortens_all_images():
    """An error of scale shortens all images and leaves the scores of other patterns at nought."""
    net = network(sigma=0.3, delta=0.2, init="scale")
    V, Q = images(net, "W_V"), images(net, "W_Q")
    np.testing.assert_allclose(V.T @ V, 0.7**2 * np.eye(M), atol=1e-6)
    np.testing.assert_allclose(images(net, "W_K").T @ Q, 0.8**2 * np.eye(M), atol=1e-6)


@pytest.mark.parametrize(("outputs", "rivals"), [(1, [1, 0]), (2, [3, 2, 1, 0])])
def test_the_worst_error_points_to_rivals(outputs, rivals):
    """The worst error points from each discriminative image to its rivals."""
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


def test_frozen_attention_is_not_trained():
    """Frozen attention is not trained and begins like a trained one and one with a skip."""
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
def test_output_weights_are_frozen_signs(outputs):
    """Output weights are frozen signs of their own at each position and output."""
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


# ---- after training

PLAIN = Theory(tokens=12, d=6, relevant=0.4, confusion=0.1, batch=8, test=20, steps=30)
FOUR_CLASSES = Theory(tokens=12, d=6, classes=4, relevant=0.4, confusion=0.15, batch=8, test=20, steps=30)
CASES = [(PLAIN, {}), (PLAIN, {"heads": 2, "skip": True}), (FOUR_CLASSES, {})]
cases = pytest.mark.parametrize(("task", "shape"), CASES, ids=["plain", "heads", "four classes"])
NEURONS = 30


def trained(task, shape):
    """Return a trained network, its first weights, and its test."""
    data = task.draw(24, 0, {})
    net = Shallow(m=NEURONS, xi=0.3, **shape).build(data, 0)
    first = copy.deepcopy(net.state_dict())
    train_, test = (
        Samples(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)))
        for split in (data.train, data.test)
    )
    with torch.enable_grad():
        steps = Autograd(net, None, train_, task.recipe())
        Training(net, None, train_, task.recipe(), ("order",), steps=steps).run()
    return net, first, SplitPass(test.inputs, test.labels, test.relevance, None), data


@cases
@torch.no_grad()
def test_it_keeps_the_singular_values_of_what_training_added(task, shape):
    net, first, test, _ = trained(task, shape)
    trained_values = net.trained_values(first, test)
    for name in ("W_Q", "W_K", "W_V"):
        added = (getattr(net, name) - first[name]).numpy().astype(float)
        expected = np.linalg.svd(np.concatenate(list(added), axis=0), compute_uv=False)
        assert expected[0] > 1e-3 and len(expected) == 6
        np.testing.assert_allclose(trained_values[f"singular_{name}"], expected, rtol=1e-5, atol=1e-7 * expected[0])


@cases
@torch.no_grad()
def test_losses_equal_those_of_chosen_networks(task, shape):
    """It keeps the losses of networks built without the shortest and the longest rows."""
    net, first, test, data = trained(task, shape)
    trained_values = net.trained_values(first, test)
    assert set(trained_values) == {f"singular_{name}" for name in ("W_Q", "W_K", "W_V")} | {
        "loss_without_short", "loss_without_long",
    }  # fmt: skip
    norms = np.linalg.norm(net.W_O.numpy().astype(float), axis=1)
    result = {}
    for what, ranked in (("short", np.argsort(norms)), ("long", np.argsort(-norms))):
        for share, loss in zip(PRUNED, trained_values[f"loss_without_{what}"], strict=True):
            left = sorted(ranked[round(share * NEURONS) :])
            outputs = len(net.a)
            small = ShallowViT(
                np.random.default_rng(0), data.patterns, 12, m=len(left), first=FirstWeights(0, 0, 1), outputs=outputs,
                heads=net.heads, skip=net.skip,
            )  # fmt: skip
            for name in ("W_Q", "W_K", "W_V"):
                getattr(small, name).copy_(getattr(net, name))
            small.W_O.copy_(net.W_O[left])
            small.a.copy_(net.a[:, :, left])
            expected = float(losses(task.recipe(), small(test.inputs), test.labels).double().mean())
            assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
            result[what, share] = loss
    whole = float(losses(task.recipe(), net(test.inputs), test.labels).double().mean())
    assert result["short", 0.0] == result["long", 0.0] == pytest.approx(whole)
    assert len({round(value, 5) for value in result.values()}) > 12  # so removal matters here


@cases
@torch.no_grad()
def test_looking_changes_no_weight(task, shape):
    net, first, test, _ = trained(task, shape)
    before = copy.deepcopy(net.state_dict())
    trained_values = net.trained_values(first, test)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.trained_values(first, test) == trained_values


@torch.no_grad()
def test_frozen_attention_has_no_update():
    net, first, test, _ = trained(PLAIN, {"attention": "frozen"})
    trained_values = net.trained_values(first, test)
    assert (
        trained_values["singular_W_Q"] == trained_values["singular_W_K"] == (0.0,) * 6
        and trained_values["singular_W_V"][0] > 0
    )


# ---- theorems

FIGURE_4 = np.array([0.5, 0.05, 0.15, 0.15, 0.15])


@pytest.mark.parametrize("kap", [0.0, 0.5, 0.64, 1.0])
@pytest.mark.parametrize("shares", [{"relevant": 0.5, "confusion": 0.05}, {"irrelevant": 0.5, "relevant": 0.3}])
@torch.no_grad()
def test_the_first_attention_mass_is_that_of_a_network_on_noiseless_tokens(kap, shares):
    task = Theory(tokens=40, noise=0, **shares)
    data = task.draw(6, 0, {})
    rng = np.random.default_rng(0)
    net = ShallowViT(rng, data.patterns, 40, m=4, first=FirstWeights(0.1, 1 - kap**0.5, 0.01, "scale"))
    relevant = torch.from_numpy(data.train.relevance)[:, None, None]
    measured = (net.attention(torch.from_numpy(data.train.inputs)) * relevant).sum(dim=3).mean()
    assert theory.attention_mass(task.counts(), kap) == pytest.approx(float(measured), abs=1e-5)
    if kap == 0:
        assert float(measured) == pytest.approx(task.realised_shares()[0], abs=1e-5)


def test_attention_masses_sum_to_one():
    """The attention mass of any pattern may be asked for and all sum to one."""
    assert sum(theory.attention_mass(FIGURE_4, 0.7, k) for k in range(5)) == pytest.approx(1)
    assert theory.attention_mass(FIGURE_4, 0.7, 1) == theory.attention_mass(FIGURE_4[[1, 0, 2, 3, 4]], 0.7)


def test_attention_tends_to_one_with_smaller_steps():
    assert theory.attention_limit(0.1) == pytest.approx(0.9)
    np.testing.assert_allclose(theory.attention_limit(np.array([0.5, 0.1]), C=2), [0.75, 0.99])


def test_the_formulas_of_the_theorems():
    sigma, tau, delta = 0.1, 0.05, 0.2
    assert theory.neurons_needed(math.e**2, 5, 0.1) == pytest.approx(5000)
    assert theory.relevant_needed(0.04, sigma, tau, delta) == pytest.approx(0.04 / (0.5 * math.exp(-0.25) * 0.85))
    assert theory.relevant_needed(0.04, sigma, tau, delta, eps_S=0.25) == pytest.approx(0.16 / (math.exp(-0.25) * 0.85))
    assert theory.batch_needed(0.5, sigma, tau, delta) == pytest.approx((0.5 - math.exp(-0.25) * 0.15) ** -2)
    assert theory.samples_needed(0.5, sigma, tau) == pytest.approx(0.35**-2)
    assert theory.samples_needed(0.5, sigma, tau, zeta=0.9, c1=2, c2=0.5) == pytest.approx(0.225**-2)
    assert theory.samples_needed_frozen(0.5, sigma, tau) == pytest.approx((0.5 * 0.35) ** -2)
    assert theory.steps_needed(0.5, 2, 5, sigma, tau, 0.1) == pytest.approx(1 / (0.9 - 0.75 / math.pi))
    assert theory.lucky_bound(1000, 5, sigma, tau, 0.1) == pytest.approx(200 * (0.9 - 0.75 / math.pi))


@given(st.floats(0.3, 0.9), st.floats(1.01, 1.5))
def test_without_errors_the_bounds_grow_as_in_the_paper(alpha, factor):
    """Without errors the bounds grow with the powers that the paper names."""

    def growth(bound, *others):
        return float(bound(alpha / factor, *others) / bound(alpha, *others))

    assert growth(theory.samples_needed, 0, 0) == pytest.approx(factor**2)
    assert growth(theory.batch_needed, 0, 0, 0.2) == pytest.approx(factor**2)
    assert growth(theory.samples_needed_frozen, 0, 0) == pytest.approx(factor**4)
    assert growth(theory.steps_needed, 1, 5, 0.1, 0.05) == pytest.approx(factor)


def test_where_a_condition_fails_there_is_no_bound():
    alphas = np.array([0.1, 0.15, 0.5])
    for bound in (
        theory.samples_needed(alphas, 0.1, 0.05),
        theory.samples_needed_frozen(alphas, 0.1, 0.05),
        theory.batch_needed(alphas, 0.1, 0.05, -0.05),
    ):
        assert bound[0] == np.inf and np.isfinite(bound[2])
    assert theory.relevant_needed(0.1, 0.7, 0.4, 0) == np.inf
    assert theory.steps_needed(0.5, 1, 20, 0.1, 0.1) == np.inf
    assert theory.lucky_bound(1000, 20, 0.1, 0.1) == 0


def test_lucky_neurons_are_those_within_the_angle():
    angles = np.array([0, 0.1, 0.149, 0.151, 1, math.pi / 2, math.pi, -0.1])
    W_O = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.arange(1, 9)[:, None]
    expected = [True, True, True, False, False, False, False, True]
    assert theory.lucky_neurons(W_O, np.array([3.0, 0.0]), 0.1, 0.05).tolist() == expected
    assert theory.lucky_neurons(W_O, np.array([0.0, 1.0]), 0.1, 0.05).tolist() == [False] * 5 + [True] + [False] * 2
