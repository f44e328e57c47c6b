"""What a timm model is made of: whether tokens can be dropped from it safely, and what its parts cost."""

from __future__ import annotations

from typing import Any

from timm.layers import Attention, AttentionPoolLatent, PatchEmbed
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from sparsebench.errors import UnsupportedError
from sparsebench.layers import rotary
from sparsebench.layers.attention import ROTARY, is_plain
from sparsebench.layers.stem import ConvStem
from sparsebench.measure.cost import BlockCost, VitCost
from sparsebench.models.pooling import includes_prefix


def refuse(vit: Any) -> None:
    """Raise UnsupportedError for architectures in which dropping tokens would go wrong silently."""
    name = type(vit).__name__
    if not isinstance(vit, VisionTransformer | Eva):
        raise UnsupportedError(f"{name} is no timm VisionTransformer or Eva: {_obstacle(vit)}")
    if getattr(vit, "grad_checkpointing", False):
        raise UnsupportedError(f"{name}: gradient checkpointing is on; call set_grad_checkpointing(False)")
    if getattr(vit, "rope", None) is not None:
        reason = rotary.obstacle(vit.rope) if isinstance(vit, Eva) else "rotary position embeddings are an Eva's only"
        if reason:
            raise UnsupportedError(f"{name}: {reason}")
    _refuse_ends(vit, name)
    attentions: list[Any] = [block.attn for block in vit.blocks] if isinstance(vit, Eva) else []
    if not all(is_plain(attention) for attention in attentions):
        raise UnsupportedError(f"{name}: attention of type {type(attentions[0]).__name__} with a gate is not known")
    if not (vit.patch_drop is None or isinstance(vit.patch_drop, nn.Identity)):
        raise UnsupportedError(f"{name}: it drops patches on its own (patch_drop_rate > 0)")


def _refuse_ends(vit: Any, name: str) -> None:
    """Raise UnsupportedError for a way to make patches, or to pool them, that is not known here."""
    part = vit.attn_pool
    if not (part is None or (type(part) is AttentionPoolLatent and part.pos_embed is None)):
        raise UnsupportedError(f"{name}: its MACs are not known here, as it pools with {type(part).__name__}")
    embed = vit.patch_embed
    if type(embed) not in (PatchEmbed, ConvStem):
        raise UnsupportedError(f"{name}: its patches are made by {type(embed).__name__}, not by a projection")
    if embed.grid_size is None or embed.dynamic_img_pad:
        raise UnsupportedError(f"{name}: its pixels are of any size (dynamic_img_pad), so the tokens are not fixed")
    if any(
        n * side != pixels for n, side, pixels in zip(embed.grid_size, embed.patch_size, embed.img_size, strict=True)
    ):
        raise UnsupportedError(f"{name}: {embed.img_size} pixels are no whole number of patches of {embed.patch_size}")


def _obstacle(model: Any) -> str:
    """Return why tokens cannot be dropped from a model that is neither."""
    if getattr(model, "rope", None) is not None:
        return "its rotary position embeddings are bound to the full token grid"
    relative = ("relative_position_bias_table", "rel_pos", "rel_pos_bias")
    if any(getattr(part, key, None) is not None for part in model.modules() for key in relative):
        return "its relative positions are bound to the full token grid"
    if type(model).__name__.startswith("NaFlex"):
        return "it takes patches of any number in place of images of one size"
    return "only of these classes is it known here how tokens are dropped"


def linear_macs(module: nn.Module | None) -> int:
    """Return the MACs a token of all linear layers inside the module."""
    if module is None:
        return 0
    return sum(x.in_features * x.out_features for x in module.modules() if isinstance(x, nn.Linear))


def vit_cost(vit: Any, class_rows: int) -> VitCost:
    """Return the closed form of a timm VisionTransformer or Eva."""
    blocks = []
    for block in vit.blocks:
        attn = getattr(block, "attn", None)
        if not isinstance(attn, (Attention, *ROTARY)) or not hasattr(block, "mlp"):
            what = f"blocks of type {type(block).__name__} with attention of type {type(attn).__name__}"
            raise UnsupportedError(f"{what} have no closed form of their MACs here")
        parts = ("qkv", "q_proj", "k_proj", "v_proj", "gate")
        qkv = sum(linear_macs(getattr(attn, part, None)) for part in parts)
        blocks.append(BlockCost(qkv, linear_macs(attn.proj), linear_macs(block.mlp), attn.num_heads * attn.head_dim))
    embed = vit.patch_embed
    patch_weights = embed.macs() if isinstance(embed, ConvStem) else embed.proj.weight.numel()
    head = linear_macs(vit.head) + linear_macs(getattr(vit, "head_dist", None))
    plain = all(is_plain(block.attn) for block in vit.blocks)
    tokens_, prefix = vit.patch_embed.num_patches, vit.num_prefix_tokens
    heads = vit.blocks[0].attn.num_heads
    pooled, pool = (0, 0) if vit.attn_pool is None else _pool_macs(vit.attn_pool)
    if includes_prefix(vit):
        pool += prefix * pooled
    ends = (patch_weights, head + pool)
    return VitCost(tokens_, prefix, class_rows, *ends, tuple(blocks), vit.embed_dim, heads, plain, pooled)


def _pool_macs(part: AttentionPoolLatent) -> tuple[int, int]:
    """Return the MACs of an attention pool for each token, and for each image."""
    width = part.num_heads * part.head_dim
    once = sum(linear_macs(piece) for piece in (part.q, part.proj, part.mlp))
    return linear_macs(part.kv) + 2 * part.latent_len * width, part.latent_len * once
