"""A task of tokens and a network with one attention layer, for tests that need no trained network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from sparsebench import seeds
from sparsebench.measure.cost import OneLayerCost, Step
from sparsebench.models.actor import Pass, finite, in_chunks, kept_only
from sparsebench.models.base import Model
from sparsebench.strategy.tokens import gather
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task


class Sets(Task):
    """Which of two directions have more tokens of a sample?"""

    name: ClassVar[str] = "sets"
    inputs: ClassVar[Inputs] = "tokens"
    default_model: ClassVar[str] = "one_layer"

    tokens: int = 20
    d: int = 10
    relevant: float = 0.4
    confusion: float = 0.1
    noise: float = 0.01
    noisy_share: float = 0.0
    noisy_std: float = 0.35
    batch: int = 20
    steps: int = 600
    test: int = 100

    def recipe(self) -> Recipe:
        return Recipe("hinge", "sgd", self.tokens / 50, self.batch, epochs=self.steps, steps=self.steps,
                      stop_at_zero_loss=True, fixed_selection=True)  # fmt: skip

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        train, test = (
            self._split(n, seeds.generator("sets", split, repetition))
            for split, n in (("train", n_train), ("test", self.test))
        )
        return Data(train, test, ("first", "second"))

    def _split(self, n: int, rng: np.random.Generator) -> Split:
        labels = rng.permutation(np.arange(n) % 2)
        numbers = [round(share * self.tokens) for share in (self.relevant, self.confusion)]
        rest = 2 + np.arange(self.tokens - sum(numbers)) % 3
        pattern = np.concatenate([np.repeat([0, 1], numbers), rest])
        pattern = rng.permuted(np.tile(pattern, (n, 1)), axis=1)
        pattern = np.where(pattern < 2, pattern ^ labels[:, None], pattern)
        stds = np.full((n, self.tokens), self.noise)
        stds[:, : round(self.noisy_share * self.tokens)] = self.noisy_std
        noise = rng.permuted(stds, axis=1)[..., None] * rng.standard_normal((n, self.tokens, self.d))
        inputs = (np.eye(self.d)[pattern] + noise).astype(np.float32)
        return Split(inputs, labels, np.zeros(n, np.int64), (pattern == labels[:, None]).astype(np.float32))


@dataclass(frozen=True)
class SetCost(OneLayerCost):
    """Queries, keys, values, attention, m neurons, and one output."""

    m: int

    def macs(self, steps: Sequence[Step]) -> float:
        (step,) = steps
        N, n, d = step.tokens_in, step.tokens_out, self.d
        scoring = 2 * N * d * d + N * N * d if step.scoring else 0
        scoring += len(step.projected) * N * d * d
        return scoring + 3 * n * d * d + 2 * n * n * d + n * d * self.m + n * self.m + step.own


class SetNetwork(nn.Module):
    """The mean over tokens of <a, relu(O V sum of attended tokens)>, a margin."""

    grid = None
    attention_source = "received"

    def __init__(self, rng: np.random.Generator, tokens: int, d: int, m: int):
        super().__init__()
        self.Q, self.K, self.V = (_weights(np.eye(d) + 0.2 * rng.standard_normal((d, d))) for _ in range(3))
        self.O = _weights(0.1 * rng.standard_normal((m, d)))
        self.register_buffer("a", torch.tensor(rng.choice([-1.0, 1.0], m) / m**0.5, dtype=torch.float32))
        self.cost = SetCost(tokens, d, m)

    @property
    def module(self) -> nn.Module:
        return self

    def attention(self, X: Tensor) -> Tensor:
        """Return the (B, 1, N, N) attention; row l is that of token l."""
        return torch.softmax((X @ self.Q.T) @ (X @ self.K.T).mT, dim=2)[:, None]

    def forward(self, X: Tensor, acting: Pass | None = None) -> Tensor:
        index = None if acting is None else self._choose(acting, X)
        X = X if index is None else gather(X, index)
        hidden = torch.relu(self.attention(X)[:, 0] @ X @ self.V.T @ self.O.T)
        return (hidden @ self.a).mean(dim=1)

    def _choose(self, acting: Pass, X: Tensor) -> Tensor | None:
        def received() -> Tensor:
            return finite(self.attention(X).mean(dim=(1, 2)))

        fields: dict[str, Any] = {
            "tokens": lambda: X, "pixels": lambda: None, "attention": received, "received_attention": received,
            "queries": lambda: finite((X @ self.Q.T)[:, None]), "keys": lambda: finite((X @ self.K.T)[:, None]),
            "values": lambda: finite((X @ self.V.T)[:, None]), "attention_maps": lambda: finite(self.attention(X)),
            "outputs": lambda: in_chunks(lambda tokens, _: finite(self(tokens)), len(X)),
        }  # fmt: skip
        return kept_only(acting, self.cost, X.shape[1], fields, "its tokens have no sizes")


def _weights(value: np.ndarray) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=torch.float32))


class OneLayer(Model):
    """See `SetNetwork`."""

    name: ClassVar[str] = "one_layer"
    inputs: ClassVar[Inputs] = "tokens"

    m: int = 32

    def build(self, data: Data, repetition: int) -> SetNetwork:
        _, tokens, d = data.train.inputs.shape
        return SetNetwork(seeds.generator("init", self.name, d, self.m, repetition), tokens, d, self.m)
