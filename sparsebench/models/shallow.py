"""The shallow Vision Transformer of Li et al. (ICLR 2023), eq. (1), with tokens really removed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.errors import UnsupportedError
from sparsebench.measure.cost import ShallowCost
from sparsebench.models.acting import Pass
from sparsebench.strategy import Keep
from sparsebench.tokens import gather


class ShallowViT(nn.Module):
    """F(X) = (1 / |S|) sum_(l in S) a_(l)^T ReLU(W_O W_V X softmax(X^T W_K^T W_Q x_l)), one scalar a sample.

    Scores are not divided by sqrt(m_b). The output weights a_(l), one vector a position, are frozen at +-1/sqrt(m).
    A token outside S is gone from the softmax keys, from the sum over l, and from 1 / |S|.

    Args:
        rng: the source of the initial weights.
        patterns: (d, M) the data's patterns mu_1..mu_M as columns.
        tokens: L, tokens a sample.
        m: neurons.
        sigma: error of the initial value matrix, ||W_V mu_j - p_j||.
        delta: error of the initial query and key matrices, ||W_Q mu_j - r_j||.
        xi: standard deviation of the initial W_O.
    """

    grid = None
    attention_source = "received"
    a: Tensor

    def __init__(
        self,
        rng: np.random.Generator,
        patterns: np.ndarray,
        tokens: int,
        *,
        m: int,
        sigma: float,
        delta: float,
        xi: float,
    ):
        super().__init__()
        d = patterns.shape[0]
        basis = complete(rng, patterns)
        rotation = np.linalg.qr(rng.standard_normal((d, d)))[0]
        self.W_V = _parameter((rotation + sigma * _unit_columns(rng, d)) @ basis.T)
        self.W_K = _parameter((np.eye(d) + delta * _unit_columns(rng, d)) @ basis.T)
        self.W_Q = _parameter(self.W_K.detach().numpy())
        self.W_O = _parameter(xi * rng.standard_normal((m, d)))
        self.register_buffer("a", torch.tensor(rng.choice([-1.0, 1.0], (tokens, m)) / m**0.5, dtype=torch.float32))
        self.cost = ShallowCost(tokens, d, d, d, m)

    @property
    def module(self) -> ShallowViT:
        """The torch module that holds the weights: itself."""
        return self

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        """Return F(X), (B,), for tokens X of shape (B, L, d)."""
        a = self.a.expand(X.shape[0], -1, -1)
        if acting is not None and (index := self._choose(acting, X)) is not None:
            X, a = gather(X, index), self.a[index]
        hidden = torch.relu(self._attention(X) @ (X @ self.W_V.T) @ self.W_O.T)
        return (hidden * a).sum(dim=2).mean(dim=1)

    def _attention(self, X: Tensor) -> Tensor:
        """Return (B, L, L), row l the attention of token l over all tokens."""
        return torch.softmax(X @ self.W_Q.T @ (X @ self.W_K.T).transpose(1, 2), dim=2)

    def _choose(self, acting: Pass, X: Tensor) -> Tensor | None:
        """Return the (B, M) positions in S, or None where all tokens stay."""

        def received() -> Tensor:
            return self._attention(X).mean(dim=1)

        given: dict[str, Callable[[], Tensor | None]] = {
            "tokens": lambda: X,
            "queries": lambda: (X @ self.W_Q.T)[:, None],
            "keys": lambda: (X @ self.W_K.T)[:, None],
            "values": lambda: (X @ self.W_V.T)[:, None],
            "attention": received,
            "received_attention": received,
            "pixels": lambda: None,
        }
        scoring = self.cost.scoring(acting.requires) if acting.acts(0) else ""
        plan = acting.decide(0, given)
        acting.went(X.shape[1], early=plan is not None, scoring=scoring)
        if plan is None:
            return None
        if not isinstance(plan, Keep) or plan.fuse is not None:
            raise UnsupportedError(
                "the shallow model reads each position out with a vector of its own: tokens can be kept or removed, "
                "not fused, merged or mixed"
            )
        return plan.index


def complete(rng: np.random.Generator, columns: np.ndarray) -> np.ndarray:
    """Return (d, d) orthonormal columns that begin with the (d, M) orthonormal ones given."""
    d, M = columns.shape
    q, r = np.linalg.qr(np.concatenate([columns, rng.standard_normal((d, d - M))], axis=1))
    return q * np.sign(np.diag(r))


def _unit_columns(rng: np.random.Generator, d: int) -> np.ndarray:
    error = rng.standard_normal((d, d))
    return error / np.linalg.norm(error, axis=0)


def _parameter(value: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float32))
