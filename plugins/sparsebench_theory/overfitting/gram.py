"""Gradient descent on the two-layer Vision Transformer in the span of its training tokens.

With w_O frozen, f depends on W_V only through v = W_V w_O, and each gradient is a combination of tokens: with the P
tokens of all samples as the rows of X, W_Q = W_Q(0) + X^T A, W_K = W_K(0) + X^T B and W_V = W_V(0) + X^T g w_O^T.
Therefore the queries Q = X W_Q, keys K = X W_K and values u = X v are updated by products with the Gram matrix
G = X X^T, (P, P), instead of the weights with d x d_h numbers each. For sample i with kept tokens l, s, attention S_ls
and y in {-1, 1}

    a_s = mean_l S_ls,  f = sum_s a_s u_s,  c = dLoss / df = -y / (1 + e^(yf)) / n
    dv = X^T (c a),  dScore_ls = c / |S| S_ls (u_s - sum_t S_lt u_t),  dW_Q = X^T (dScore K),  dW_K = X^T (dScore^T Q)

Several trials with equal numbers of tokens are trained together, with a leading axis T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from sparsebench.models.actor import Actor
from sparsebench.strategy.tokens import gather
from sparsebench.tasks.base import Recipe
from sparsebench.training.loop import Batch, Training
from sparsebench.training.steps import Samples, chooses_once
from sparsebench_theory.overfitting.network import TwoLayerViT


def applies(network: TwoLayerViT, samples: Samples, recipe: Recipe) -> bool:
    """Return whether this applies to the training and is faster: there are fewer tokens than twice their width."""
    n, L, d = samples.inputs.shape
    whole = recipe.batch == 0 and recipe.loss == "logistic" and recipe.optimizer == "sgd" and not recipe.rates
    return whole and n * L < 2 * d


def choose(training: Training, visit: int, queries_and_keys: tuple[Tensor, Tensor] | None = None) -> Tensor | None:
    """Return the (n, |S|) kept tokens of a training, or None for all; queries and keys are those of X, if computed."""
    if training.actor is None:
        return None
    network, X = cast(TwoLayerViT, training.network), training.samples.inputs
    acting = training.samples.begin(training.actor, training.samples.items, visit=visit, training=True)
    with torch.no_grad():
        return network.choose(acting, X, network.fields(X.to(network.W_Q.dtype), queries_and_keys))


def _tokens_of(training: Training) -> Tensor:
    """Return the tokens (n, L, d) that a training stores: the kept ones if the selection does not change, else all."""
    X = training.samples.inputs
    if chooses_once(training.actor, training.recipe):
        index = choose(training, 0)
        if index is not None:
            X = gather(X, index)
    return X.to(cast(TwoLayerViT, training.network).W_Q.dtype)


def _gradients(q: Tensor, key: Tensor, value: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the margins yf (k, n), and the gradients of the mean loss by scores (k, n, S, S) and values (k, n, S).

    The names are those of the docstring of this module.
    """
    S = torch.softmax(q @ key.mT, dim=3)
    a = S.mean(dim=2)
    margin = y * (a * value).sum(dim=2)
    c = (-y * torch.sigmoid(-margin) / q.shape[1])[..., None]
    attended = (S @ value[..., None]).squeeze(3)
    d_score = (c / value.shape[2])[..., None] * S * (value[:, :, None, :] - attended[..., None])
    return margin, d_score, c * a


