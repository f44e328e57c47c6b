"""The single-layer attention classifier of Barnfield, Cui and Lu (ICLR 2026): one query, one read-out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.models.actor import Pass
from sparsebench.models.shown import SplitPass, finite, in_chunks, kept_only
from sparsebench.strategy.tokens import gather
from sparsebench_theory.models import Attention, OneQueryCost


class OneQueryPool(nn.Module):
    """f(X) = sum_(l in S) softmax_l(<q, x_l>) <w, x_l> + b, one scalar a sample.

    A token outside S is gone from the softmax and the sum. All weights begin at 0, so that the first step moves w and b
    alone, and the second the query q too.

    Args:
        tokens: L, tokens a sample.
        xi: (d,) the direction of the signal, only to say how near q comes to it.
        attention: "frozen" leaves q at 0, where f is linear in the mean of the tokens.
    """

    grid = None
    attention_source = "received"
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

    @property
    def module(self) -> OneQueryPool:
        """The torch module that holds the weights: itself."""
        return self

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        """Return f(X), (B,), for tokens X of shape (B, N, d)."""
        index = None if acting is None else self.choose(acting, X)
        X = (X if index is None else gather(X, index)).to(self.q.dtype)
        return (self.attention(X) * self.head(X).squeeze(2)).sum(dim=1)

    def attention(self, X: Tensor) -> Tensor:
        """Return (B, N), the attention of the query over the tokens."""
        return torch.softmax(X @ self.q, dim=1)

    def choose(self, acting: Pass, X: Tensor) -> Tensor | None:
        """Return the (B, M) positions in S, or None where all tokens stay."""
        X = X.to(self.q.dtype)

        def attention() -> Tensor:
            return finite(self.attention(X))

        given: dict[str, Callable[[], Any]] = {
            "tokens": lambda: X,
            "keys": lambda: X[:, None],
            "values": lambda: X[:, None],
            "attention": attention,
            "received_attention": attention,
            "pixels": lambda: None,
            "outputs": lambda: in_chunks(lambda tokens, _: finite(self(tokens)), len(X)),
        }
        return kept_only(acting, self.cost, X.shape[1], given, "the one-query model is a theory of plain tokens")

    def observe(self, train: SplitPass, test: SplitPass) -> dict[str, float]:
        """Return |cos(q, xi)|; 0 while q is 0."""
        return {"alignment": abs(float(nn.functional.cosine_similarity(self.q.double(), self.xi.double(), dim=0)))}

    def trained_values(self, first: Mapping[str, Tensor], test: SplitPass) -> dict[str, tuple[float, ...]]:
        """Return nothing: the alignment says all."""
        return {}
