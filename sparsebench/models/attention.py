"""The forward pass of timm's attention in parts, positional attention, and the fields of the view from attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, AttentionRope, apply_rot_embed_cat
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from sparsebench.errors import UnsupportedError
from sparsebench.models.actor import Pass, full
from sparsebench.strategy import tokens
from sparsebench.strategy.plans import Mask, Merge, Plan, Shift

ROTARY = (EvaAttention, AttentionRope)
"""timm's attention modules with rotary position embeddings."""
IN_CACHE = 2**18
"""How many numbers of attention maps are computed at a time on a CPU if only their mean is needed: 1 MiB."""
ALL = slice(None)
OwnKeys = slice | Tensor | None


class PositionalAttention(Attention):
    """Attention softmax((P W_Q)(P W_K)^T / sqrt(d_h)) (X W_V) in each head (Jelassi, Sander and Li, NeurIPS 2022).

    Queries and keys depend only on P, the model's learned position embedding, which is the same in each block and for
    each image. Values depend on X, the block's normed tokens. As in any timm model, P was added to the tokens before
    the first block. Weights have the names, shapes and initial values of timm's, with biases, which the paper does not
    have.

    The MACs are counted as for timm's attention, with a query and a key for each token of each image. In fact the
    images of a batch share queries and keys as long as all tokens are present, which is faster.

    Attributes:
        model: the timm model, whose `pos_embed` is P; set after the model is built. It is in a tuple, so that torch
            does not register the model as a submodule.
    """

    model: tuple[Any]

    def queries_keys(self, P: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, each (1 or B, H, T, C / H), of tokens at the positions (1 or B, T, C)."""
        weight = self.qkv.weight[: 2 * self.attn_dim]
        bias = None if self.qkv.bias is None else self.qkv.bias[: 2 * self.attn_dim]
        qk = F.linear(P, weight, bias).reshape(*P.shape[:2], 2, self.num_heads, self.head_dim)
        q, k = qk.permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q), self.k_norm(k)

    def values(self, x: Tensor) -> Tensor:
        """Return (B, H, T, C / H) of tokens (B, T, C)."""
        weight = self.qkv.weight[2 * self.attn_dim :]
        bias = None if self.qkv.bias is None else self.qkv.bias[2 * self.attn_dim :]
        return F.linear(x, weight, bias).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return (B, T, C) for tokens (B, T, C); UnsupportedError for masks."""
        if attn_mask is not None or is_causal:
            raise UnsupportedError("positional attention takes no mask")
        return attend(self, *qkv(self, x))


def positions_of(vit: Any, acting: Pass | None) -> Tensor:
    """Return the position embeddings of the current tokens.

    The shape is (1, P + N, C), for P class tokens and N patches, if all tokens are present, else (B, P + M, C).

    Raises:
        UnsupportedError: a token represents several patches, so it has no position.
    """
    embedding: Tensor = vit.pos_embed
    if acting is None or acting.index.shape[1] == embedding.shape[1] - vit.num_prefix_tokens:
        return embedding
    if not acting.whole and bool(((acting.index < 0) | (acting.sizes != 1)).any()):
        raise UnsupportedError(
            "positional attention needs one position for each token: tokens can be kept or removed, not fused, merged "
            "or mixed; use attention=content"
        )
    return F.embedding(tokens.with_prefix(acting.index, vit.num_prefix_tokens), embedding[0])


def is_plain(attn: nn.Module) -> bool:
    """Return whether the forward pass can be run in parts: plain or rotary attention of timm, or positional."""
    return type(attn) in (Attention, PositionalAttention, *ROTARY) and getattr(attn, "gate", None) is None


def qkv(attn: Any, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each (B, H, T, C / H), of the attention of (B, T, C) tokens.

    Queries and keys are already rotated. `rope` has the sines and cosines of the patch tokens, or is None; for
    positional attention it has the position embeddings, see `positions_of`.
    """
    if isinstance(attn, PositionalAttention):
        q, k = attn.queries_keys(attn.model[0].pos_embed if rope is None else rope)
        return q.expand(len(x), -1, -1, -1), k.expand(len(x), -1, -1, -1), attn.values(x)
    q, k, v = (part.unflatten(2, (-1, attn.head_dim)).transpose(1, 2) for part in _projections(attn, x))
    q, k = attn.q_norm(q), attn.k_norm(k)
    if rope is not None:
        q, k = (_rotated(attn, part, rope).type_as(v) for part in (q, k))
    groups = getattr(attn, "num_kv_groups", 1)
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return q, k, v


def queries_keys(attn: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys, each (B, H, T, C / H), of (B, T, C) tokens; the attention passed `check_parts`."""
    q, k = _part(attn, x, 0), _part(attn, x, 1)
    return attn.q_norm(q), attn.k_norm(k)


def values_of(attn: Any, x: Tensor) -> Tensor:
    """Return the values (B, H, T, C / H) of (B, T, C) tokens; the attention passed `check_parts`."""
    return _part(attn, x, 2)


def _part(attn: Any, x: Tensor, part: int) -> Tensor:
    """Return the queries, keys or values (part 0, 1 or 2) of tokens."""
    weight = attn.qkv.weight.chunk(3)[part]
    bias = None if attn.qkv.bias is None else attn.qkv.bias.chunk(3)[part]
    return F.linear(x, weight, bias).unflatten(2, (-1, attn.head_dim)).transpose(1, 2)


def check_parts(attn: Any) -> None:
    """Raise UnsupportedError unless queries, keys and values can be computed for different tokens."""
    if type(attn) is not Attention or type(attn.qkv) is not nn.Linear:
        raise UnsupportedError(
            f"in attention of type {type(attn).__name__} the values cannot be computed after the attention matrices, "
            "as the site maps needs"
        )


def fuse_maps(maps: Tensor, plan: Plan, sizes: Tensor, prefix: int) -> Tensor:
    """Return the (B, H, P + M, P + M) attention between the tokens after a plan, from (B, H, P + N, P + N).

    The rows (queries) of a group are combined as its tokens are. Its columns (keys) are added up, so that the rows
    still sum to 1; those of dropped tokens are left out.
    """
    if isinstance(plan, Mask | Shift):
        return maps  # in training all tokens stay
    B, H, T, _ = maps.shape
    rows = tokens.apply(plan, maps.transpose(1, 2).reshape(B, T, H * T), sizes, prefix)
    columns = rows.unflatten(2, (H, T)).permute(0, 3, 2, 1).flatten(2)  # (B, T, H (P + M))
    # Columns of a group are added up; those of a Keep are only gathered.
    ones = replace(plan, weight=torch.ones_like(sizes)) if isinstance(plan, Merge) else plan
    fused = tokens.apply(ones, columns, sizes, prefix)
    return fused.unflatten(2, (H, -1)).permute(0, 2, 3, 1)


def _projections(attn: Any, x: Tensor) -> Sequence[Tensor]:
    """Return queries, keys and values, each (B, T, width), from one layer of timm's attention or from three."""
    if attn.qkv is None:
        return attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)
    if getattr(attn, "q_bias", None) is None:
        return attn.qkv(x).chunk(3, dim=2)
    bias = torch.cat((attn.q_bias, attn.k_bias, attn.v_bias))
    return F.linear(x, attn.qkv.weight, bias).chunk(3, dim=2)


def _rotated(attn: Any, x: Tensor, rope: Tensor) -> Tensor:
    """Return (B, H, T, C / H) queries or keys with those of patches rotated."""
    P = attn.num_prefix_tokens
    patches = apply_rot_embed_cat(x[:, :, P:], rope, half=attn.rotate_half)
    return torch.cat([x[:, :, :P], patches], dim=2)


def gather_heads(q: Tensor, rows: Tensor) -> Tensor:
    """Return the rows (B, M) of (B, H, T, d) as (B, H, M, d). Gathering whole tokens is faster than by head."""
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
    soft: Tensor | None = None,
    rows: Tensor | None = None,
    maps: Tensor | None = None,
) -> Tensor:
    """Return the (B, Q, C) output of attention for Q queries, with the kernel that the module would use.

    Args:
        attn: the attention module.
        q: (B, H, Q, C / H) queries.
        k, v: (B, H, T, C / H) keys and values.
        bias: (B, 1, 1, T) added to the logits of the keys, or None.
        weights: (B, T) weights of the keys, see `masked_softmax`, or None.
        soft: (B, T) factors of e^(query . key), see `softmax`, or None.
        rows: (B, Q) positions of the queries' tokens among the keys; None if queries and keys have the same tokens.
        maps: (B, H, Q, T) the attention, if it is already known; queries and keys are then not used.
    """
    bias = None if bias is None else bias.to(q.dtype)
    own_keys = ALL if rows is None else rows
    if maps is not None:
        x = attn.attn_drop(maps.to(v.dtype)) @ v
    elif weights is None and soft is None and attn.fused_attn:
        drop = attn.attn_drop.p if attn.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=drop)
    else:
        A = softmax(q * attn.scale @ k.transpose(-2, -1), bias, weights, own_keys, soft)
        x = attn.attn_drop(A.to(v.dtype)) @ v
    x = x.transpose(1, 2).flatten(2)
    return attn.proj_drop(attn.proj(getattr(attn, "norm", nn.Identity())(x)))


