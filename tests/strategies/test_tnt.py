"""TNT against plain loops in float64, written from its equations: relevance, noise, and what is redundant."""

import math

import numpy as np
import pytest
import torch
from merging import place
from sparsebench_plugins.tnt import TNT
from tiny import B, N, act, chosen, images, vit

from sparsebench.budget import Budget
from sparsebench.measure.cost import Step
from sparsebench.models.acting import Actor
from sparsebench.testing.networks import build
from sparsebench.training.steps import Autograd, Samples


class Watched(TNT):
    """Remembers what it saw and said."""

    def plan(self, view, keep):
        plan = super().plan(view, keep)
        view.memory.setdefault("seen", []).append((view.tokens.detach(), view.learned, view.random(), keep, plan))
        return plan


def start(strategy, network, rows=slice(None), visit=0, stream=5):
    """Return a pass in training."""
    actor = Actor(strategy, Budget(keep_rate=0.5), network.cost, network.grid, stream=stream)
    return actor.begin(torch.arange(B)[rows], visit, None, tokens=N, training=True)


def alphas(x, g):
    """Return N numbers, the relevance of one sample's tokens (N, C), in float64."""
    norm, line = g
    a, c, w = (p.detach().double().tolist() for p in (norm.weight, norm.bias, line.weight[0]))
    told = []
    for row in x.double().tolist():
        mean = sum(row) / len(row)
        std = math.sqrt(sum((value - mean) ** 2 for value in row) / len(row) + norm.eps)
        normed = [a[i] * (value - mean) / std + c[i] for i, value in enumerate(row)]
        told.append(sum(w[i] * value for i, value in enumerate(normed)) + float(line.bias.detach()))
    most = max(told)
    return [math.exp(t - most) / sum(math.exp(s - most) for s in told) for t in told]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


def kept_by_hand(x, alpha, drawn, keep, b):
    """Return the positions that stay of one sample's tokens (N, C)."""
    best, x = chosen(alpha, keep + b), x.double().tolist()
    shuffled = sorted(best, key=lambda i: float(drawn[i]))
    first, second = shuffled[: len(best) // 2], shuffled[len(best) // 2 :]
    like = {i: max(cosine(x[i], x[j]) for j in second) for i in first}
    gone = sorted(first, key=lambda i: -like[i])[:b]
    return sorted(set(best) - set(gone))


@pytest.mark.parametrize("redundant", [0.0, 25 / 196, 0.3])
@pytest.mark.parametrize("rate", [0.7, 0.4])
def test_relevance_and_what_stays_are_those_of_plain_loops(redundant, rate):
    acting, _ = act(Watched(redundant=redundant), vit(), images(), rate=rate)
    seen = acting.memory["seen"]
    assert len(seen) == 3
    for x, g, drawn, keep, plan in seen:
        tokens = x.shape[1]
        b = min(round(redundant * tokens), tokens - keep, keep)
        for i in range(B):
            alpha = alphas(x[i], g)
            np.testing.assert_allclose(plan.scores[i], alpha, atol=1e-5)
            assert sorted(plan.index[i].tolist()) == kept_by_hand(x[i], alpha, drawn[i], keep, b)


def test_of_two_alike_the_one_in_the_first_half_leaves():
    rng = torch.Generator().manual_seed(3)
    for drawn_first in (0, 1):
        drawn = torch.tensor([[0.1, 0.2, 0.8, 0.9]])
        x = torch.randn(1, 4, 32, generator=rng)
        x[0, 3] = 2 * x[0, drawn_first]
        kept = TNT()._without_redundant(x, torch.arange(4)[None], drawn, 1)
        assert sorted(kept[0].tolist()) == sorted({0, 1, 2, 3} - {drawn_first})


@pytest.mark.parametrize("rate", [1 / N, 0.3, 1 - 1 / N])
def test_as_many_stay_as_the_budget_says(rate):
    for redundant in (0.0, 0.5, 1.0):
        acting, _ = act(TNT(redundant=redundant), vit(), images(), rate=rate)
        assert [step.tokens_out for step in acting.steps] == [step.tokens_out for step in acting.actor.planned]


def test_in_training_all_stay_and_get_the_more_noise_the_less_they_matter():
    network = vit()
    acting = start(Watched(noise=0.02), network)
    network(images(), acting)
    assert acting.index.shape == (B, N) and all(step == Step(N, N, own=step.own) for step in acting.steps)
    drawn = []
    for x, g, _, _, plan in acting.memory["seen"]:
        alpha = torch.tensor([alphas(x[i], g) for i in range(B)])
        drawn.append((plan.by.detach() / 0.02 / (1 - alpha)[:, :, None]).numpy())
    e = np.stack(drawn)  # 3 stages, B, N, C: 6144 numbers
    assert abs(e.mean()) < 0.04 and abs(e.std() - 1) < 0.03 and abs((e**4).mean() - 3) < 0.4
    rows = e.reshape(-1, e.shape[-1])
    correlated = np.corrcoef(rows, rowvar=False) - np.eye(e.shape[-1])
    assert np.abs(correlated).max() < 5 / math.sqrt(len(rows))
    flat = e.reshape(3 * B, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(3 * B)).max() < 5 / math.sqrt(flat.shape[1])


def noises(visit, rows=slice(None), stream=5):
    network = vit()
    acting = start(Watched(), network, rows, visit, stream)
    network(images()[rows], acting)
    return acting.memory["seen"][0][4].by.detach()


def test_noise_is_the_samples_own_and_new_at_each_visit():
    together = noises(1)
    torch.testing.assert_close(noises(1, slice(2, 3))[0], together[2], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(noises(2), together) and not torch.allclose(noises(1, stream=6), together)


def head_gradients(noise):
    case = build("class token")
    actor = Actor(TNT(noise=noise), Budget(keep_rate=0.5), case.network.cost, case.network.grid, stream=5)
    steps = Autograd(case.network, actor, Samples(case.inputs, case.labels, None), case.recipe)
    steps._gradients(torch.arange(4), 0)
    return [float(p.grad.abs().max()) for g in actor.learned.values() for p in (g[1].weight, g[0].weight)]


def test_the_noise_is_all_that_relevance_is_learned_from():
    assert min(head_gradients(0.02)) > 1e-9
    assert max(head_gradients(0.0)) == 0


@pytest.mark.parametrize(("tokens", "keep", "b"), [(196, 118, 25), (196, 196, 0), (16, 1, 1), (16, 15, 1), (10, 3, 1)])
def test_its_own_products_are_counted(tokens, keep, b):
    chosen = keep + b
    half = chosen // 2
    pairs = half * (chosen - half) if b else 0
    assert TNT().own_macs(place(tokens, keep, 384)) == 384 * (tokens + pairs)
