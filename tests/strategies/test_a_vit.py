"""A-ViT against plain loops in float64, written from its equations: scores, remainders, read-out, loss."""

import copy
import math

import numpy as np
import pytest
import torch
from sparsebench_plugins.a_vit import AViT
from tiny import B, N, act, images, vit

from sparsebench.errors import UnsupportedError, UserError
from sparsebench.measure.schedule import TokenSchedule
from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget
from sparsebench.strategy.spec import fill
from sparsebench.training.fit import calibrate
from sparsebench.training.steps import Samples

L = 4


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@torch.no_grad()
def by_hand(network, image, gamma, beta, epsilon):
    """Return (logits, depths, remainders, scores) of one image, for patches 0..N-1 and the class token, in float64.

    A halted patch is zero before the next block, and a key only for itself.
    """
    model = copy.deepcopy(network.module).double()
    x = model.patch_embed((image[None].double() - 0.5) / 0.5)
    x = model.norm_pre(model._pos_embed(x))
    names = [*range(1, N + 1), 0]
    total, depth, remainder = [0.0] * (N + 1), [0] * (N + 1), [0.0] * (N + 1)
    scores = [[0.0] * (N + 1) for _ in range(L)]
    read, there = torch.zeros(x.shape[2], dtype=torch.float64), list(range(N))
    for layer in range(1, L + 1):
        block, H = model.blocks[layer - 1], 4
        gone = [j for j in range(N) if j not in there]
        for j in gone:
            x[0, j + 1] = 0
        q, k, v = block.attn.qkv(block.norm1(x)).unflatten(2, (3, H, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / q.shape[-1] ** 0.5
        for j in gone:
            for i in range(N + 1):
                logits[..., i, j + 1] -= 0 if i == j + 1 else 1000
        x = x + block.attn.proj((logits.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
        for k_, row in enumerate(names):
            real = sigmoid(gamma * float(x[0, row, 0]) + beta)
            scores[layer - 1][k_] = real
            if depth[k_]:
                continue
            h = 1.0 if layer == L else real
            if total[k_] + h >= 1 - epsilon:
                depth[k_], remainder[k_] = layer, 1 - total[k_]
            if row == 0:
                read += (remainder[k_] if depth[k_] else h) * x[0, 0]
            total[k_] += h
        stay = [j for j in there if not depth[j]]
        there = stay or [min(there, key=lambda k_: total[k_])]
    return model.head(model.norm(read[None]))[0].numpy(), depth, remainder, scores


def loss_by_hand(results, strategy, target):
    """Return the loss for the (depths, remainders, scores) of the images."""
    ponder = np.mean([np.mean([d + r for d, r in zip(depth, rest, strict=True)]) for depth, rest, _ in results])
    sums = [sum(sum(scores[layer]) for *_, scores in results) for layer in range(L)]
    apart = []
    for layer in range(1, L + 1):
        prior = math.exp(-((layer - target) ** 2) / 2) / math.sqrt(2 * math.pi)
        H = min(0.99, max(0.01, sums[layer - 1] / sum(sums)))
        apart.append(prior * (math.log(prior) - math.log(H)))
    return strategy.ponder * ponder + strategy.distribution * sum(apart) / L


@pytest.mark.parametrize(("gamma", "beta", "epsilon"), [(1.0, -1.0, 0.01), (0.5, -0.5, 0.1), (10.0, -30.0, 0.01)])
def test_halting_read_out_and_loss_are_those_of_plain_loops(gamma, beta, epsilon):
    network = vit()
    network.module.double()
    strategy = AViT(scale=gamma, beta=beta, epsilon=epsilon, ponder=0.3, distribution=0.7, target=2.5)
    hand = [by_hand(network, image, gamma, beta, epsilon) for image in images()]
    depths = np.array([depth for _, depth, _, _ in hand])
    assert len(set(depths[:, :N].flatten())) >= 3
    passes = [act(strategy, network, images().double(), training=training) for training in (True, False)]
    for acting, logits in passes:
        np.testing.assert_allclose(logits, [logits for logits, *_ in hand], atol=1e-5)
        cost = [[d + r for d, r in zip(depth, rest, strict=True)] for _, depth, rest, _ in hand]
        np.testing.assert_allclose(acting.memory["cost"], cost, atol=1e-5)
    for block, step in enumerate(passes[1][0].steps):
        there = np.maximum(1, (depths[:, :N] > block).sum(axis=1))
        assert np.broadcast_to(step.tokens_in, B).tolist() == there.tolist()
    acting, _ = passes[0]
    assert acting.index.shape == (B, N) and not acting.ragged
    scores = torch.stack(list(acting.memory["scores"].values()), dim=1)
    np.testing.assert_allclose(scores, [scores for *_, scores in hand], atol=1e-5)
    results = [(depth, rest, scores) for _, depth, rest, scores in hand]
    assert float(acting.loss()) == pytest.approx(loss_by_hand(results, strategy, 2.5), abs=1e-5)


def loss_of(target, network, **budget):
    strategy = AViT(target=target, distribution=1.0, ponder=0.0)
    return act(strategy, network, images(), training=True, **budget)[0].loss()


def test_the_prior_is_centred_at_three_quarters_of_the_layers():
    network = vit()
    default = loss_of(None, network)
    assert torch.equal(default, loss_of(0.75 * L, network)) and not torch.allclose(default, loss_of(2.5, network))


def test_with_the_budgets_target_the_prior_is_centred_on_it():
    """With the budget's target the prior is centred where tokens spend it."""
    network = vit()
    counts = TokenSchedule(Budget(keep_rate=0.3), AViT().traits(), network.cost).counts
    whole = sum(counts) / N
    assert counts[-1] < counts[0] and 1 < whole < L
    losses = [loss_of(target, network, rate=0.3) for target in ("budget", whole, whole + 0.5)]
    assert torch.equal(losses[0], losses[1]) and not torch.allclose(losses[0], losses[2])


def test_the_blocks_that_the_budget_names_are_the_layers():
    acting, _ = act(AViT(ponder=0.0, distribution=1.0), vit(), images(), training=True, blocks=(1, 3))
    assert list(acting.memory["scores"]) == [1, 3, L]
    assert bool(acting.loss().isfinite())


def test_where_all_halt_early_one_patch_goes_on():
    """Where all halt after the first layer one patch goes on and the head reads that layer."""
    network = vit()
    acting, logits = act(AViT(scale=0.0, beta=30.0), network, images())
    assert [np.broadcast_to(step.tokens_in, B).tolist() for step in acting.steps] == [[N] * B] + [[1] * B] * (L - 1)
    network.module.blocks = network.module.blocks[:1]
    with torch.no_grad():
        torch.testing.assert_close(logits, network.module((images() - 0.5) / 0.5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("changes", [{"class_token": False, "global_pool": "avg"}, {"global_pool": "avg"}])
def test_a_head_that_reads_no_class_token_is_unsupported(changes):
    with pytest.raises(UnsupportedError, match="head does not read it"):
        act(AViT(), vit(**changes), images())


def test_calibration_finds_that_counts_have_no_effect_and_keeps_them():
    network, passes = vit(), []
    actor = Actor(AViT(scale=1.0), Budget(macs=0.5), network.cost, network.grid, stream=5)
    counts = dict(actor.keep)
    network.module.register_forward_hook(lambda *_: passes.append(1))
    _, ratio, _ = calibrate(network, actor, Samples(images(), torch.zeros(B, dtype=torch.long), None))
    assert actor.keep == counts and abs(ratio - 0.5) > 0.05 and len(passes) == 2


@pytest.mark.parametrize("target", ["budgets", 0.5, "1e400"])
def test_another_target_is_refused(target):
    with pytest.raises(UserError, match="strategy 'a_vit': target"):
        fill(AViT, {"target": target}, "strategy 'a_vit'")
