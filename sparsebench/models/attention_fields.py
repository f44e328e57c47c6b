"""What a strategy may see of a block's attention, and how it is made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsebench.models.attention import masked_softmax

Fields = dict[str, Callable[[], Any]]

NAMES = frozenset(
    {"queries", "keys", "values", "attention", "class_attention", "received_attention", "mean_query_attention",
     "attention_maps"}
)  # fmt: skip
"""What `fields_of` can give."""
IN_CACHE = 2**18
"""Numbers of attention maps that are made at a time on a CPU, where only their mean is wanted: 1 MiB."""


@dataclass(frozen=True, eq=False)
class _Attention:
    """A block's attention, of which single parts are made. See `fields_of` for what it is made of."""

    scale: float
    q: Tensor
    k: Tensor
    prefix: int
    bias: Tensor | None
    weights: Tensor | None
    present: Tensor | None

    def softmax(
        self, scores: Tensor, diagonal: Callable[[], Tensor], start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return attention for the scores (B, H, Q, T) of some images; `diagonal`: which key is the query's."""
        scores = scores if self.bias is None else scores + self.bias[start:stop]
        if self.weights is None:
            return torch.softmax(scores, dim=-1)
        return masked_softmax(scores, self.weights[start:stop], diagonal())

    def eye(self) -> Tensor:
        """Return (T, T) booleans, True on the diagonal."""
        return torch.eye(self.k.shape[2], device=self.k.device, dtype=torch.bool)

    def maps(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return (B, H, T, T) of some images."""
        # Keys lie head by head before they are turned: a product of turned views would copy them number by number.
        q, k = full(self.q[start:stop]), full(self.k[start:stop])
        scores = q * self.scale @ k.contiguous().transpose(-2, -1)
        return self.softmax(scores, self.eye, start, stop)

    def received_attention(self) -> Tensor:
        """Return (B, N), what each patch receives, mean over heads and queries."""
        B, H, T, _ = self.q.shape
        size = max(1, IN_CACHE // (H * T * T)) if self.q.device.type == "cpu" else B
        parts = [(i, i + size) for i in range(0, B, size)]
        means = [self._over_queries(self.maps(*part), 0, *part).mean(dim=1) for part in parts]
        return torch.cat(means)[:, self.prefix :]

    def class_rows(self, number: int) -> Tensor:
        """Return (B, N), what the first `number` tokens give each patch, mean over heads."""
        return self._row(self.q[:, :, :number], lambda: self.eye()[:number])

    def mean_query(self) -> Tensor:
        """Return (B, N), what the mean query of the patches gives each of them, mean over heads."""
        query = self._over_queries(full(self.q), self.prefix)[:, :, None]
        return self._row(query, lambda: torch.zeros_like(self.eye()[:1]))

    def _row(self, queries: Tensor, diagonal: Callable[[], Tensor]) -> Tensor:
        # A product and a sum: for one row several times faster than a matrix product.
        scores = torch.stack([(one[:, :, None] * full(self.k)).sum(-1) for one in queries.unbind(2)], dim=2)
        return self.softmax(scores * self.scale, diagonal).mean(dim=(1, 2))[:, self.prefix :]

    def _over_queries(self, x: Tensor, first: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the mean of (B, H, T, d) over the queries from the `first` on, by what they count, without padding."""
        x = x[:, :, first:]
        if self.weights is not None:
            counts = self.weights
        elif self.present is not None:
            counts = F.pad(self.present, (self.prefix, 0), value=True)
        else:
            return x.mean(dim=2)
        real = counts[start:stop, None, first:, None]
        return (x.masked_fill(real == 0, 0.0) * real).sum(dim=2) / real.sum(dim=2).clamp(min=1e-6)


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
) -> Fields:
    """Return how to make each field of the view from queries, keys and values (B, H, P + N, C / H) of a block.

    Args:
        attn: the attention, which knows its scale.
        prefix: P, the number of class and register tokens.
        class_rows: how many of them are class (and distillation) tokens.
        bias: (B, 1, 1, P + N) what this block adds to what keys are weighed by, or None.
        weights: (B, P + N) how much each key counts, see `masked_softmax`, or None.
        present: (B, N) booleans, which patch tokens are no padding; None for all.
    """
    P, attention = prefix, _Attention(attn.scale, q, k, prefix, bias, weights, present)
    fields: Fields = {
        "queries": lambda: q[:, :, P:],
        "keys": lambda: k[:, :, P:],
        "values": lambda: v[:, :, P:],
        "attention_maps": attention.maps,
        "received_attention": attention.received_attention,
        "mean_query_attention": attention.mean_query,
    }
    if class_rows:
        fields["class_attention"] = lambda: attention.class_rows(class_rows)
    fields["attention"] = fields["class_attention" if class_rows else "received_attention"]
    return fields


def in_full(make: Callable[[], Any]) -> Any:
    """Return what is made, in float32 where that is a tensor in half precision."""
    made = make()
    return full(made) if isinstance(made, Tensor) else made


def full(x: Tensor) -> Tensor:
    """Return it in float32 where it is in half precision."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
