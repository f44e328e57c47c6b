"""What a strategy may see of a block's attention, and how it is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

Fields = dict[str, Callable[[], Tensor | None]]

IN_CACHE = 2**18
"""Numbers of attention maps that are made at a time on a CPU, where only their mean is wanted: 1 MiB."""


def given(
    attn: Any, q: Tensor, k: Tensor, v: Tensor | None, prefix: int, class_rows: int, bias: Tensor | None = None
) -> Fields:
    """Return how to make each field of the view from queries, keys and values (B, H, P + N, C / H) of a block.

    Args:
        attn: the attention, which knows its scale.
        q, k, v: v may be None where it cannot be had.
        prefix: P, the number of class and register tokens.
        class_rows: how many of them are class (and distillation) tokens.
        bias: (B, 1, 1, P + N) what this block adds to what keys are weighed by, or None.
    """
    P = prefix

    def weighed(scores: Tensor, images: slice = slice(None)) -> Tensor:
        return torch.softmax(scores if bias is None else scores + bias[images], dim=-1)

    def maps(images: slice = slice(None)) -> Tensor:
        # Keys lie head by head before they are turned: a product of turned views would copy them number by number.
        scores = _full(q[images]) * attn.scale @ _full(k[images]).contiguous().transpose(-2, -1)
        return weighed(scores, images)

    def received() -> Tensor:
        B, H, T, _ = q.shape
        some = max(1, IN_CACHE // (H * T * T)) if q.device.type == "cpu" else B
        return torch.cat([maps(slice(i, i + some)).mean(dim=(1, 2)) for i in range(0, B, some)])[:, P:]

    def row(queries: Tensor) -> Tensor:
        # A product and a sum: for one row several times faster than a matrix product.
        scores = torch.stack([(one[:, :, None] * _full(k)).sum(-1) for one in queries.unbind(2)], dim=2)
        return weighed(scores * attn.scale).mean(dim=(1, 2))[:, P:]

    fields: Fields = {
        "queries": lambda: q[:, :, P:],
        "keys": lambda: k[:, :, P:],
        "attention_maps": maps,
        "received_attention": received,
        "mean_query_attention": lambda: row(_full(q)[:, :, P:].mean(dim=2, keepdim=True)),
    }
    if v is not None:
        fields["values"] = lambda: v[:, :, P:]
    if class_rows:
        fields["class_attention"] = lambda: row(q[:, :, :class_rows])
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
    return None if made is None else _full(made)


def _full(x: Tensor) -> Tensor:
    return x.float() if x.dtype == torch.bfloat16 else x
