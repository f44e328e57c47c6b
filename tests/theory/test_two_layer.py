import math

import numpy as np
import pytest
import torch
from sparsebench_plugins.random import Random
from sparsebench_theory.models import TwoLayer
from sparsebench_theory.overfitting.task import Overfitting

from sparsebench.models.actor import Actor
from sparsebench.models.shown import SplitPass
from sparsebench.strategy.budget import Budget
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


def weights(net):
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
    net = network()
    first = {name: value.clone() for name, value in net.state_dict().items()}
    assert {name for name, _ in net.named_parameters()} == {"W_Q", "W_K", "W_V"}
    recipe = TASK.model_copy(update={"steps": 5}).recipe()
    split = DATA.train
    tensors = (torch.from_numpy(x) for x in (split.inputs, split.labels, split.relevance))
    train(Autograd(net, None, Samples(*tensors), recipe), N, recipe, ("order",))
    moved = {name for name, value in net.state_dict().items() if not torch.equal(value, first[name])}
    assert moved == {"W_Q", "W_K", "W_V"}


# ---- what it shows


@torch.no_grad()
def test_it_shows_the_loss_attention_values_and_scores_of_signal_and_strong_noise():
    net, found = network(), {name: [] for name in network().shows}
    W_Q, W_K, W_V, w_O = weights(net)
    for x, label, relevance in zip(
        DATA.train.inputs.astype(float), DATA.train.labels, DATA.train.relevance, strict=True
    ):
        y, signal = 2 * label - 1, int(relevance.argmax())
        noise = max((l for l in range(L) if l != signal), key=lambda l: np.linalg.norm(x[l]))
        scores, values = x @ W_Q @ W_K.T @ x.T, x @ W_V @ w_O
        attention = (np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)).mean(axis=0)
        found["train_loss_then"].append(math.log1p(math.exp(-y * attention @ values)))
        for what, name, s in (("relevant", "signal", signal), ("noise", "noise", noise)):
            found[f"attention_on_{what}"].append(attention[s])
            found[f"value_of_{name}"].append(y * values[s])
            found[f"score_of_{name}"].append(scores[signal, s])
    shown = net.observe(look(), look(DATA.test))
    assert list(shown) == list(net.shows)
    for name, values in found.items():
        assert shown[name] == pytest.approx(np.mean(values), rel=1e-9), name
    assert len({round(value, 6) for value in shown.values()}) == 7


@torch.no_grad()
def test_what_it_shows_is_of_the_training_samples_with_all_tokens_there():
    net = network()
    shown = net.observe(look(), look(DATA.test))
    actor = Actor(Random(), Budget(keep_rate=0.5), net.cost, None, stream=3)
    acting = actor.begin(torch.arange(N), 0, look().relevance, tokens=L, training=False)
    assert net.observe(look(acting=acting), look(DATA.train)) == shown
    assert net.observe(look(DATA.test), look()) != shown
    assert net.trained_values({}, look()) == {}