class Span:
    """The state of T trainings of the same shape: Q, K (T, n, L, d_h) and u (T, n, L).

    If the selection does not change, only kept tokens are stored, otherwise all.
    """

    @torch.no_grad()
    def __init__(self, trainings: Sequence[Training]):
        recipe = trainings[0].recipe
        self.networks = [cast(TwoLayerViT, training.network) for training in trainings]
        self.lr, self.stop = recipe.lr, recipe.stop_below
        tokens = [_tokens_of(training) for training in trainings]
        self.X = torch.stack(tokens).flatten(1, 2)  # (T, P, d)
        self.T = len(trainings)
        self.n, self.L = tokens[0].shape[:2]
        self.G = self.X @ self.X.mT
        self.first = [
            (network.W_Q.detach().clone(), network.W_K.detach().clone(), network.W_V.detach().clone())
            for network in self.networks
        ]
        self.w_O = torch.stack([network.w_O for network in self.networks])

        queries, keys, values = [], [], []
        for x, (W_Q, W_K, W_V), w_O in zip(self.X, self.first, self.w_O, strict=True):
            queries.append(x @ W_Q)
            keys.append(x @ W_K)
            values.append(x @ (W_V @ w_O))
        self.Q, self.K, self.u = torch.stack(queries), torch.stack(keys), torch.stack(values)
        self.A, self.B, self.g = torch.zeros_like(self.Q), torch.zeros_like(self.K), torch.zeros_like(self.u)
        labels = [2 * training.samples.labels - 1 for training in trainings]
        self.y = torch.stack(labels).to(self.Q.dtype)

    @torch.no_grad()
    def step(self, active: Tensor, index: Tensor | None) -> Tensor:
        """Take one step of the active trainings, (k,); return their (k,) summed losses before it.

        Args:
            active: numbers of the k active trainings.
            index: (k, n, |S|) the tokens that are kept in this step, if the selection changes.
        """
        # Indexing copies, which is not needed while all trainings are active.
        part: Tensor | slice = slice(None) if len(active) == self.T else active
        Q, K, u, G, y = self.Q[part], self.K[part], self.u[part], self.G[part], self.y[part]

        shape = len(active), self.n, self.L
        q, key, value = Q.view(*shape, -1), K.view(*shape, -1), u.view(shape)
        if index is not None:
            rows = index[..., None].expand(*index.shape, q.shape[3])
            q, key, value = q.gather(2, rows), key.gather(2, rows), value.gather(2, index)

        margin, d_score, d_value = _gradients(q, key, value, y)
        # The changes of A, B and g: the factors of X^T in dW_Q, dW_K and dv.
        dA = self._whole(d_score @ key, index).flatten(1, 2)
        dB = self._whole(d_score.mT @ q, index).flatten(1, 2)
        dg = self._whole(d_value, index).flatten(1, 2)
        self.A[active] -= self.lr * dA
        self.B[active] -= self.lr * dB
        self.g[active] -= self.lr * dg

        # The same step of queries, keys and values. W_V changes along w_O, so that v changes by |w_O|^2.
        w_O_squared = (self.w_O[active] ** 2).sum(dim=1)[:, None]
        self.Q[active] = Q - self.lr * (G @ dA)
        self.K[active] = K - self.lr * (G @ dB)
        self.u[active] = u - self.lr * w_O_squared * (G @ dg[..., None]).squeeze(2)
        return torch.nn.functional.softplus(-margin).sum(dim=1)

    def steps(self, active: Tensor, coming: Sequence[Sequence[Batch]]) -> Tensor:
        """Take the coming steps of the active trainings; return their summed losses, (active, steps).

        A training takes no steps after it has ended.
        """
        losses = torch.zeros(len(active), max(map(len, coming)), device=active.device, dtype=self.Q.dtype)
        going = torch.arange(len(active), device=active.device)
        for step in range(losses.shape[1]):
            losses[going, step] = self.step(active[going], None)
            going = going[~(losses[going, step].double() / self.n < self.stop)]
            if not len(going):
                break
        return losses

    def _whole(self, x: Tensor, index: Tensor | None) -> Tensor:
        """Return (k, n, L, ..), with 0 for removed tokens."""
        if index is None:
            return x
        out = x.new_zeros(*x.shape[:2], self.L, *x.shape[3:])
        place = index if x.ndim == 3 else index[..., None].expand_as(x)
        return out.scatter(2, place, x)

    @torch.no_grad()
    def store(self) -> None:
        """Copy the weights into the networks."""
        for t, network in enumerate(self.networks):
            (W_Q, W_K, W_V), X = self.first[t], self.X[t]
            network.W_Q.copy_(W_Q + X.T @ self.A[t])
            network.W_K.copy_(W_K + X.T @ self.B[t])
            network.W_V.copy_(W_V + torch.outer(X.T @ self.g[t], self.w_O[t]))


class InSpan:
    """Steps of one training; see `Steps`."""

    def __init__(self, network: TwoLayerViT, actor: Actor | None, samples: Samples, recipe: Recipe):
        self.training = Training(network, actor, samples, recipe, ())
        self.changing, self.span = not chooses_once(actor, recipe), Span([self.training])
        self.alone = torch.zeros(1, dtype=torch.int64, device=samples.labels.device)

    def step(self, rows: np.ndarray, visit: int, done: float) -> Tensor:
        """See `Steps.step`; `rows` are all samples, in any order."""
        index = None
        if self.changing:
            if {"values", "outputs"} & self.training.actor.requires:  # type: ignore[union-attr]
                self.store()
            shape = self.span.n, self.span.L, -1
            chosen = choose(self.training, visit, (self.span.Q.view(shape), self.span.K.view(shape)))
            index = None if chosen is None else chosen[None]
        return self.span.step(self.alone, index)[0]

    def store(self) -> None:
        """See `Steps.store`."""
        self.span.store()
