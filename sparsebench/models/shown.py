"""What a strategy may see of a block's attention, and how it is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench.models.attention import masked_softmax

Fields = dict[str, Callable[[], Tensor | None]]


def given(
    attn: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    prefix: int,
    class_rows: int,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    there: Tensor | None = None,
) -> Fields:
    """Return how to make each field of the view from queries, keys and values (B, H, P + N, C / H) of a block.

    Args:
        attn: the attention, which knows its scale.
        q, k, v: v may be None where it cannot be had.
        prefix: P, the number of class and register tokens.
        class_rows: how many of them are class (and distillation) tokens.
        bias: (B, 1, 1, P + N) what this block adds to what keys are weighed by, or None.
        weights: (B, P + N) how much each key counts, see `masked_softmax`, or None.
        there: (B, N) booleans, which patch tokens are no padding; None for all.
    """
    P, T, added = prefix, k.shape[2], 0.0 if bias is None else bias

    def softmax(scores: Tensor, own: Callable[[], Tensor]) -> Tensor:
        scores = scores + added
        return torch.softmax(scores, dim=-1) if weights is None else masked_softmax(scores, weights, own())

    def eye() -> Tensor:
        return torch.eye(T, device=k.device, dtype=torch.bool)

    def maps() -> Tensor:
        return softmax(full(q) * attn.scale @ full(k).transpose(-2, -1), eye)

    def row(queries: Tensor, own: Callable[[], Tensor]) -> Tensor:
        # A product and a sum: for one row several times faster than a matrix product.
        scores = torch.stack([(one[:, :, None] * full(k)).sum(-1) for one in queries.unbind(2)], dim=2)
        return softmax(scores * attn.scale, own).mean(dim=(1, 2))[:, P:]

    def over_queries(x: Tensor, first: int) -> Tensor:
        """Return the mean of (B, H, T, d) over the queries from the `first` on, without padding, by what they count."""
        x = x[:, :, first:]
        if weights is not None:
            counts = weights
        elif there is not None:
            counts = F.pad(there, (P, 0), value=True)
        else:
            return x.mean(dim=2)
        real = counts[:, None, first:, None]
        return (x.masked_fill(real == 0, 0.0) * real).sum(dim=2) / real.sum(dim=2).clamp(min=1e-6)

    fields: Fields = {
        "queries": lambda: q[:, :, P:],
        "keys": lambda: k[:, :, P:],
        "attention_maps": maps,
        "received_attention": lambda: over_queries(maps(), 0).mean(dim=1)[:, P:],
        "mean_query_attention": lambda: row(over_queries(full(q), P)[:, :, None], lambda: torch.zeros_like(eye()[:1])),
    }
    if v is not None:
        fields["values"] = lambda: v[:, :, P:]
    if class_rows:
        fields["class_attention"] = lambda: row(q[:, :, :class_rows], lambda: eye()[:class_rows])
    fields["attention"] = fields["class_attention" if class_rows else "received_attention"]
    return fields


def observed(attn: Any, normed: Tensor, prefix: int, class_rows: int) -> tuple[Tensor, Fields]:
    """Run attention that cannot be taken apart as it is; take its queries and keys where it shows them."""
    seen: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name in ("q_norm", "k_norm"):
            hook = getattr(attn, name).register_forward_hook(lambda _m, _a, out, name=name: seen.__setitem__(name, out))
            stack.callback(hook.remove)
        attended = attn(normed)
    return attended, given(attn, seen["q_norm"], seen["k_norm"], None, prefix, class_rows)


def in_full(make: Callable[[], Tensor | None]) -> Tensor | None:
    """Return what is made, in float32 where that is bfloat16."""
    made = make()
    return None if made is None else full(made)


def full(x: Tensor) -> Tensor:
    """Return it in float32 where it is bfloat16."""
    return x.float() if x.dtype == torch.bfloat16 else x
