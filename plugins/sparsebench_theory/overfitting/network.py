"""The two-layer Vision Transformer of Jiang et al. (NeurIPS 2024): softmax attention and a linear head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.models.actor import Actor, Pass, SplitPass
from sparsebench.tasks.base import Recipe
from sparsebench.training.loop import Training
from sparsebench.training.steps import Samples, Steps
from sparsebench_theory.models import TwoLayerCost
from sparsebench_theory.one_layer import Fields, OneLayer


class TwoLayerViT(OneLayer):
    """f(X) = (1 / |S|) sum_(l in S) softmax(x_l^T W_Q W_K^T X^T) X W_V w_O, one scalar per sample.

    Scores are not divided by sqrt(d_h); w_O is frozen. Tokens outside S are removed from keys, values and the mean over
    l.

    Args:
        rng: the generator of the initial weights.
        tokens: tokens per sample.
        d: width of a token.
        d_h, d_v: widths of queries and keys, and of values.
        shrink: initial W_Q, W_K and W_V are U(+-1 / sqrt(d)) divided by this; w_O is U(+-1 / sqrt(d_v)).
    """

    because = "the two-layer model is a theory of plain tokens"
    shows: ClassVar = {
        "train_loss_then": "loss",
        "attention_on_relevant": "fraction",
        "attention_on_noise": "fraction",
        "value_of_signal": "margin",
        "value_of_noise": "margin",
        "score_of_signal": "score",
        "score_of_noise": "score",
    }
    w_O: Tensor  # noqa: N815

    def __init__(self, rng: np.random.Generator, tokens: int, d: int, *, d_h: int, d_v: int, shrink: float):
        super().__init__()

        def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
            return torch.from_numpy((2 * rng.random(shape, dtype=np.float32) - 1) * np.float32(bound))

        edge = d**-0.5 / shrink
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(uniform((d, width), edge)) for width in (d_h, d_h, d_v))
        self.register_buffer("w_O", uniform((d_v,), d_v**-0.5))
        self.cost = TwoLayerCost(tokens, d, d_h, d_v)

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        """Return f(X), (B,), for tokens X of shape (B, N, d)."""
        X, _ = self.keep(acting, X)
        attention = self.attention(X).mean(dim=1)
        return (attention * (X @ (self.W_V @ self.w_O))).sum(dim=1)

    def trainer(self, actor: Actor | None, samples: Samples, recipe: Recipe) -> Steps | None:
        """Return steps in the span of the tokens, if they are faster; see `Network`."""
        from sparsebench_theory.overfitting import gram

        return gram.InSpan(self, actor, samples, recipe) if gram.applies(self, samples, recipe) else None

    @staticmethod
    def train_together(trainings: Sequence[Training]) -> None:
        """See `Network`."""
        from sparsebench_theory.together import train_together

        train_together(trainings)

    def attention(self, X: Tensor) -> Tensor:
        """Return (B, N, N), row l the attention of token l over all tokens."""
        return torch.softmax((X @ self.W_Q) @ (X @ self.W_K).mT, dim=2)

    def fields(self, X: Tensor, computed: tuple[Tensor, Tensor] | None = None) -> Fields:
        """See `OneLayer.fields`; `computed` are the queries and keys X W_Q and X W_K, (B, N, d_h), if known."""

        def queries() -> Tensor:
            return X @ self.W_Q if computed is None else computed[0]

        def keys() -> Tensor:
            return X @ self.W_K if computed is None else computed[1]

        return {
            "queries": lambda: queries()[:, None],
            "keys": lambda: keys()[:, None],
            "values": lambda: (X @ self.W_V)[:, None],
            "attention": lambda: torch.softmax(queries() @ keys().mT, dim=2).mean(dim=1),
        }

    def observe(self, train: SplitPass, test: SplitPass) -> dict[str, float]:
        """Return the dynamics of the paper's Figures 2 and 3, means over the training samples, without removal.

        They are the training loss, and of the signal token and the token of strong noise (the longest other one) the
        attention, the values y x^T W_V w_O, and the scores as keys of the signal.
        """
        X, y = train.inputs.to(self.W_Q.dtype), 2 * train.labels - 1
        row = torch.arange(len(X), device=X.device)
        assert train.relevance is not None
        signal = train.relevance.argmax(dim=1)
        noise = (X.norm(dim=2) * (1 - train.relevance)).argmax(dim=1)
        v = self.W_V @ self.w_O
        attention = self.attention(X).mean(dim=1)
        query, keys = (X @ self.W_Q)[row, signal], X @ self.W_K
        margins = y * self(X)
        means = {
            "train_loss_then": nn.functional.softplus(-margins),
            "attention_on_relevant": attention[row, signal],
            "attention_on_noise": attention[row, noise],
            "value_of_signal": y * (X[row, signal] @ v),
            "value_of_noise": y * (X[row, noise] @ v),
            "score_of_signal": (query * keys[row, signal]).sum(dim=1),
            "score_of_noise": (query * keys[row, noise]).sum(dim=1),
        }
        return {name: float(values.double().mean()) for name, values in means.items()}
