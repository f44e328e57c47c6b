"""What a timm model is made of: whether tokens can be dropped from it safely, and what its parts cost."""

from __future__ import annotations

from typing import Any

from timm.layers import Attention, PatchEmbed
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from sparsebench.errors import UnsupportedError
from sparsebench.measure.cost import BlockCost, VitCost
from sparsebench.models.attention import is_plain
from sparsebench.models.stem import ConvStem


def refuse(vit: Any) -> None:
    """Raise UnsupportedError for architectures in which dropping tokens would go wrong silently."""
    name = type(vit).__name__
    if not isinstance(vit, VisionTransformer):
        raise UnsupportedError(f"{name} is no timm VisionTransformer: {_obstacle(vit)}")
    if getattr(vit, "grad_checkpointing", False):
        raise UnsupportedError(f"{name}: gradient checkpointing is on; call set_grad_checkpointing(False)")
    if getattr(vit, "rope", None) is not None:
        raise UnsupportedError(f"{name}: rotary position embeddings are bound to the full token grid")
    if getattr(vit, "dynamic_img_size", False):
        raise UnsupportedError(f"{name}: dynamic_img_size is on, so the number of tokens is not fixed")
    if vit.attn_pool is not None:
        raise UnsupportedError(f"{name}: its MACs are not known here, as it pools with {type(vit.attn_pool).__name__}")
    embed = vit.patch_embed
    if type(embed) not in (PatchEmbed, ConvStem):
        raise UnsupportedError(f"{name}: its patches are made by {type(embed).__name__}, not by a projection")
    if any(
        n * side != pixels for n, side, pixels in zip(embed.grid_size, embed.patch_size, embed.img_size, strict=True)
    ):
        raise UnsupportedError(f"{name}: {embed.img_size} pixels are no whole number of patches of {embed.patch_size}")
    if not isinstance(vit.patch_drop, nn.Identity):
        raise UnsupportedError(f"{name}: it drops patches on its own (patch_drop_rate > 0)")


def _obstacle(model: Any) -> str:
    """Return why tokens cannot be dropped from a model that is no VisionTransformer."""
    if getattr(model, "rope", None) is not None:
        return "its rotary position embeddings are bound to the full token grid"
    relative = ("relative_position_bias_table", "rel_pos", "rel_pos_bias")
    if any(getattr(part, key, None) is not None for part in model.modules() for key in relative):
        return "its relative positions are bound to the full token grid"
    return "only of that class is it known here how tokens are dropped"


def linear_macs(module: nn.Module | None) -> int:
    """Return the MACs a token of all linear layers inside the module."""
    if module is None:
        return 0
    return sum(x.in_features * x.out_features for x in module.modules() if isinstance(x, nn.Linear))


def vit_cost(vit: Any, class_rows: int) -> VitCost:
    """Return the closed form of a timm VisionTransformer."""
    blocks = []
    for block in vit.blocks:
        attn = getattr(block, "attn", None)
        if not isinstance(attn, Attention) or not hasattr(block, "mlp"):
            what = f"blocks of type {type(block).__name__} with attention of type {type(attn).__name__}"
            raise UnsupportedError(f"{what} have no closed form of their MACs here")
        blocks.append(
            BlockCost(
                qkv=linear_macs(attn.qkv) + linear_macs(getattr(attn, "gate", None)),
                proj=linear_macs(attn.proj),
                mlp=linear_macs(block.mlp),
                width=attn.qkv.out_features // 3,
            )
        )
    embed = vit.patch_embed
    patch_weights = embed.macs() if isinstance(embed, ConvStem) else embed.proj.weight.numel()
    head = linear_macs(vit.head) + linear_macs(getattr(vit, "head_dist", None))
    plain = all(is_plain(block.attn) for block in vit.blocks)
    tokens_, prefix = vit.patch_embed.num_patches, vit.num_prefix_tokens
    heads = vit.blocks[0].attn.num_heads
    return VitCost(tokens_, prefix, class_rows, patch_weights, head, tuple(blocks), vit.embed_dim, heads, plain)
