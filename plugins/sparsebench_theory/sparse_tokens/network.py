"""The single-layer attention classifier of Barnfield, Cui and Lu (ICLR 2026): one query, one read-out."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.models.actor import Pass, SplitPass
from sparsebench_theory.models import Attention, OneQueryCost
from sparsebench_theory.one_layer import Fields, OneLayer


class OneQueryPool(OneLayer):
    """f(X) = sum_(l in S) softmax_l(<q, x_l>) <w, x_l> + b, one scalar per sample.

    Tokens outside S are removed from the softmax and the sum. All weights start at 0, so that the first step changes
    only w and b, and the second also the query q.

    Args:
        tokens: L, tokens per sample.
        xi: (d,) the direction of the signal, only for measuring the alignment of q.
        attention: "frozen" keeps q at 0, so that f is linear in the mean of the tokens.
    """

    because = "the one-query model is a theory of plain tokens"
    shows: ClassVar = {"alignment": "cosine"}
    xi: Tensor

    def __init__(self, tokens: int, xi: np.ndarray, *, attention: Attention):
        super().__init__()
        d = len(xi)
        self.q = nn.Parameter(torch.zeros(d), requires_grad=attention == "trained")
        self.head = nn.Linear(d, 1)
        for weight in self.head.parameters():
            nn.init.zeros_(weight)
        self.register_buffer("xi", torch.from_numpy(xi.copy()), persistent=False)
        self.cost = OneQueryCost(tokens, d)

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        """Return f(X), (B,), for tokens X of shape (B, N, d)."""
        X, _ = self.keep(acting, X)
        return (self.attention(X) * self.head(X).squeeze(2)).sum(dim=1)

    def attention(self, X: Tensor) -> Tensor:
        """Return (B, N), the attention of the query over the tokens."""
        return torch.softmax(X @ self.q, dim=1)

    def fields(self, X: Tensor) -> Fields:
        """See `OneLayer.fields`."""
        return {"keys": lambda: X[:, None], "values": lambda: X[:, None], "attention": lambda: self.attention(X)}

    def observe(self, train: SplitPass, test: SplitPass) -> dict[str, float]:
        """Return |cos(q, xi)|; 0 while q is 0."""
        return {"alignment": abs(float(nn.functional.cosine_similarity(self.q.double(), self.xi.double(), dim=0)))}
