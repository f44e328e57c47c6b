import numpy as np
import pytest
import torch
from sparsebench_theory.models import Shallow
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT, complete
from sparsebench_theory.shallow.task import Theory

from sparsebench.training.loop import steps_for, train
from sparsebench.training.steps import Samples, losses, predictions

B, L, D, M = 3, 12, 8, 5
BASIS = np.linalg.qr(np.random.default_rng(5).standard_normal((D, D)))[0]
MU = BASIS[:, :M]


VARIANTS = [{}, {"heads": 3}, {"skip": True}, {"outputs": 2}, {"heads": 2, "skip": True, "outputs": 2}]


def network(sigma=0.1, delta=0.2, xi=0.5, init="assumption", *, m=16, seed=0, tokens=L, **variant):
    first = FirstWeights(sigma, delta, xi, init)
    return ShallowViT(np.random.default_rng(seed), MU, tokens, m=m, first=first, **variant)


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
