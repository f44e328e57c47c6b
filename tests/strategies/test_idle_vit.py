"""IdleViT against loops over its equations in float64: the tokens that take part in each block, and the logits."""

import copy
from itertools import pairwise

import pytest
import torch
from sparsebench_plugins.idle_vit import IdleViT
from timm.models.deit import VisionTransformerDistilled
from tiny import B, N, act, images, vit

NETWORKS = {
    "no class token": (0, 0, {"class_token": False, "global_pool": "avg"}),
    "class token": (1, 1, {}),
    "registers": (4, 1, {"reg_tokens": 3}),
    "distilled": (2, 2, {"cls": VisionTransformerDistilled}),
}


def attended(block, x):
    """Return x + Attn(x) of one image (T, C), and the (H, T, T) attention."""
    q, k, v = block.attn.qkv(block.norm1(x)).unflatten(1, (3, block.attn.num_heads, -1)).permute(1, 2, 0, 3)
    A = (q @ k.mT / k.shape[2] ** 0.5).softmax(dim=2)
    return x + block.attn.proj((A @ v).transpose(0, 1).flatten(1)), A


@torch.no_grad()
def by_hand(network, image, counts, prefix, rows):
    """Return the logits of one image, and the active tokens of each block; scores are means over heads and `rows`."""
    model = copy.deepcopy(network.module).double()
    x = list(model._pos_embed(model.patch_embed((image[None].double() - 0.5) / 0.5))[0])
    scores, chosen = [None] * N, []
    for number, block in enumerate(model.blocks):
        reached = [count for at, count in counts.items() if at <= number]
        active = range(N) if not reached else sorted(sorted(range(N), key=lambda i: (-scores[i], i))[: reached[-1]])
        chosen.append(list(active))
        places = [*range(prefix), *(prefix + i for i in active)]
        new, A = attended(block, torch.stack([x[place] for place in places]))
        new = new + block.mlp(block.norm2(new))
        for row, place in enumerate(places):
            x[place] = new[row]
        for row, token in enumerate(active):
            asking = range(rows or len(places))
            scores[token] = (
                sum(float(head[q, prefix + row]) for head in A for q in asking) / len(A) / len(asking) * len(places)
            )
    return model.forward_head(model.norm(torch.stack(x)[None]))[0], chosen


@pytest.mark.parametrize("counts", [{1: 8, 2: 4, 3: 2}, {1: 11}], ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_who_takes_part_and_the_logits_are_those_of_loops(name, counts):
    prefix, rows, changes = NETWORKS[name]
    network = vit(**changes)
    acting, out = act(IdleViT(), network, images(), None, None, blocks=tuple(counts), counts=tuple(counts.values()))
    came_back = 0
    for b, image in enumerate(images()):
        logits, chosen = by_hand(network, image, counts, prefix, rows)
        torch.testing.assert_close(out[b].double(), logits, atol=1e-5, rtol=1e-5)
        first = min(counts)
        assert [decision.after[b].tolist() for decision in acting.decisions] == chosen[first:]
        came_back += sum(not set(after) <= set(before) for before, after in pairwise(chosen[first:]))
    assert acting.index.tolist() == [list(range(N))] * B
    assert name != "class token" or counts != {1: 11} or came_back > 0  # otherwise it would only drop tokens
