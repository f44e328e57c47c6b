"""The Vision Transformer with positional attention of Jelassi, Sander and Li (NeurIPS 2022)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench.models.actor import Pass, SplitPass
from sparsebench_theory.models import Attention, PositionalCost
from sparsebench_theory.one_layer import Fields, OneLayer
from sparsebench_theory.spatial.task import association


class PositionalViT(OneLayer):
    """F(X) = sum_(m in S) act(scale * sum_(j in S) softmax_j(A_mj) <v, X_j>), act(x) = x^power + nu x.

    A_ij stands for the product of two position encodings, so the attention does not depend on the sample. The diagonal
    of A is fixed at ln ln d, so that initially each position attends to itself ln d times as much as to another. Tokens
    outside S are removed from both sums and from the softmax.

    Args:
        rng: the generator of the initial weights.
        tokens: D, number of positions.
        feature: (d,) w*, only for measuring the alignment of v.
        power, nu: parameters of the activation.
        scale: factor before the activation; D in the theory, 1 in the published code.
        first: standard deviation of the initial v, and of A off the diagonal.
        attention: "frozen" trains only v.
    """

    because = "the positional model has a score for each pair of positions"
    shows: ClassVar = {
        "association": "fraction",
        "in_group_mass": "fraction",
        "in_group_lead": "score",
        "alignment": "cosine",
    }
    feature: Tensor
    eye: Tensor

    def __init__(
        self,
        rng: np.random.Generator,
        tokens: int,
        feature: np.ndarray,
        *,
        power: int,
        nu: float,
        scale: float,
        first: float,
        attention: Attention,
    ):
        super().__init__()
        d = len(feature)
        self.A = nn.Parameter(torch.from_numpy(first * rng.standard_normal((tokens, tokens))).float())
        self.A.requires_grad_(attention == "trained")
        self.head = nn.Linear(d, 1, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(first * rng.standard_normal((1, d))))
        self.register_buffer("feature", torch.from_numpy(np.ascontiguousarray(feature)), persistent=False)
        self.register_buffer("eye", torch.eye(tokens, dtype=torch.bool), persistent=False)
        self.power, self.nu, self.scale, self.diagonal = power, nu, scale, math.log(math.log(d))
        self.cost = PositionalCost(tokens, d)

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        """Return F(X), (B,), for tokens X of shape (B, D, d)."""
        X, index = self.keep(acting, X)
        values = self.head(X).squeeze(2)
        gathered = self.scale * (values @ self.attention().T if index is None else self._among(index, values))
        return (gathered**self.power + self.nu * gathered).sum(dim=1)

    def _among(self, index: Tensor, kept_values: Tensor) -> Tensor:
        """Return (B, M), the attention-weighted mean over S of the (B, M) values, for each token of S.

        It is computed by two products with the (D, D) exponentials and 0 outside S, which is faster than a matrix for
        each sample.
        """
        scores = self.scores()
        weights = torch.exp(scores - scores.amax(dim=1, keepdim=True)).T
        present = kept_values.new_zeros(len(index), len(scores)).scatter(1, index, 1.0)
        values = torch.zeros_like(present).scatter(1, index, kept_values)
        return (values @ weights).gather(1, index) / (present @ weights).gather(1, index)

    def scores(self) -> Tensor:
        """Return (D, D), A with its fixed diagonal."""
        return self.A.masked_fill(self.eye, self.diagonal)

    def attention(self) -> Tensor:
        """Return (D, D), row m the attention of position m over all positions."""
        return torch.softmax(self.scores(), dim=1)

    def fields(self, X: Tensor) -> Fields:
        """See `OneLayer.fields`; the attention does not depend on the sample."""
        return {
            "values": lambda: self.head(X)[:, None],
            "attention": lambda: self.attention().mean(dim=0).expand(len(X), -1),
        }

    def observe(self, train: SplitPass, test: SplitPass) -> dict[str, float]:
        """Return patch association, in-group mass and lead, and the cosine of v and w*.

        The sets of positions are derived from the relevance masks of the test. Positions that are never relevant there
        are left out. Association is the share of positions whose largest scores, including their own, are those of
        their set. Mass is the share of the attention inside the set. Lead is the mean of A inside the set, without the
        diagonal, minus its mean outside; it is 0 if sets have one position, or all positions.
        """
        assert test.relevance is not None
        together = test.relevance.T @ test.relevance > 0
        relevant = together.any(dim=1)
        v = self.head.weight[0]
        inside, outside = together & ~self.eye, ~together & relevant[:, None]
        comparable = bool(inside.any()) and bool(outside.any())
        return {
            "association": association(self.scores().cpu().numpy(), together.cpu().numpy()),
            "in_group_mass": float((self.attention() * together)[relevant].sum(dim=1).double().mean()),
            "in_group_lead": float(self.A[inside].double().mean() - self.A[outside].double().mean())
            if comparable
            else 0.0,
            "alignment": float(torch.nn.functional.cosine_similarity(v, self.feature, dim=0)),
        }

    def trained_values(self, first: Mapping[str, Tensor], test: SplitPass) -> dict[str, tuple[float, ...]]:
        """Return A with its fixed diagonal, row by row."""
        return {"scores": tuple(self.scores().flatten().tolist())}