def softmax(
    scores: Tensor, bias: Tensor | None, weights: Tensor | None, own_keys: OwnKeys, soft: Tensor | None = None
) -> Tensor:
    """Return (B, H, Q, T) attention for logits of this shape; bias, weights and own_keys as in `masked_softmax`.

    With (B, T) factors `soft` the attention is e^z soft, divided by its sum. As a bias log soft, a factor of 0 would
    have no gradient.
    """
    scores = scores if bias is None else scores + bias
    if soft is not None:
        e = (full(scores) - full(scores).amax(dim=-1, keepdim=True).detach()).exp() * soft[:, None, None]
        return e / e.sum(dim=-1, keepdim=True)
    return torch.softmax(scores, dim=-1) if weights is None else masked_softmax(scores, weights, own_keys)


def masked_softmax(scores: Tensor, weights: Tensor, own_keys: OwnKeys, eps: float = 1e-6) -> Tensor:
    """Return (B, H, Q, T) attention in which key j has the weight D_j, but 1 for its own query, in float32 or more.

    The attention is (e^(z_ij) G_ij + eps / T) / (sum_k e^(z_ik) G_ik + eps) with G_ij = 1 for i = j and D_j otherwise
    (DynamicViT, Rao et al. 2021, eq. 11). The largest z of each row is subtracted first. Unlike log D as a bias, D = 0
    has a gradient here.

    Args:
        scores: z, (B, H, Q, T).
        weights: D, (B, T).
        own_keys: position of each query's own key: (B, Q) or a slice of all keys; None if queries belong to no token.
        eps: prevents 0 / 0 in a row in which no key has a weight.
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
    soft: Tensor | None = None,
    present: Tensor | None = None,
    maps: Tensor | None = None,
) -> dict[str, Callable[[], Any]]:
    """Return a function for each field of the view that computes it from this block's attention.

    Args:
        attn: the attention module.
        q, k, v: (B, H, P + N, C / H) queries, keys and values.
        prefix: P, the number of class and register tokens.
        class_rows: number of class (and distillation) tokens among them.
        bias: (B, 1, 1, P + N) that this block adds to the logits of the keys, or None.
        weights: (B, P + N) weights of the keys, see `masked_softmax`, or None.
        soft: (B, P + N) factors of e^(query . key), see `softmax`, or None.
        present: (B, N) booleans, False for padding; None without padding.
        maps: (B, H, P + N, P + N) the attention, if it is already known.
    """
    block = _BlockAttention(attn, q, k, v, prefix, bias, weights, soft, present, maps)
    fields: dict[str, Callable[[], Any]] = {
        "queries": lambda: q[:, :, prefix:],
        "keys": lambda: k[:, :, prefix:],
        "values": lambda: v[:, :, prefix:],
        "attention_maps": block.maps,
        "received_attention": block.received,
        "mean_query_attention": block.of_mean_query,
    }
    if class_rows:
        fields["class_attention"] = lambda: block.of_class_rows(class_rows)
    fields["attention"] = fields["class_attention" if class_rows else "received_attention"]
    return fields


@dataclass(frozen=True, eq=False)
class _BlockAttention:
    """The attention of one block, from which fields of the view are computed. Attributes as in `fields_of`."""

    attn: Any
    q: Tensor
    k: Tensor
    v: Tensor
    prefix: int
    bias: Tensor | None
    weights: Tensor | None
    soft: Tensor | None
    present: Tensor | None
    known: Tensor | None

    def maps(self, images: slice = ALL) -> Tensor:
        """Return the (B, H, T, T) attention maps of some images of the batch."""
        if self.known is not None:
            return self.known[images]
        # Contiguous before the transposition: the product of transposed views would copy the keys one by one.
        keys = full(self.k[images]).contiguous().transpose(-2, -1)
        scores = full(self.q[images]) * self.attn.scale @ keys
        bias = None if self.bias is None else self.bias[images]
        weights = None if self.weights is None else self.weights[images]
        soft = None if self.soft is None else self.soft[images]
        return softmax(scores, bias, weights, ALL, soft)

    def received(self) -> Tensor:
        """Return the (B, N) attention that each patch receives, mean over heads and queries."""
        B = self.q.shape[0]
        H = self.q.shape[1]
        T = self.k.shape[2]
        # On a CPU the maps of a few images at a time stay in the cache.
        size = max(1, IN_CACHE // (H * T * T)) if self.q.device.type == "cpu" else B
        parts = []
        for start in range(0, B, size):
            images = slice(start, start + size)
            of_keys = self._query_mean(self.maps(images), 0, images)
            parts.append(of_keys.mean(dim=1))
        return torch.cat(parts)[:, self.prefix :]

    def of_mean_query(self) -> Tensor:
        """Return the (B, N) attention from the mean of the patches' queries, mean over heads."""
        query = self._query_mean(full(self.q), self.prefix)[:, :, None]
        return self._of_queries(query, None)

    def of_class_rows(self, rows: int) -> Tensor:
        """Return the (B, N) attention from the first tokens, mean over heads and these tokens."""
        return self._of_queries(self.q[:, :, :rows], slice(rows))

    def _of_queries(self, queries: Tensor, own_keys: OwnKeys) -> Tensor:
        """Return the (B, N) attention from (B, H, Q, C / H) queries, mean over heads and queries."""
        if self.known is not None and own_keys is not None:
            return self.known[:, :, own_keys].mean(dim=(1, 2))[:, self.prefix :]
        # For one row, multiplying and summing is several times faster than a matrix product.
        rows = [(query[:, :, None] * full(self.k)).sum(-1) for query in queries.unbind(2)]
        scores = torch.stack(rows, dim=2) * self.attn.scale
        attention = softmax(scores, self.bias, self.weights, own_keys, self.soft)
        return attention.mean(dim=(1, 2))[:, self.prefix :]

    def _query_mean(self, x: Tensor, first: int, images: slice = ALL) -> Tensor:
        """Return the weighted mean of (B, H, T, d) over the queries from number `first`, without padding."""
        x = x[:, :, first:]
        weights = self._query_weights()
        if weights is None:
            return x.mean(dim=2)
        real = weights[images, None, first:, None]
        return (x.masked_fill(real == 0, 0.0) * real).sum(dim=2) / real.sum(dim=2).clamp(min=1e-6)

    def _query_weights(self) -> Tensor | None:
        """Return (B, T): the weights as keys, or whether a token is no padding; None if all count alike."""
        if self.weights is not None or self.present is None:
            return self.weights
        return F.pad(self.present, (self.prefix, 0), value=True)
