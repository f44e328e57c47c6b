"""What a timm model's head reads of tokens that stand for different numbers of patches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench.layers.attention import masked_softmax
from sparsebench.models.actor import Pass

POOLS = ("avg", "avgmax", "map")
"""Those in which sizes matter."""


def pool(vit: Any, acting: Pass, x: Tensor, pool_type: str | None = None) -> Tensor:
    """Pool the (B, P + N, C) tokens of a model, each weighted by its size and by what it counts.

    A mean weighs them so; an attention pool multiplies its weights by theirs before they are made to sum to 1.
    """
    if acting.whole:
        return type(vit).pool(vit, x, pool_type)
    P, with_prefix = vit.num_prefix_tokens, includes_prefix(vit)
    sizes = acting.sizes * acting.weights if acting.masked else acting.sizes
    if vit.attn_pool is not None:
        pooled = (x, F.pad(sizes, (P, 0), value=1)) if with_prefix else (x[:, P:], sizes)
        return attention_pool(vit.attn_pool, *pooled)
    plain, alike, present = type(vit).pool(vit, x, pool_type), (sizes == sizes[:, :1]).all(), acting.sizes > 0
    if with_prefix:
        sizes, present = (F.pad(one, (P, 0), value=1) for one in (sizes, present))
    else:
        x = x[:, P:]
    weighted = (x * sizes[:, :, None]).sum(dim=1) / sizes.sum(dim=1, keepdim=True).clamp(min=1e-6)
    if vit.global_pool != "avg":
        weighted = 0.5 * (weighted + x.masked_fill(~present[:, :, None], -torch.inf).amax(dim=1))
    return torch.where(alike, plain, weighted.to(plain.dtype))  # a choice by `if` would wait for the device


def includes_prefix(vit: Any) -> bool:
    """Say whether class and register tokens are pooled too: always in the attention pool of an Eva."""
    return getattr(vit, "pool_include_prefix", vit.attn_pool is not None)


def attention_pool(part: Any, x: Tensor, sizes: Tensor) -> Tensor:
    """Return what timm's AttentionPoolLatent makes of (B, T, C) tokens, each of which is as good as `sizes` (B, T)."""
    B, T, _ = x.shape
    q = part.q(part.latent.expand(B, -1, -1)).reshape(B, part.latent_len, part.num_heads, part.head_dim)
    k, v = part.kv(x).reshape(B, T, 2, part.num_heads, part.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = part.q_norm(q.transpose(1, 2)), part.k_norm(k)
    nobody = torch.zeros(part.latent_len, T, dtype=torch.bool, device=x.device)
    A = masked_softmax(q * part.scale @ k.transpose(-2, -1), sizes, nobody, eps=0.0).to(v.dtype)
    out = part.proj_drop(part.proj((A @ v).transpose(1, 2).flatten(2)))
    if part.mlp is not None:
        out = out + part.mlp(part.norm(out))
    if part.pool == "token":
        return out[:, 0]
    return out.mean(dim=1) if part.pool == "avg" else out
