import copy

import numpy as np
import pytest
import torch
from sparsebench_theory.models import PRUNED, Shallow
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT
from sparsebench_theory.shallow.task import Theory

from sparsebench.models.shown import SplitPass
from sparsebench.training.loop import train
from sparsebench.training.steps import Autograd, Samples, losses

TASK = Theory(tokens=12, d=6, relevant=0.4, confusion=0.1, batch=8, test=20, steps=30)
FOUR = Theory(tokens=12, d=6, classes=4, relevant=0.4, confusion=0.15, batch=8, test=20, steps=30)
CASES = [(TASK, {}), (TASK, {"heads": 2, "skip": True}), (FOUR, {})]
cases = pytest.mark.parametrize(("task", "shape"), CASES, ids=["plain", "heads", "four classes"])
M = 30


def trained(task, shape):
    """Return a trained network, its first weights, and its test."""
    data = task.draw(24, 0, {})
    net = Shallow(m=M, xi=0.3, **shape).build(data, 0)
    first = copy.deepcopy(net.state_dict())
    train_, test = (
        Samples(*(torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance)))
        for split in (data.train, data.test)
    )
    with torch.enable_grad():
        train(Autograd(net, None, train_, task.recipe()), 24, task.recipe(), ("order",))
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
def test_it_keeps_the_losses_of_networks_built_without_the_shortest_and_the_longest_rows(task, shape):
    net, first, test, data = trained(task, shape)
    trained_values = net.trained_values(first, test)
    assert set(trained_values) == {f"singular_{name}" for name in ("W_Q", "W_K", "W_V")} | {
        "loss_without_short", "loss_without_long",
    }  # fmt: skip
    norms = np.linalg.norm(net.W_O.numpy().astype(float), axis=1)
    found = {}
    for what, ranked in (("short", np.argsort(norms)), ("long", np.argsort(-norms))):
        for share, loss in zip(PRUNED, trained_values[f"loss_without_{what}"], strict=True):
            left = sorted(ranked[round(share * M) :])
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
            found[what, share] = loss
    whole = float(losses(task.recipe(), net(test.inputs), test.labels).double().mean())
    assert found["short", 0.0] == found["long", 0.0] == pytest.approx(whole)
    assert len({round(value, 5) for value in found.values()}) > 12  # that is, removal matters here


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
    net, first, test, _ = trained(TASK, {"attention": "frozen"})
    trained_values = net.trained_values(first, test)
    assert (
        trained_values["singular_W_Q"] == trained_values["singular_W_K"] == (0.0,) * 6
        and trained_values["singular_W_V"][0] > 0
    )
