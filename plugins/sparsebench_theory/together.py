"""Training many networks of the theories in one program, for devices that need much work at a time.

The equations are those of `shallow.kernels` and `overfitting.gram`, with a leading axis T of trials. On CUDA the order
of sums may depend on the number of trials, so results agree with a trial trained alone to about 1e-5, not exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import islice
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparsebench.errors import DivergedError
from sparsebench.training.loop import Batch, Training
from sparsebench.training.steps import chooses_once
from sparsebench_theory.overfitting import gram
from sparsebench_theory.overfitting.network import TwoLayerViT
from sparsebench_theory.shallow.network import ShallowViT

log = logging.getLogger(__name__)

AHEAD = 20
"""Number of steps between looks at the losses. A trial that ends in between takes steps without any change."""


def fits(trial: Training) -> bool:
    """Return whether a training can run together with others: closed-form steps, and a selection made once."""
    if not chooses_once(trial.actor, trial.recipe):
        return False
    if isinstance(trial.network, TwoLayerViT):
        return gram.applies(trial.network, trial.samples, trial.recipe)
    plain = isinstance(trial.network, ShallowViT) and trial.network.plain
    return plain and trial.recipe.loss == "hinge" and trial.recipe.optimizer == "sgd"


def train_together(trainings: Sequence[Training]) -> None:
    """Train all trainings that fit, as many at a time as memory allows; see `Network`.

    If a group fails, it is trained again in halves, so that an error, of a strategy say, affects only its own training.
    """
    groups: dict[tuple[object, ...], list[Training]] = {}
    for trial in trainings:
        if fits(trial):
            groups.setdefault(_shape(trial), []).append(trial)
    for group in groups.values():
        size = most = len(group)
        while group:
            chunk = group[:size]
            try:
                _train(chunk)
            except Exception as error:
                if len(chunk) > 1:
                    size = (len(chunk) + 1) // 2
                    if isinstance(error, torch.OutOfMemoryError):
                        log.warning("out of memory: continuing with %d trials at a time", size)
                        most = size
                    for trial in chunk:  # the networks have not changed yet
                        trial.begin()
                    continue
                chunk[0].failure = error
            group, size = group[size:], most


def _shape(trial: Training) -> tuple[object, ...]:
    """Return the properties that trainings must share to run together."""
    network = cast(ShallowViT | TwoLayerViT, trial.network)
    weights = [*network.parameters(), *network.buffers()]
    kept = None if trial.actor is None else trial.actor.keep.get(0)
    # Additional steps change a two-layer network, so trainings that run together must have the same end.
    ends = (trial.samples.inputs.shape, trial.recipe.steps, trial.recipe.stop_below) * isinstance(network, TwoLayerViT)
    common = weights[0].dtype, weights[0].device, kept, network.W_Q.requires_grad, trial.recipe.lr
    return (type(network), *(w.shape for w in weights), *common, *ends)


def _train(trainings: Sequence[Training]) -> None:
    """Train trainings of the same shape. The networks change only after all have ended."""
    stack = gram.Span(trainings) if isinstance(trainings[0].network, TwoLayerViT) else _Stack(trainings)
    active = [t for t, trial in enumerate(trainings) if not trial.finished]
    while active:
        coming = [list(islice(trainings[t].batches(), AHEAD)) for t in active]
        losses = stack.steps(torch.tensor(active, device=trainings[0].samples.labels.device), coming)
        for t, batches, row in zip(active, coming, losses.tolist(), strict=True):
            trial = trainings[t]
            try:
                for batch, loss in zip(batches, row, strict=False):
                    if not trial.finished:
                        trial.tell(batch, loss)
            except DivergedError as error:
                trial.failure = error
        active = [t for t in active if not trainings[t].finished and trainings[t].failure is None]
    stack.store()


class _Stack:
    """The weights and samples of T trainings of the shallow model."""

    def __init__(self, trainings: Sequence[Training]):
        self.networks = networks = [cast(ShallowViT, trial.network) for trial in trainings]
        self.Q, self.K, self.V = (
            torch.stack([getattr(net, name).detach()[0] for net in networks]) for name in ("W_Q", "W_K", "W_V")
        )
        self.O = torch.stack([net.W_O.detach() for net in networks])
        self.frozen, self.lr = not networks[0].W_Q.requires_grad, trainings[0].recipe.lr
        chosen = [_choose(trial) for trial in trainings]
        self.X = pad_sequence([X for X, _ in chosen], batch_first=True)
        self.places = None if chosen[0][1] is None else pad_sequence([p for _, p in chosen if p is not None], True)
        self.a = torch.stack([net.a[0] for net in networks])
        self.y = pad_sequence([2 * trial.samples.labels - 1 for trial in trainings], batch_first=True).to(self.O.dtype)

    def steps(self, active: Tensor, coming: Sequence[Sequence[Batch]]) -> Tensor:
        """Take the coming steps of the active trials; return their summed losses, (active, steps)."""
        rows, weights = _pad(coming, self.y.device, self.y.dtype)
        X, y, a = self.X[active], self.y[active], self.a[active]
        places = None if self.places is None else self.places[active]
        W = [matrix[active] for matrix in (self.Q, self.K, self.V, self.O)]
        trial = torch.arange(len(active), device=active.device)[:, None]
        losses = []
        for step in range(rows.shape[1]):
            chosen, weight = rows[:, step], weights[:, step]
            read = a[:, None] if places is None else a[trial[..., None], places[trial, chosen]]
            loss, gradients = gradients_of(X[trial, chosen], y[trial, chosen], weight, read, *W, frozen=self.frozen)
            losses.append(loss)
            for matrix, gradient in zip(W, gradients, strict=True):
                if gradient is not None:
                    matrix.sub_(gradient, alpha=self.lr)
        for matrix, new in zip((self.Q, self.K, self.V, self.O), W, strict=True):
            matrix[active] = new
        return torch.stack(losses, dim=1)

    @torch.no_grad()
    def store(self) -> None:
        """Copy the weights into the networks."""
        for t, network in enumerate(self.networks):
            for name, matrix in (("W_Q", self.Q), ("W_K", self.K), ("W_V", self.V)):
                getattr(network, name)[0] = matrix[t]
            network.W_O.copy_(self.O[t])


def gradients_of(
    X: Tensor, y: Tensor, weight: Tensor, a: Tensor, Q: Tensor, K: Tensor, V: Tensor, W_O: Tensor, *, frozen: bool
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None, Tensor, Tensor]]:
    """Return the (T,) summed hinge losses and the gradients of W_Q, W_K, W_V and W_O.

    Args:
        X: (T, B, S, d) tokens.
        y: (T, B) labels, -1 or 1.
        weight: (T, B) weight of a sample: 1 / batch size, 0 for padding.
        a: (T, 1 or B, S, m) read-out vectors.
        Q, K, V: (T, d, d).
        W_O: (T, m, d).
        frozen: whether W_Q and W_K are frozen; their gradients are then None.
    """
    T, B, S, d = X.shape
    C = W_O @ V
    score = (X @ (K.mT @ Q)[:, None]) @ X.mT
    A = torch.softmax(score, dim=2)  # token l (columns) attends to token s (rows)
    Z = A.mT @ X
    h = (Z.reshape(T, B * S, d) @ C.mT).view(T, B, S, -1)
    v = torch.where(h > 0, a, torch.zeros((), dtype=X.dtype, device=X.device))
    F = (v * h).sum(dim=(2, 3)) / S
    loss = torch.relu(1 - y * F)
    c = torch.where(loss > 0, -y * weight / S, torch.zeros_like(y))[..., None, None]
    flat = v.view(T, B * S, -1)
    dC = flat.mT @ (c * Z).view(T, B * S, d)
    dQ = dK = None
    if not frozen:
        G = c * (flat @ C).view(T, B, S, d)
        dS = A * (X @ G.mT - (Z * G).sum(dim=3)[:, :, None])
        kernel = (X.mT @ dS @ X).sum(dim=1)
        dQ, dK = K @ kernel, Q @ kernel.mT
    summed = torch.where(weight > 0, loss, torch.zeros_like(loss)).sum(dim=1)
    return summed, (dQ, dK, W_O.mT @ dC, dC @ V.mT)


def _choose(trial: Training) -> tuple[Tensor, Tensor | None]:
    """Return the kept tokens of a training, (n, S, d), and their read-out positions, (n, S), or None if all stay."""
    network, samples = cast(ShallowViT, trial.network), trial.samples
    acting = None if trial.actor is None else samples.begin(trial.actor, samples.items, visit=0, training=True)
    with torch.no_grad():
        X, index = network.keep(acting, samples.inputs)
    return X, None if index is None else network.places(index)


def _pad(coming: Sequence[Sequence[Batch]], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows (T, steps, B) of each trial's batches, and their weights; padding has weight 0."""
    steps = max(map(len, coming))
    widest = max(len(batch.rows) for batches in coming for batch in batches)
    rows = torch.zeros(len(coming), steps, widest, dtype=torch.int64)
    weights = torch.zeros(len(coming), steps, widest, dtype=dtype)
    for t, batches in enumerate(coming):
        for step, batch in enumerate(batches):
            rows[t, step, : len(batch.rows)] = torch.from_numpy(batch.rows)
            weights[t, step, : len(batch.rows)] = 1 / len(batch.rows)
    return rows.to(device), weights.to(device)
