"""ToMe and ToFu in whole networks, against loops in float64 over the whole sequence, class token first."""

import copy
import math

import pytest
import torch
from merging import act, cosine, mean
from sparsebench_plugins.tofu import ToFu
from sparsebench_plugins.tome import ToMe
from timm.models.deit import VisionTransformerDistilled
from tiny import images, vit

NETWORKS = {
    "no class token": (0, {"class_token": False, "global_pool": "avg"}),
    "class token": (1, {}),
    "distilled": (2, {"cls": VisionTransformerDistilled}),
}


def matched(keys, r, prefix):
    """Return the order in which tokens go on, and where each of the r that leave goes."""
    A, B = range(0, len(keys), 2), range(1, len(keys), 2)

    def score(i, j):
        return -math.inf if (i < prefix or j < prefix) else cosine(keys[i], keys[j])

    best = {i: max(B, key=lambda j: score(i, j)) for i in A}
    ranked = sorted(A, key=lambda i: -score(i, best[i]))
    unmerged = sorted(ranked[r:]) if prefix else ranked[r:]
    order = [*range(prefix), *(i for i in [*unmerged, *B] if i >= prefix)]
    return order, {i: best[i] for i in ranked[:r]}


def reduced(strategy, x, s, members, keys, r, prefix, drops):
    """Return tokens, sizes and members of one image after r have left."""
    order, goes = matched(keys, r, prefix)
    new = []
    for j in order:
        group = [j] if drops else [j, *(i for i, host in goes.items() if host == j)]
        rows, sizes = [x[i] for i in group], [s[i] for i in group]
        row = mean(rows, sizes if strategy.name == "tome" else [1.0] * len(group))
        if strategy.name == "tofu":
            longest, length = max(math.hypot(*y) for y in rows), math.hypot(*row)
            row = [c * longest / length for c in row]
        new.append((row, sum(sizes), [patch for i in group for patch in members[i]]))
    return map(list, zip(*new, strict=True))


def attended(block, x, s, proportional):
    """Return x + Attn(x) of one image (T, C), and its keys (T, d), mean over heads."""
    H = block.attn.num_heads
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(1, (3, H, -1)).permute(1, 2, 0, 3)
    logits = q @ k.mT / k.shape[2] ** 0.5 + (torch.tensor(s).log() if proportional else 0)
    out = (logits.softmax(dim=2) @ v).transpose(0, 1).flatten(1)
    return x + block.attn.proj(out), k.mean(dim=0)


@torch.no_grad()
def by_hand(strategy, network, image, prefix, r):
    """Return logits, sizes and the members of each token of one image, r leaving each block."""
    model = copy.deepcopy(network.module).double()
    x = model._pos_embed(model.patch_embed((image[None].double() - 0.5) / 0.5))[0]
    s, members = [1.0] * len(x), [[i] for i in range(len(x))]
    for number, block in enumerate(model.blocks):
        x, keys = attended(block, x, s, strategy.proportional)
        drops = strategy.name == "tofu" and number < 2
        now = min(r, (len(x) - prefix) // 2)
        rows, s, members = reduced(strategy, x.tolist(), s, members, keys.tolist(), now, prefix, drops)
        x = torch.tensor(rows, dtype=torch.float64)
        x = x + block.mlp(block.norm2(x))
    x = model.norm(x)
    if prefix:
        logits = model.forward_head(x[None])[0]
    else:
        pooled = torch.tensor(mean(x.tolist(), s), dtype=torch.float64)
        logits = model.head(model.fc_norm(pooled))
    return logits, s[prefix:], [[i - prefix for i in group] for group in members[prefix:]]


@pytest.mark.parametrize("strategy", [ToMe(), ToMe(proportional=False), ToFu()], ids=str)
@pytest.mark.parametrize("r", [2, 3])
@pytest.mark.parametrize("name", NETWORKS)
@torch.no_grad()
def test_a_whole_network_is_that_of_the_whole_sequence(name, r, strategy):
    prefix, changes = NETWORKS[name]
    network = vit(**changes)
    acting, out = act(strategy, network, images(), per_block=r)
    assert [step.tokens_out for step in acting.steps] == [16 - r, 16 - 2 * r, 16 - 3 * r, 16 - 4 * r]
    for b, image in enumerate(images()):
        logits, sizes, members = by_hand(strategy, network, image, prefix, r)
        torch.testing.assert_close(out[b].double(), logits, atol=1e-5, rtol=1e-5)
        assert acting.sizes[b].tolist() == sizes
        assert acting.index[b].tolist() == [min(group) for group in members]
