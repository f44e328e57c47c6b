"""timm's attention taken apart, its variant in which positions alone decide, and what a strategy may see of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from sparsebench.errors import UnsupportedError
from sparsebench.models.actor import Pass, full
from sparsebench.strategy import tokens

ROTARY = (EvaAttention, AttentionRope)
"""timm's kinds of attention that rotate queries and keys by the places of their tokens."""
IN_CACHE = 2**18
"""Numbers of attention maps that are made at a time on a CPU, where only their mean is wanted: 1 MiB."""
ALL = slice(None)
OwnKeys = slice | Tensor | None


class PositionalAttention(Attention):
    """softmax((P W_Q)(P W_K)^T / sqrt(d_h)) (X W_V) in each head: queries and keys know positions P, values tokens X.

    Jelassi, Sander and Li, NeurIPS 2022. P is the model's learned position embedding, the same in each block and for
    each image. The weights are timm's by name, shape and first value, biases included, which the paper has not. X are
    the block's normed tokens; as in any timm model P was added to them before the first block.

    One image costs the MACs of timm's attention, which is what is counted: each token there has its query and its key
    made. Images that come together share these while all their tokens are there, which makes them faster.

    Attributes:
        model: the timm model, whose `pos_embed` is P, in a tuple, as it is no part of its part; set once it is there.
    """

    model: tuple[Any]

    def queries_keys(self, P: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, each (1 or B, H, T, C / H), of tokens at the positions (1 or B, T, C)."""
        weight, bias = (None if w is None else w[: 2 * self.attn_dim] for w in (self.qkv.weight, self.qkv.bias))
        qk = F.linear(P, weight, bias).reshape(*P.shape[:2], 2, self.num_heads, self.head_dim)
        q, k = qk.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k)

    def values(self, x: Tensor) -> Tensor:
        """Return (B, H, T, C / H) of tokens (B, T, C)."""
        weight, bias = (None if w is None else w[2 * self.attn_dim :] for w in (self.qkv.weight, self.qkv.bias))
        return F.linear(x, weight, bias).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return (B, T, C) for tokens (B, T, C); UnsupportedError for masks."""
        if attn_mask is not None or is_causal:
            raise UnsupportedError("positional attention takes no mask")
        return attend(self, *qkv(self, x))


def positions_of(vit: Any, acting: Pass | None) -> Tensor:
    """Return the rows of a model's position embedding for the tokens that are there now.

    They are (1, P + N, C), for P class tokens and N patches, while all are there, else (B, P + M, C).

    Raises:
        UnsupportedError: a token stands for several patches, and so has no position.
    """
    embedding: Tensor = vit.pos_embed
    if acting is None or acting.index.shape[1] == embedding.shape[1] - vit.num_prefix_tokens:
        return embedding
    if not acting.whole and bool(((acting.index < 0) | (acting.sizes != 1)).any()):
        raise UnsupportedError(
            "positional attention knows one position a token: tokens can be kept or removed, not fused, merged or "
            "mixed; use attention=content"
        )
    return F.embedding(tokens.with_prefix(acting.index, vit.num_prefix_tokens), embedding[0])


def is_plain(attn: nn.Module) -> bool:
    """Say whether the forward pass can be taken apart: timm's plain or rotary attention, or the positional one."""
    return type(attn) in (Attention, PositionalAttention, *ROTARY) and getattr(attn, "gate", None) is None


def qkv(attn: Any, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each (B, H, T, C / H), of plain attention on (B, T, C).

    Queries and keys are rotated, as they are multiplied; `rope` has sines and cosines of the patch tokens, or is None;
    of positional attention it has the positions, see `positions_of`.
    """
    if isinstance(attn, PositionalAttention):
        q, k = attn.queries_keys(attn.model[0].pos_embed if rope is None else rope)
        return q.expand(len(x), -1, -1, -1), k.expand(len(x), -1, -1, -1), attn.values(x)
    if attn.qkv is None:
        parts = tuple(part(x) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
    elif getattr(attn, "q_bias", None) is None:
        parts = attn.qkv(x).chunk(3, dim=2)
    else:
        parts = F.linear(x, attn.qkv.weight, torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))).chunk(3, dim=2)
    q, k, v = (part.unflatten(2, (-1, attn.head_dim)).transpose(1, 2) for part in parts)
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        P, half = attn.num_prefix_tokens, attn.rotate_half
        q, k = (
            torch.cat([part[:, :, :P], apply_rot_embed_cat(part[:, :, P:], rope, half=half)], dim=2).type_as(v)
            for part in (q, k)
        )
    if (groups := getattr(attn, "num_kv_groups", 1)) > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return q, k, v


def gather_heads(q: Tensor, rows: Tensor) -> Tensor:
    """Return the rows (B, M) of (B, H, T, d) as (B, H, M, d), by way of the faster gather of whole tokens."""
    B, H, T, d = q.shape
    heads = tokens.gather(q.transpose(1, 2).reshape(B, T, H * d), rows)
    return heads.reshape(B, -1, H, d).transpose(1, 2)


def attend(
    attn: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Return (B, Q, C), plain attention's output for its Q queries, with the kernel that the module would use.

    Args:
        attn: the attention.
        q, k, v: (B, H, Q, C / H), and (B, H, T, C / H) of the T keys.
        bias: (B, 1, 1, T) is added to what keys are weighed by, before the softmax, or None.
        weights: (B, T) how much each key counts, see `masked_softmax`, or None.
        rows: (B, Q) which of the keys' tokens the queries are of; None where they are the same.
    """
    bias, own_keys = None if bias is None else bias.to(q.dtype), ALL if rows is None else rows
    if weights is None and attn.fused_attn:
        drop = attn.attn_drop.p if attn.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=drop)
    else:
        A = softmax(q * attn.scale @ k.transpose(-2, -1), bias, weights, own_keys)
        x = attn.attn_drop(A.to(v.dtype)) @ v
    x = x.transpose(1, 2).flatten(2)
    return attn.proj_drop(attn.proj(getattr(attn, "norm", nn.Identity())(x)))


def softmax(scores: Tensor, bias: Tensor | None, weights: Tensor | None, own_keys: OwnKeys) -> Tensor:
    """Return (B, H, Q, T) attention of scores of that shape, with a bias and weights of keys, or None."""
    scores = scores if bias is None else scores + bias
    return torch.softmax(scores, dim=-1) if weights is None else masked_softmax(scores, weights, own_keys)


def masked_softmax(scores: Tensor, weights: Tensor, own_keys: OwnKeys, eps: float = 1e-6) -> Tensor:
    """Return (B, H, Q, T) attention in which key j counts as D_j, and each token fully for itself, in float32 or more.

    (e^(z_ij) G_ij + eps / T) / (sum_k e^(z_ik) G_ik + eps), G_ij = 1 for i = j and D_j otherwise, the largest z of a
    row taken from all (DynamicViT, Rao et al. 2021, eq. 11). D = 0 has a gradient here, which log D as a bias has not.

    Args:
        scores: z, (B, H, Q, T).
        weights: D, (B, T).
        own_keys: which keys are the queries' own, (B, Q) or a part of all; None if queries are of no token.
        eps: keeps a row without any key from 0 / 0.
    """
    z = scores if scores.dtype == torch.float64 else scores.float()
    diagonal = torch.eye(z.shape[-1], device=z.device, dtype=torch.bool)
    diagonal = diagonal.new_zeros(1, z.shape[-1]) if own_keys is None else diagonal[own_keys]
    G = torch.where(diagonal, 1.0, weights[:, None, :].to(z.dtype))[:, None]
    e = (z - z.amax(dim=-1, keepdim=True).detach()).exp() * G
    return (e + eps / z.shape[-1]) / (e.sum(dim=-1, keepdim=True) + eps)


def fields_of(
    attn: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: int,
    class_rows: int,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    present: Tensor | None = None,
) -> dict[str, Callable[[], Any]]:
    """Return how to make each field of the view from queries, keys and values (B, H, P + N, C / H) of a block.

    Args:
        attn: the attention, which knows its scale.
        prefix: P, the number of class and register tokens.
        class_rows: how many of them are class (and distillation) tokens.
        bias: (B, 1, 1, P + N) what this block adds to what keys are weighed by, or None.
        weights: (B, P + N) how much each key counts, see `masked_softmax`, or None.
        present: (B, N) booleans, which patch tokens are no padding; None for all.
    """
    P, T = prefix, k.shape[2]
    counts = weights if weights is not None or present is None else F.pad(present, (P, 0), value=True)

    def maps(part: slice = ALL) -> Tensor:
        # Keys lie head by head before they are turned: a product of turned views would copy them number by number.
        scores = full(q[part]) * attn.scale @ full(k[part]).contiguous().transpose(-2, -1)
        keys, counting = (None if x is None else x[part] for x in (bias, weights))
        return softmax(scores, keys, counting, ALL)

    def query_mean(x: Tensor, first: int, part: slice = ALL) -> Tensor:
        """Return the mean of (B, H, T, d) over the queries from the `first` on, by what they count, without padding."""
        x = x[:, :, first:]
        if counts is None:
            return x.mean(dim=2)
        real = counts[part, None, first:, None]
        return (x.masked_fill(real == 0, 0.0) * real).sum(dim=2) / real.sum(dim=2).clamp(min=1e-6)

    def received_attention() -> Tensor:
        B, H = q.shape[:2]
        size = max(1, IN_CACHE // (H * T * T)) if q.device.type == "cpu" else B
        parts = [slice(start, start + size) for start in range(0, B, size)]
        return torch.cat([query_mean(maps(part), 0, part).mean(dim=1) for part in parts])[:, P:]

    def row(queries: Tensor, own_keys: OwnKeys) -> Tensor:
        # A product and a sum: for one row several times faster than a matrix product.
        scores = torch.stack([(query[:, :, None] * full(k)).sum(-1) for query in queries.unbind(2)], dim=2)
        return softmax(scores * attn.scale, bias, weights, own_keys).mean(dim=(1, 2))[:, P:]

    fields: dict[str, Callable[[], Any]] = {
        "queries": lambda: q[:, :, P:],
        "keys": lambda: k[:, :, P:],
        "values": lambda: v[:, :, P:],
        "attention_maps": maps,
        "received_attention": received_attention,
        "mean_query_attention": lambda: row(query_mean(full(q), P)[:, :, None], None),
    }
    if class_rows:
        fields["class_attention"] = lambda: row(q[:, :, :class_rows], slice(class_rows))
    fields["attention"] = fields["class_attention" if class_rows else "received_attention"]
    return fields
