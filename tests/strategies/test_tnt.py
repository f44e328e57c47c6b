"""TNT against plain loops in float64, written from its equations: relevance, noise, redundant tokens."""

import math

import numpy as np
import pytest
import torch
from merging import cosine, dot, normed, rows, softmax
from sparsebench_plugins.tnt import TNT
from tiny import B, N, act, chosen, images, vit

from sparsebench.measure.cost import Step
from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget


class Watched(TNT):
    """Records its views and plans."""

    def plan(self, view, keep):
        plan = super().plan(view, keep)
        view.memory.setdefault("seen", []).append((view.tokens.detach(), view.learned, view.random(), keep, plan))
        return plan


def start(strategy, network, rows=slice(None), visit=0, stream=5):
    """Return a pass in training."""
    actor = Actor(strategy, Budget(keep_rate=0.5), network.cost, network.grid, stream=stream)
    return actor.begin(torch.arange(B)[rows], visit, None, training=True)


def alphas(x, g):
    """Return N numbers, the relevance of one sample's tokens (N, C), in float64."""
    norm, line = g
    return softmax([dot(rows(line.weight[0]), normed(row, norm)) for row in rows(x)])


def kept_by_hand(x, alpha, drawn, keep, b):
    """Return the positions of the tokens (N, C) of one sample that stay."""
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


def in_training(network, **parameters):
    """Return a pass in training, with a different norm in each module, and the (B, P + N, C) tokens of each block."""
    acting, came = start(Watched(**parameters), network), {}
    rng = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for norm, _ in acting.actor.learned.values():
            norm.weight.add_(torch.rand(norm.weight.shape, generator=rng))
            norm.bias.add_(torch.rand(norm.bias.shape, generator=rng))
    hooks = [
        block.norm1.register_forward_pre_hook(lambda _, args, number=number: came.update({number: args[0].detach()}))
        for number, block in enumerate(network.module.blocks)
    ]
    network(images(), acting)
    for hook in hooks:
        hook.remove()
    return acting, came


def test_tnt_adds_more_noise_to_what_matters_less():
    """In training all stay are normed and get the more noise the less they matter."""
    acting, _ = in_training(vit(), noise=0.02)
    assert acting.index.shape == (B, N) and all(step == Step(N, N, own=step.own) for step in acting.steps)
    drawn = []
    for x, g, _, keep, plan in acting.memory["seen"]:
        assert keep <= N
        alpha = torch.tensor([alphas(x[i], g) for i in range(B)])
        by = plan.by.detach().double() + x - torch.tensor([[normed(row, g[0]) for row in rows(one)] for one in x])
        drawn.append((by / 0.02 / (1 - alpha)[:, :, None]).float().numpy())
    e = np.stack(drawn)  # 3 blocks, B, N, C: 6144 numbers
    assert abs(e.mean()) < 0.04 and abs(e.std() - 1) < 0.03 and abs((e**4).mean() - 3) < 0.4
    each = e.reshape(-1, e.shape[-1])
    correlated = np.corrcoef(each, rowvar=False) - np.eye(e.shape[-1])
    assert np.abs(correlated).max() < 5 / math.sqrt(len(each))
    flat = e.reshape(3 * B, -1)
    assert np.abs(np.corrcoef(flat) - np.eye(3 * B)).max() < 5 / math.sqrt(flat.shape[1])


def test_without_noise_the_whole_stream_is_normed():
    """Without noise the whole stream is normed class and register tokens too."""
    network = vit(reg_tokens=2)
    acting, came = in_training(network, noise=0.0)
    assert [block for block in came if block in acting.actor.learned] == [1, 2, 3]
    for block, learned in acting.actor.learned.items():
        before, model = came[block - 1], network.module.blocks[block - 1]
        with torch.no_grad():
            before = before + model.attn(model.norm1(before))
            before = before + model.mlp(model.norm2(before))
        expected = [[normed(row, learned[0]) for row in rows(x)] for x in before]
        assert before.shape[1] == 3 + N
        np.testing.assert_allclose(came[block], expected, atol=1e-5)


@pytest.mark.parametrize(("depth", "blocks"), [(12, (1, 2, 3, 4, 5)), (24, tuple(range(1, 11))), (3, (1,)), (1, ())])
def test_noise_comes_before_the_first_blocks_of_any_depth(depth, blocks):
    assert TNT().training_blocks(depth) == blocks


@pytest.mark.parametrize(("blocks", "union"), [((3,), [1, 2, 3]), ((1, 2), [1, 2]), ((0,), [0, 1, 2])])
def test_it_learns_in_more_blocks_than_it_acts_in(blocks, union):
    """It learns in those blocks and the budgets and in the test acts in the budgets alone."""
    network = vit()
    acting, _ = act(Watched(), network, images(), blocks=blocks)
    assert list(acting.actor.learned) == union and [d.block for d in acting.decisions] == list(blocks)
    assert acting.steps == acting.actor.planned
    begun = acting.actor.begin(torch.arange(B), 0, None, training=True)
    network(images(), begun)
    assert [d.block for d in begun.decisions] == union
    keeps = [keep for *_, keep, _ in begun.memory["seen"]]
    assert keeps == [acting.actor.keep.get(block, N) for block in union]


def noises(visit, rows=slice(None), stream=5):
    network = vit()
    acting = start(Watched(), network, rows, visit, stream)
    network(images()[rows], acting)
    x, g, _, _, plan = acting.memory["seen"][0]
    return (plan.by + x - g[0](x)).detach()


def test_noise_is_the_samples_own_and_new_at_each_visit():
    together = noises(1)
    torch.testing.assert_close(noises(1, slice(2, 3))[0], together[2], atol=1e-6, rtol=1e-5)
    noise = noises(1, stream=6)
    assert not torch.allclose(noises(2), together, atol=1e-3) and not torch.allclose(noise, together, atol=1e-3)
