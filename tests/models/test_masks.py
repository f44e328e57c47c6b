"""Masks: different token counts in each image, or real-valued weights in training."""

from functools import partial

import numpy as np
import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from vits import ARCHITECTURES, B, N, begin, close, images, vit

from sparsebench.measure.cost import mean_step
from sparsebench.models.attention import masked_softmax
from sparsebench.models.deep import DeepViT
from sparsebench.strategy.plans import Keep, Mask, Merge, Shift

COUNTS = {1: (9, 3, 14), 3: (2, 3, 5)}
"""How many patches each of the three images keeps in the blocks 1 and 3."""


def chosen(block, item):
    """Return which of the 16 patches an image keeps after a block; later blocks keep a subset."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(item))
    return order[: COUNTS[block][item]]


def adaptive(scripted, decide, site, needs=("tokens",), proportional=False):
    strategy = scripted(decide, site=site, needs=needs)
    type(strategy).adaptive, type(strategy).proportional = True, proportional
    return strategy


def ragged(scripted, items=range(B), site="attention", needs=("tokens",), seen=None):
    """Return a strategy that keeps the patches of `chosen` in each image."""

    def decide(view, keep):
        if seen is not None:
            seen.append(view)
        block = 1 if view.block == 0 else view.block
        keep = [torch.isin(row, chosen(block, item)) for row, item in zip(view.index, items, strict=True)]
        return Mask(torch.stack(keep), scores=-view.index.float())

    return adaptive(scripted, decide, site, needs)


CASES = [*(("attention", name) for name in ARCHITECTURES if name != "odd grid"), ("input", "plain"), ("block", "plain")]


@pytest.mark.parametrize(("site", "name"), CASES)
@torch.no_grad()
def test_each_image_of_a_ragged_batch_comes_out_as_alone(scripted, site, name):
    network = DeepViT(ARCHITECTURES[name]())
    acting = begin(network, ragged(scripted, site=site))
    together = network(images(network), acting)
    last = 1 if site == "input" else 3
    for item in range(B):
        alone = begin(network, ragged(scripted, [item], site), n=1)
        close(network(images(network)[item : item + 1], alone)[0], together[item])
        assert acting.index[item][acting.index[item] >= 0].tolist() == sorted(chosen(last, item).tolist())
        assert alone.index[0].tolist() == sorted(chosen(last, item).tolist()) and not alone.ragged
    assert acting.ragged and acting.index.shape[1] == max(COUNTS[last])
    assert acting.sizes.sum(dim=1).tolist() == list(COUNTS[last])


@pytest.mark.parametrize("needs", [("tokens",), ("class_attention",)])
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_a_mask_alone_is_the_keep_of_what_it_keeps(scripted, needs, fused):
    network = DeepViT(vit())
    for block in network.module.blocks:
        block.attn.fused_attn = fused

    def keep(view, _):
        return Keep(torch.isin(view.index, chosen(view.block, 2)).nonzero()[:, 1][None])

    pixels = images(network)[2:3]
    masked = network(pixels, begin(network, ragged(scripted, [2], needs=needs), n=1))
    kept = network(pixels, begin(network, adaptive(scripted, keep, "attention", needs), n=1))
    assert torch.equal(masked, kept)


@torch.no_grad()
def test_merged_sizes_are_weighed_beside_padding(scripted):
    network = DeepViT(vit())

    def decide(view, keep, items=range(B)):
        if view.block == 1:
            return Merge((torch.arange(N) // 2).expand(len(view.index), N))
        return Mask(torch.stack([torch.arange(8) < 2 + item for item in items]))

    together = begin(network, adaptive(scripted, decide, "block", proportional=True))
    logits = network(images(network), together)
    assert together.sizes.tolist() == [[2, 2, 0, 0], [2, 2, 2, 0], [2, 2, 2, 2]]
    for item in range(B):
        strategy = adaptive(scripted, partial(decide, items=[item]), "block", proportional=True)
        close(network(images(network)[item : item + 1], begin(network, strategy, n=1))[0], logits[item])


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("class_attention", {}),
        ("received_attention", {}),
        ("mean_query_attention", {}),
        ("class_attention", {"cls": VisionTransformerDistilled}),
        ("received_attention", {"class_token": False, "global_pool": "avg"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_what_attention_shows_knows_no_padding(scripted, field, changes):
    network, views, needs = DeepViT(vit(**changes)), [], (field,)
    network(images(network), begin(network, ragged(scripted, needs=needs, seen=views)))
    together, there = getattr(views[1], field), views[1].there
    assert there.sum(dim=1).tolist() == list(COUNTS[1])
    for item in range(B):
        alone = []
        acting = begin(network, ragged(scripted, [item], needs=needs, seen=alone), n=1)
        network(images(network)[item : item + 1], acting)
        close(together[item][there[item]], getattr(alone[1], field)[0])
        assert bool((together[item][~there[item]] == 0).all())


@pytest.mark.parametrize(
    ("site", "needs"),
    [("block", ("tokens",)), *(("attention", (need,)) for need in ("tokens", "class_attention", "received_attention"))],
)
@torch.no_grad()
def test_the_macs_are_the_mean_of_those_of_each_image_alone(scripted, site, needs):
    network = DeepViT(vit())
    acting = begin(network, ragged(scripted, site=site, needs=needs))
    network(images(network), acting)
    each = []
    for item in range(B):
        alone = begin(network, ragged(scripted, [item], site, needs), n=1)
        network(images(network)[item : item + 1], alone)
        each.append(network.cost.macs(alone.steps))
    assert network.cost.macs(acting.steps).tolist() == pytest.approx(each, rel=1e-12)
    steps = [mean_step([(B, step)]) for step in acting.steps]
    assert network.cost.macs(steps) == pytest.approx(np.mean(each), rel=1e-12)


def masked_softmax_by_hand(z, D, own, eps):
    """Return eq. 11 of DynamicViT for one query, with Python floats."""
    T, top = len(z), max(z)
    e = [np.exp(z[j] - top) * (1.0 if j == own else D[j]) for j in range(T)]
    return [(e[j] + eps / T) / (sum(e) + eps) for j in range(T)]


def test_masked_attention_is_equation_11():
    rng = np.random.default_rng(0)
    z, D = rng.normal(size=(2, 3, 5, 5)), rng.random((2, 5)).round(1)
    D[0, 2] = 0.0
    A = masked_softmax(torch.from_numpy(z), torch.from_numpy(D), slice(None)).numpy()
    for b in range(2):
        for h in range(3):
            for i in range(5):
                assert A[b, h, i] == pytest.approx(masked_softmax_by_hand(z[b, h, i], D[b], i, 1e-6), abs=1e-12)
    rows = torch.tensor([[3, 0], [4, 1]])
    few = masked_softmax(torch.from_numpy(np.stack([z[b][:, rows[b]] for b in range(2)])), torch.from_numpy(D), rows)
    assert few.numpy() == pytest.approx(np.stack([A[b][:, rows[b]] for b in range(2)]), abs=1e-15)


def test_a_mask_of_zeros_lets_gradients_through():
    D = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    z = torch.randn(1, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda D: masked_softmax(z, D, slice(None)), (D,))


@pytest.mark.parametrize(
    ("site", "needs"),
    [*((site, ("tokens",)) for site in ("input", "block", "attention")), ("attention", ("class_attention",))],
)
def test_a_mask_of_zeros_and_ones_in_training_is_removal(scripted, site, needs):
    network = DeepViT(vit(reg_tokens=2))

    def drop(view):
        block = 1 if view.block == 0 else view.block
        return torch.stack([torch.isin(row, chosen(block, 0)) for row in view.index])

    def masked(view, _):
        return Mask(drop(view).float())

    def removed(view, keep):
        return Keep(drop(view).nonzero()[:, 1].reshape(len(view.index), -1))

    weak = begin(network, scripted(masked, site=site, needs=needs), training=True)
    logits = network(images(network), weak)
    assert weak.index.shape[1] == N and weak.masked
    kept = chosen(1 if site == "input" else 3, 0)
    assert bool(((weak.weights() == 1) == torch.isin(torch.arange(N), kept)).all())
    hard = begin(network, adaptive(scripted, removed, site, needs), training=True)
    close(logits, network(images(network), hard), atol=1e-4)
    logits.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in network.module.parameters() if p.grad is not None)


def test_masks_of_later_blocks_multiply(scripted):
    network, seen = DeepViT(vit()), []

    def decide(view, keep):
        seen.append(view.weights.clone())
        return Mask(torch.full(view.index.shape, 0.5))

    acting = begin(network, scripted(decide, site="block"), training=True)
    network(images(network), acting)
    assert [float(w.unique()) for w in (*seen, acting.weights())] == [1.0, 0.5, 0.25]


def test_a_shift_adds_to_patch_class_and_register_tokens_in_training(scripted):
    network, came = DeepViT(vit(reg_tokens=2)), []
    rng = torch.Generator().manual_seed(3)
    by, prefix = torch.randn(B, N, 32, generator=rng), torch.randn(B, 3, 32, generator=rng)
    hook = network.module.blocks[1].norm1.register_forward_pre_hook(lambda _, args: came.append(args[0].detach()))
    network(images(network))
    shift = scripted(lambda view, keep: Shift(by, prefix=prefix), site="block")
    acting = begin(network, shift, training=True)
    network(images(network), acting)
    hook.remove()
    close(came[1], came[0] + torch.cat([prefix, by], dim=1))
    assert acting.index.shape == (B, N) and bool((acting.sizes == 1).all())


def test_an_adaptive_strategy_acts_in_all_blocks_of_the_budget(scripted):
    """An adaptive strategy acts wherever the budget says whatever others keep."""
    network, blocks = DeepViT(vit()), []

    def decide(view, keep):
        blocks.append(view.block)
        return Mask(torch.arange(view.index.shape[1]).expand(view.index.shape) < 2)

    network(images(network), begin(network, adaptive(scripted, decide, "block")))
    assert blocks == [1, 3]
    blocks.clear()
    network(images(network), begin(network, adaptive(scripted, decide, "block"), rate=1.0))
    assert blocks == []
