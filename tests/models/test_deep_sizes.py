"""Merged tokens that weigh as much as the patches they stand for: copies of one token, merged, change nothing."""

from functools import partial

import pytest
import torch
from timm.models.deit import VisionTransformerDistilled
from vits import begin, close, vit

from sparsebench.models.deep import DeepViT
from sparsebench.plans import Merge

TARGET = torch.cat([torch.arange(8) // 2, torch.arange(4, 12)])
FIELDS = ("class_attention", "received_attention", "attention_maps")


def network(**changes):
    """Return a network to which the place of a patch makes no difference."""
    model = vit(**changes)
    with torch.no_grad():
        model.pos_embed.zero_()
    return DeepViT(model)


def pairs():
    """Return images of 4 x 4 patches of 8 pixels in which patches 2i and 2i + 1 are the same."""
    halves = torch.rand(3, 3, 4, 8, 2, 1, 8, generator=torch.Generator().manual_seed(1))
    return halves.expand(-1, -1, -1, -1, -1, 2, -1).reshape(3, 3, 32, 32)


def merge_pairs(scripted, seen=None, *, proportional=True, fields=()):
    """Return a strategy that merges half of the pairs in block 1, and looks at the fields in block 3."""

    def decide(view, keep):
        if view.block == 3:
            seen.extend(getattr(view, field) for field in fields)
            return None
        return Merge(TARGET.expand(view.index.shape))

    strategy = scripted(decide, site="attention", needs=("tokens", *fields))
    type(strategy).proportional = proportional
    return strategy


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"global_pool": "avg", "class_token": False},
        {"reg_tokens": 2},
        {"init_values": 0.5, "qk_norm": True},
        {"cls": VisionTransformerDistilled},
    ],
    ids=str,
)
@pytest.mark.parametrize("fused", [True, False])
@torch.no_grad()
def test_merging_copies_changes_no_logit_where_attention_weighs_sizes(scripted, changes, fused):
    vit_ = network(**changes)
    for block in vit_.module.blocks:
        block.attn.fused_attn = fused
    act = partial(begin, vit_, rate=0.75, blocks=(1,))
    close(vit_(pairs(), act(merge_pairs(scripted))), vit_(pairs()), atol=1e-5)
    plain = vit_(pairs(), act(merge_pairs(scripted, proportional=False)))
    assert (plain - vit_(pairs())).abs().max() > 1e-3


@torch.no_grad()
def test_the_attention_that_is_shown_weighs_sizes_too(scripted):
    vit_, merged, whole = network(), [], []
    vit_(pairs(), begin(vit_, merge_pairs(scripted, merged, fields=FIELDS), 0.75, blocks=(1, 3)))
    look = scripted(
        lambda view, keep: whole.extend(getattr(view, f) for f in FIELDS), site="attention", needs=("tokens", *FIELDS)
    )
    vit_(pairs(), begin(vit_, look, blocks=(3,)))
    class_, received, maps = merged
    together = torch.nn.functional.one_hot(TARGET).float()  # (16, 12)
    close(class_, whole[0] @ together)
    close(maps[:, :, 0, 1:], whole[2][:, :, 0, 1:] @ together)
    close(maps[:, :, 1 + TARGET, 1:], whole[2][:, :, 1:, 1:] @ together)
    close(received, maps.mean(dim=(1, 2))[:, 1:])
