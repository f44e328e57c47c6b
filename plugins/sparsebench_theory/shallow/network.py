"""The shallow Vision Transformer of Li et al. (ICLR 2023), eq. (1), with removal of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from sparsebench.models.actor import Actor, Pass, SplitPass
from sparsebench.tasks.base import Recipe
from sparsebench.training.loop import Training
from sparsebench.training.steps import Samples, Steps, losses
from sparsebench_theory.models import PRUNED, Attention, Init, ShallowCost
from sparsebench_theory.one_layer import Fields, OneLayer

C0 = 0.01
"""The token noise c0 in the paper's formulas of the initial weights."""

HINGE = Recipe("hinge", "sgd", lr=0.0, batch=0, epochs=0, steps=0)


@dataclass(frozen=True)
class FirstWeights:
    """The distribution of the first weights.

    Attributes:
        sigma: error of the value matrices, ||W_V mu_j - p_j||.
        delta: error of the query and key matrices, ||W_Q mu_j - r_j||.
        xi: standard deviation of W_O.
        init: kind of the errors, see `of_head`.
    """

    sigma: float
    delta: float
    xi: float
    init: Init = "assumption"

    def of_head(self, rng: np.random.Generator, basis: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return W_Q = W_K and W_V of a head. The patterns are the first columns of the (d, d) basis B.

        U is a random rotation, E has random unit columns, p_j = U e_j, and q_j = r_j = e_j:
        "assumption": (I + delta E_K) B^T and (U + sigma E_V) B^T, which meet Assumption 1;
        "scale": (1 - delta) B^T and (1 - sigma) U B^T, errors of the same size in length only;
        "worst": as "assumption", but the error of a discriminative pattern is sigma p_k, k the class of opposite signs;
        "literal": delta^2 I / c0^2 and sigma^2 U / c0^2, as printed in the paper, which contradict Assumption 1.
        """
        d, sigma, delta = len(basis), self.sigma, self.delta
        rotation = np.linalg.qr(rng.standard_normal((d, d)))[0]
        if self.init == "scale":
            return (1 - delta) * basis.T, (1 - sigma) * rotation @ basis.T
        if self.init == "literal":
            return delta**2 / C0**2 * np.eye(d), sigma**2 / C0**2 * rotation
        error = _unit_columns(rng, d)
        if self.init == "worst":
            error[:, :classes] = rotation[:, classes - 1 :: -1]
        return (np.eye(d) + delta * _unit_columns(rng, d)) @ basis.T, (rotation + sigma * error) @ basis.T


class ShallowViT(OneLayer):
    """F(X) = (1 / |S|) sum_(l in S) a_(l)^T ReLU(W_O W_V X softmax(X^T W_K^T W_Q x_l)), one scalar per sample.

    Scores are not divided by sqrt(m_b). The output weights a_(l), one vector per position, are frozen at +-1/sqrt(m).
    Tokens outside S are removed from the softmax keys, from the sum over l, and from 1 / |S|. The variants are those of
    Appendix G: the outputs W_V X softmax(..) of the H heads are concatenated before W_O; a skip connection adds x_l to
    each; four classes have two outputs, each with its own a.

    Args:
        rng: the generator of the initial weights.
        patterns: (d, M) the patterns mu_1..mu_M of the data, as columns.
        tokens: L, tokens per sample.
        m: number of neurons.
        first: the distribution of the first weights.
        attention: "frozen" does not train W_Q and W_K (Proposition 1).
        heads: H, each with its own W_Q, W_K and W_V, (d, d), drawn independently.
        skip: whether x_l is added to the output of each head for token l.
        repacked: whether kept tokens are read out at the first positions; otherwise at their own.
        outputs: O, 1 for two classes or 2 for four.
    """

    because = "the shallow model reads each position out with a vector of its own"
    shows: ClassVar = {"attention_on_relevant": "fraction"}
    a: Tensor

    def __init__(
        self,
        rng: np.random.Generator,
        patterns: np.ndarray,
        tokens: int,
        *,
        m: int,
        first: FirstWeights,
        attention: Attention = "trained",
        heads: int = 1,
        skip: bool = False,
        repacked: bool = False,
        outputs: int = 1,
    ):
        super().__init__()
        d = patterns.shape[0]
        basis = complete(rng, patterns)
        matrices = [first.of_head(rng, basis, 2 * outputs) for _ in range(heads)]
        W_QK, W_V = (np.stack(heads_of) for heads_of in zip(*matrices, strict=True))
        self.W_V = _parameter(W_V)
        self.W_K, self.W_Q = (_parameter(W_QK).requires_grad_(attention == "trained") for _ in range(2))
        self.W_O = _parameter(first.xi * rng.standard_normal((m, heads * d)))
        signs = rng.choice([-1.0, 1.0], (outputs, tokens, m))
        self.register_buffer("a", torch.tensor(signs / m**0.5, dtype=torch.float32))
        self.heads, self.skip, self.repacked = heads, skip, repacked
        self.cost = ShallowCost(tokens, d, d, d, m, heads, outputs)

    @property
    def plain(self) -> bool:
        """Whether it is eq. (1) without variants: one head, no skip connection, one output."""
        return self.heads == 1 and not self.skip and len(self.a) == 1

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        """Return F(X), (B,) or with two outputs (B, 2), for tokens X of shape (B, L, d)."""
        X, index = self.keep(acting, X)
        places = None if index is None else self.places(index)
        mixed = self.attention(X) @ self._by_head(X, self.W_V)
        if self.skip:
            mixed = mixed + X[:, None]
        hidden = (mixed.transpose(1, 2).flatten(2) @ self.W_O.T).relu_()
        read_out = self.a if places is None else [embedding(places, a) for a in self.a]  # faster than a[places]
        F = [(hidden * a).sum(dim=2).mean(dim=1) for a in read_out]
        return F[0] if len(F) == 1 else torch.stack(F, dim=1)

    def trainer(self, actor: Actor | None, samples: Samples, recipe: Recipe) -> Steps | None:
        """Return the closed form if it applies, otherwise None; see `Network`."""
        from sparsebench_theory.shallow import closed_form  # imports numba

        applies = closed_form.applies(self, recipe)
        return closed_form.ClosedForm(self, actor, samples, recipe) if applies else None

    @staticmethod
    def train_together(trainings: Sequence[Training]) -> None:
        """See `Network`."""
        from sparsebench_theory.together import train_together

        train_together(trainings)

    def places(self, index: Tensor) -> Tensor:
        """Return the (B, M) read-out positions of the kept tokens; `index` are their (B, M) input positions."""
        return torch.arange(index.shape[1], device=index.device).expand_as(index) if self.repacked else index

    def attention(self, X: Tensor) -> Tensor:
        """Return (B, H, L, L), row l the attention of token l over all tokens."""
        return torch.softmax(self._by_head(X, self.W_Q) @ self._by_head(X, self.W_K).mT, dim=3)

    def observe(self, train: SplitPass, test: SplitPass) -> dict[str, float]:
        """Return the share of the attention on relevant tokens in the test (Li et al. 2023, Fig. 4).

        It is the mean over samples, heads and attending tokens; with a strategy, only over kept tokens.
        """
        assert test.relevance is not None
        X, index = self.keep(test.acting, test.inputs)
        relevant = test.relevance if index is None else test.relevance.gather(1, index)
        shares = (self.attention(X) * relevant[:, None, None, :]).sum(dim=3).mean(dim=(1, 2))
        return {"attention_on_relevant": float(shares.double().mean())}

    def trained_values(self, first: Mapping[str, Tensor], test: SplitPass) -> dict[str, tuple[float, ...]]:
        """Return the singular values of the updates, and test losses without neurons (Li et al., arXiv 2406.17167).

        The updates are those of W_Q, W_K and W_V, with heads stacked as rows; the largest values come first. The test
        losses are mean hinge losses without the share, see PRUNED, of the neurons with the shortest rows of W_O, or
        with the longest.
        """
        values = {
            f"singular_{name}": torch.linalg.svdvals((getattr(self, name) - first[name]).flatten(0, 1).double())
            for name in ("W_Q", "W_K", "W_V")
        }
        order = self.W_O.norm(dim=1).argsort(stable=True)
        for which, ranked in (("short", order), ("long", order.flip(0))):
            values[f"loss_without_{which}"] = torch.stack([
                self._loss_without(ranked[: round(share * len(ranked))], test) for share in PRUNED
            ])  # fmt: skip
        return {name: tuple(value.tolist()) for name, value in values.items()}

    def _loss_without(self, neurons: Tensor, test: SplitPass) -> Tensor:
        """Return the mean hinge loss without these neurons."""
        a = self.a.clone()
        self.a[:, :, neurons] = 0
        F = self(test.inputs)
        self.a.copy_(a)
        return losses(HINGE, F, test.labels).double().mean()

    def _by_head(self, X: Tensor, W: Tensor) -> Tensor:
        """Return (B, H, L, d), the tokens (B, L, d) times the matrix of each head in W (H, d, d)."""
        return (X.to(W.dtype) @ W.flatten(0, 1).T).unflatten(2, (self.heads, -1)).transpose(1, 2)

    def fields(self, X: Tensor) -> Fields:
        """See `OneLayer.fields`."""
        return {
            "queries": lambda: self._by_head(X, self.W_Q),
            "keys": lambda: self._by_head(X, self.W_K),
            "values": lambda: self._by_head(X, self.W_V),
            "attention_maps": lambda: self.attention(X),
            "attention": lambda: self.attention(X).mean(dim=(1, 2)),
        }


def complete(rng: np.random.Generator, columns: np.ndarray) -> np.ndarray:
    """Return (d, d) orthonormal columns, the first of which are the (d, M) orthonormal `columns`."""
    d, M = columns.shape
    q, r = np.linalg.qr(np.concatenate([columns, rng.standard_normal((d, d - M))], axis=1))
    return q * np.sign(np.diag(r))


def _unit_columns(rng: np.random.Generator, d: int) -> np.ndarray:
    error = rng.standard_normal((d, d))
    return error / np.linalg.norm(error, axis=0)


def _parameter(value: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float32))
