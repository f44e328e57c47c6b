"""A Vision Transformer in float64, one image at a time, in which a method acts on the tokens by its equations."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import torch
from tiny import act


@torch.no_grad()
def loops(network, image, counts, *, middle=None, after=None, maps=None, start=None, log_sizes=True):
    """Return the logits, and the number of patch tokens after each block.

    Args:
        network: a DeepViT of plain blocks.
        image: (3, height, width) in [0, 1].
        counts: the requested token count after each block in which the method acts.
        middle: changes the state between attention and MLP, given it and the count.
        after: the same at the end of the block.
        maps: returns the attention (H, T, T) that multiplies the values, from that of the softmax.
        start: changes the state before the first block.
        log_sizes: whether attention adds the log of the sizes to the logits.

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
        if maps and state.block in counts:
            state.A = maps(state.A)
        mixed = torch.from_numpy((state.A @ state.v).transpose(1, 0, 2).reshape(len(state.x), -1))
        state.x = state.x + block.attn.proj(mixed).numpy()
        if middle and state.block in counts:
            middle(state, counts[state.block])
        state.mlp = block.mlp(block.norm2(torch.from_numpy(state.x))).numpy()
        state.x = state.x + state.mlp
        if after and state.block in counts:
            after(state, counts[state.block])
        remaining.append(len(state.x) - state.P)
    pooled = model.norm(torch.from_numpy(state.x))
    weights = torch.from_numpy(state.sizes)[state.P :, None]
    token = pooled[0] if network.module.global_pool == "token" else (weights * pooled[state.P :]).sum(0) / weights.sum()
    return model.head(model.fc_norm(token)).numpy(), remaining


def agree(strategy, network, images, budget, tolerance=2e-4, **method):
    """Compare a strategy on a network with `loops`: the logits and the token counts of each image."""
    for number, image in enumerate(images):
        acting, logits = act(strategy, network, image[None], items=torch.tensor([number]), **budget)
        expected, remaining = loops(network, image, acting.keep, **method)
        assert [int(step.tokens_out) for step in acting.steps] == remaining
        np.testing.assert_allclose(logits[0].numpy(), expected, atol=tolerance, rtol=tolerance)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)
