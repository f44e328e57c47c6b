"""DynamicViT against loops over its equations in float64, in training and in the test."""

import math

import pytest
import torch
from merging import place
from sparsebench_plugins.dynamic_vit import DynamicViT
from tiny import B, N, act, images, vit

from sparsebench.budget import Budget
from sparsebench.models.acting import Actor
from sparsebench.strategy import Lesson, Told

PLACE = place(N, 8, 8)


@pytest.fixture(scope="module")
def network():
    return vit()


def gelu(x):
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def linear(layer, x):
    rows = zip(layer.weight.double().tolist(), layer.bias.double().tolist(), strict=True)
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in rows]


def log_probabilities(module, tokens, D):
    """Return (keep, drop) log-probabilities of each of the tokens, lists of C numbers, by the layers' equations."""
    norm, project = module["own"][0], module["own"][1]
    z = []
    for x in tokens:
        mean = sum(x) / len(x)
        var = sum((v - mean) ** 2 for v in x) / len(x)
        normed = [
            (v - mean) / math.sqrt(var + norm.eps) * w + b
            for v, w, b in zip(x, norm.weight.tolist(), norm.bias.tolist(), strict=True)
        ]
        z.append([gelu(v) for v in linear(project, normed)])
    half = len(tokens[0]) // 2
    common = [sum(d * row[half + c] for d, row in zip(D, z, strict=True)) / sum(D) for c in range(half)]
    out = []
    for row in z:
        first, _, second, _, third = module["both"]
        h = [gelu(v) for v in linear(first, row[:half] + common)]
        keep, drop = linear(third, [gelu(v) for v in linear(second, h)])
        total = math.log(math.exp(keep) + math.exp(drop))
        out.append((keep - total, drop - total))
    return out


def noted(strategy):
    """Return the strategy's class with each plan and view noted."""

    class Noted(type(strategy)):
        def plan(self, view, keep):
            plan = super().plan(view, keep)
            seen.append((view, view.tokens.detach(), plan))
            return plan

    seen: list = []
    return Noted(), seen


def test_in_the_test_the_most_probable_stay(network):
    strategy, seen = noted(DynamicViT())
    acting, _ = act(strategy, network, images())
    for view, tokens, plan in seen:
        for b in range(B):
            expected = log_probabilities(view.learned, tokens[b].double().tolist(), [1.0] * tokens.shape[1])
            assert plan.scores[b].tolist() == pytest.approx([keep for keep, _ in expected], abs=1e-5)
            K = plan.index.shape[1]
            assert set(plan.index[b].tolist()) == set(sorted(range(len(expected)), key=lambda i: -expected[i][0])[:K])
    assert [plan.index.shape[1] for _, _, plan in seen] == [8, 4, 2] and acting.index.shape == (B, 2)


def test_in_training_a_hard_gumbel_softmax_draws_what_stays_and_nothing_comes_back(network):
    strategy, seen = noted(DynamicViT())
    actor = Actor(strategy, Budget(keep_rate=0.5), network.cost, network.grid, stream=5)
    acting = actor.begin(torch.arange(B), 0, None, tokens=N, training=True)
    with torch.no_grad():
        network(images(), acting)
    before = torch.ones(B, N)
    for view, tokens, plan in seen:
        for b in range(B):
            pairs = log_probabilities(view.learned, tokens[b].double().tolist(), before[b].tolist())
            for i, (keep, drop) in enumerate(pairs):
                g = [-math.log(-math.log(float(view.random(draw)[b, i]))) for draw in (0, 1)]
                assert float(plan.keep[b, i]) == pytest.approx(float(keep + g[0] > drop + g[1]), abs=1e-6)
        before = before * plan.keep.detach()
        torch.testing.assert_close(acting.memory["kept"][view.block].detach(), before)
    assert torch.allclose(acting.weights.detach(), before) and 0 < float(before.mean()) < 1


def test_gradients_of_the_losses_reach_every_layer_of_every_predictor(network):
    actor = Actor(DynamicViT(), Budget(keep_rate=0.5), network.cost, network.grid, stream=5)
    acting = actor.begin(torch.arange(B), 0, None, tokens=N, training=True)
    network(images(), acting).square().mean().backward()
    by_task = [p.grad.clone() for module in actor.learned.values() for p in module.parameters()]
    assert len(actor.learned) == 3 and all(bool(g.any()) and bool(g.isfinite().all()) for g in by_task)
    again = actor.begin(torch.arange(B), 0, None, tokens=N, training=True)
    for module in actor.learned.values():
        module.zero_grad()
    network(images(), again)
    again.loss().backward()
    assert all(bool(p.grad.any()) for module in actor.learned.values() for p in module.parameters())
    network.module.zero_grad()


def test_the_loss_is_the_sum_of_its_terms():
    rng = torch.Generator().manual_seed(0)
    D1 = (torch.rand(B, N, generator=rng) > 0.4).double()
    D2 = D1 * (torch.rand(B, N, generator=rng) > 0.4)
    student, teacher = (
        Told(torch.randn(B, 5, generator=rng).double(), torch.randn(B, N, 6, generator=rng).double()) for _ in range(2)
    )
    shares = {1: 0.5, 2: 0.25}
    memory = {"kept": {1: D1, 2: D2}}
    strategy = DynamicViT(ratio=2, kl=0.5, distillation=0.25)
    alone = float(strategy.loss(Lesson(student, None, memory, D2, shares, 0.6, sum)))
    ratio = sum(
        sum((sum(D[b].tolist()) / N - shares[s]) ** 2 for b in range(B)) / B for s, D in memory["kept"].items()
    ) / len(shares)
    assert alone == pytest.approx(2 * ratio)
    divergence = 0.0
    for b in range(B):
        p, q = (told.logits[b].softmax(0).tolist() for told in (student, teacher))
        divergence += sum(x * math.log(x / y) for x, y in zip(p, q, strict=True)) / B
    away = sum(
        float(D2[b, i]) * sum((x - y) ** 2 for x, y in zip(student.tokens[b, i], teacher.tokens[b, i], strict=True)) / 6
        for b in range(B)
        for i in range(N)
    ) / float(D2.sum())
    taught = float(strategy.loss(Lesson(student, teacher, memory, D2, shares, 0.6, sum)))
    assert taught == pytest.approx(2 * ratio + 0.5 * divergence + 0.25 * float(away))


def test_its_own_macs_are_those_of_its_layers():
    seen = []
    module = DynamicViT().module(PLACE)
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(
                lambda m, args, out: seen.append(args[0].shape[:-1].numel() * m.in_features * m.out_features)
            )
    x = torch.randn(1, N, 8)
    z = module["own"](x)
    module["both"](z)
    assert DynamicViT().own_macs(PLACE) == sum(seen)
