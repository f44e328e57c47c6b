"""Training the shallow Vision Transformer in closed form: the steps of Autograd, several times faster."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsebench.models.actor import Actor
from sparsebench.tasks.base import Recipe
from sparsebench.training.steps import Samples, chooses_once
from sparsebench_theory.shallow import kernels
from sparsebench_theory.shallow.kernels import TILE, Weights, Work, work_space
from sparsebench_theory.shallow.network import ShallowViT


def applies(network: ShallowViT, recipe: Recipe) -> bool:
    """Return whether the closed form applies: plain eq. (1), trained by SGD with hinge loss on the CPU."""
    on_cpu = network.W_O.device.type == "cpu"
    return network.plain and on_cpu and recipe.loss == "hinge" and recipe.optimizer == "sgd"


class ClosedForm:
    """Steps on a plain ShallowViT; see `kernels` for the equations.

    It has copies of the weights in a memory layout for fast access. `load` copies them from the network, `store` copies
    them back. It uses one thread for one trial, so that results do not depend on other programs.

    Args:
        network: the network; float32, or float64 to check.
        actor: the strategy that removes tokens, or None.
        samples: the split.
        recipe: the recipe.
        training: whether the strategy acts in training or in the test.
    """

    def __init__(
        self, network: ShallowViT, actor: Actor | None, samples: Samples, recipe: Recipe, *, training: bool = True
    ):
        self.training = training
        self.tester: ClosedForm | None = None
        self.network, self.actor, self.samples, self.recipe = network, actor, samples, recipe
        m, d = network.W_O.shape
        self.m, self.d, self.D, self.tiles = m, d, d + d % 2, -(-m // TILE)
        dtype = network.W_O.detach().numpy().dtype
        self.half = (dtype.type(0),) * (self.D // 2)
        self.frozen = not network.W_Q.requires_grad
        self.signs = (2 * samples.labels.numpy() - 1).astype(dtype)
        squares = [np.zeros((self.D, self.D), dtype) for _ in range(3)]
        O, a = np.zeros(self.tiles * self.D * TILE, dtype), network.a[0].T.numpy()
        self.weights = Weights(squares[0], squares[1], squares[2], O, self._tile(a))
        self.work: tuple[int, Work] | None = None
        self.load()
        self.changing = not chooses_once(actor, recipe)
        self.packed = None if self.changing else self._pack(samples.items, visit=0)

    def load(self) -> None:
        """Copy the weights from the network."""
        for square, parameter in self._squares():
            square[:] = parameter.detach()[0].numpy()
        self.weights.O[:] = self._tile(self.network.W_O.detach().numpy())

    @torch.no_grad()
    def store(self) -> None:
        """Copy the weights into the network; see `Steps.store`."""
        for square, parameter in self._squares():
            parameter[0] = torch.from_numpy(square)
        rows = self.weights.O.reshape(self.tiles, self.D, TILE).transpose(0, 2, 1).reshape(-1, self.D)
        self.network.W_O[:] = torch.from_numpy(rows[: self.m, : self.d])

    def _squares(self) -> list[tuple[np.ndarray, Tensor]]:
        """Return the square matrices, each with its parameter."""
        network, weights = self.network, self.weights
        pairs = ((weights.Q, network.W_Q), (weights.K, network.W_K), (weights.V, network.W_V))
        return [(matrix[: self.d, : self.d], parameter) for matrix, parameter in pairs]

    def _tile(self, neurons: np.ndarray) -> np.ndarray:
        """Return [tile][column][TILE] of a matrix with a row for each neuron; columns are padded to an even number."""
        m, columns = neurons.shape
        whole = np.zeros((self.tiles * TILE, columns + columns % 2), neurons.dtype)
        whole[:m, :columns] = neurons
        return whole.reshape(self.tiles, TILE, -1).transpose(0, 2, 1).ravel()

    def step(self, rows: np.ndarray, visit: int, done: float) -> float:
        """See `Steps.step`."""
        signs = self.signs
        if self.changing:
            (X, places, S), signs = self._pack(torch.from_numpy(rows), visit), signs[rows]
            rows = np.arange(len(rows))
        else:
            assert self.packed is not None
            X, places, S = self.packed
        return kernels.step(
            X, places, signs, rows, S, self.weights, self.recipe.lr, self.frozen, self._work(S), self.half
        )

    def test(self, actor: Actor | None, samples: Samples) -> tuple[float, float]:
        """Return mean loss and accuracy of the stored weights; see `Steps`."""
        if self.tester is None or (self.tester.actor, self.tester.samples) != (actor, samples):
            self.tester = ClosedForm(self.network, actor, samples, self.recipe, training=False)
        self.tester.load()
        losses = self.tester.losses()
        return float(losses.mean(dtype=float)), float((losses < 1).mean())

    def losses(self) -> np.ndarray:
        """Return the (n,) hinge losses of all samples."""
        X, places, S = self.packed or self._pack(self.samples.items, visit=0)
        F = np.empty(len(X), X.dtype)
        kernels.outputs(X, places, S, self.weights, self._work(S), self.half, F)
        return np.maximum(1 - self.signs * F, 0)

    def _work(self, S: int) -> Work:
        if self.work is None or self.work[0] != S:
            self.work = S, work_space(self.D, -(-S // 4) * 4, self.tiles, self.signs.dtype)
        return self.work[1]

    def _pack(self, items: Tensor, visit: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the kept tokens of the samples (n, rows * D), their positions (n, rows), and S without padding."""
        acting = None
        if self.actor is not None:
            if self.changing:
                self.store()
            acting = self.samples.begin(self.actor, items, visit=visit, training=self.training)
        with torch.no_grad():
            X, index = self.network.keep(acting, self.samples.inputs[items])
        if index is None:
            index = torch.arange(X.shape[1]).expand(len(X), -1)
        n, S = index.shape
        rows = -(-S // 4) * 4
        tokens = np.zeros((n, rows, self.D), self.signs.dtype)
        tokens[:, :S, : self.d] = X.numpy()
        places = np.zeros((n, rows), np.int64)
        places[:, :S] = self.network.places(index).numpy()
        return tokens.reshape(n, -1), places, S
