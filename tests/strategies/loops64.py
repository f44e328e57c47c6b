"""A Vision Transformer in float64, one image at a time, in which a method acts on the tokens by its equations."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch

from sparsebench.models.actor import Actor
from sparsebench.strategy.budget import Budget


@torch.no_grad()
def loops(
    network,
    image,
    counts,
    *,
    early=None,
    middle=None,
    after=None,
    maps=None,
    start=None,
    log_sizes=True,
    adaptive=False,
):
    """Return the logits, and the number of patch tokens in the MLP of each block.

    Args:
        network: a DeepViT of plain blocks.
        image: (3, height, width) in [0, 1].
        counts: the requested token count after each block; the method acts where it is below the current one.
        early: changes the state, with the block's input, between the attention `A` and its product with the values.
        middle: changes the state between attention and MLP, given it and the count.
        after: the same at the end of the block.
        maps: returns the attention (H, T, T) that multiplies the values, from that of the softmax.
        start: changes the state before the first block.
        log_sizes: whether attention adds the log of the sizes to the logits.
        adaptive: whether the method acts also where the count is not below the current one.

    The state has `x` (T, C), class and register tokens first; `sizes` (T,); `P`, `block`, `depth`; and of the block
    `k`, `v` (H, T, d) and `A` (H, T, T). Methods remove and change rows of `x` and `sizes`.
    """
    model = copy.deepcopy(network.module).double()
    first = model._pos_embed(model.patch_embed(network.normalise(image[None].double())))
    state = SimpleNamespace(x=model.norm_pre(first)[0].numpy(), P=network.prefix, depth=len(model.blocks))
    state.sizes, remaining = np.ones(len(state.x)), []
    if start:
        start(state)
    for state.block, block in enumerate(model.blocks):
        normed = block.norm1(torch.from_numpy(state.x))
        state.normed = normed.numpy()
        q, state.k, state.v = (
            block.attn.qkv(normed).unflatten(1, (3, block.attn.num_heads, -1)).permute(1, 2, 0, 3).numpy()
        )
        logits = q @ state.k.transpose(0, 2, 1) / math.sqrt(q.shape[2])
        logits = logits + np.log(state.sizes) if log_sizes else logits
        A = np.exp(logits - logits.max(axis=2, keepdims=True))
        state.A = A / A.sum(axis=2, keepdims=True)
        acts = state.block in counts and (adaptive or counts[state.block] < len(state.x) - state.P)
        if maps and acts:
            state.A = maps(state.A)
        if early and acts:
            early(state, counts[state.block])
            normed = block.norm1(torch.from_numpy(state.x))
            state.v = block.attn.qkv(normed).unflatten(1, (3, len(state.A), -1)).permute(1, 2, 0, 3)[2].numpy()
        mixed = torch.from_numpy((state.A @ state.v).transpose(1, 0, 2).reshape(len(state.x), -1))
        state.x = state.x + block.attn.proj(mixed).numpy()
        if middle and acts:
            middle(state, counts[state.block])
        state.mlp = block.mlp(block.norm2(torch.from_numpy(state.x))).numpy()
        state.x = state.x + state.mlp
        remaining.append(len(state.x) - state.P)
        if after and acts:
            after(state, counts[state.block])
    pooled = model.norm(torch.from_numpy(state.x))
    weights = torch.from_numpy(state.sizes)[state.P :, None]
    token = pooled[0] if network.module.global_pool == "token" else (weights * pooled[state.P :]).sum(0) / weights.sum()
    return model.head(model.fc_norm(token)).numpy(), remaining


@torch.no_grad()
def agree(strategy, network, images, budget, tolerance=1e-5, **method):
    """Compare a strategy on a network in float64 with `loops`: the logits and the token counts of each image.

    In float32, rounding would decide between close choices. Sizes are in float32.
    """
    network.module.double()
    actor = Actor(strategy, Budget(**budget), network.cost, network.grid, stream=5)
    for module in actor.learned.values():
        module.double()
    for number, image in enumerate(images):
        acting = actor.begin(torch.tensor([number]), 0, None, training=False)
        logits = network(image[None].double(), acting)
        expected, remaining = loops(network, image, actor.keep, **method)
        assert [int(step.tokens_out) for step in acting.steps] == remaining and acting.decisions
        np.testing.assert_allclose(logits[0].numpy(), expected, atol=tolerance, rtol=tolerance)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)
