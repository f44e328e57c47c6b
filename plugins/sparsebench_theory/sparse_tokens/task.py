"""The data model of Barnfield, Cui and Lu (ICLR 2026): a weak signal in a few tokens of a long sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task

ROUNDING = 1e-9
"""Tolerance for shares of the test samples, which differ by at least one sample."""


class SparseTokens(Task):
    """Does any token have the signal? With more tokens, the signal in their mean is weaker.

    A sample of class +1 is X = theta v xi^T + Z and one of class -1 is Z: Z are (L, d) standard normal numbers, xi is a
    unit vector, the same for a whole repetition, and v has R ones at random positions in each sample. The tokens of v
    are relevant. Class -1 has none, which counts as 0 in the means of selection precision and recall. A trial succeeds
    if the test error is at most `error`.
    """

    name: ClassVar[str] = "sparse_tokens"
    inputs: ClassVar[Inputs] = "tokens"
    classes: ClassVar[int] = 2
    default_model: ClassVar[str] = "one_query"

    tokens: int = Field(64, gt=0, description="L, tokens per sample")
    d: int = Field(16, gt=0, description="width of a token")
    relevant: int = Field(4, gt=0, description="R, tokens with the signal in class +1")
    theta: float = Field(4.0, ge=0, description="strength of the signal")
    positive: float = Field(0.5, gt=0, lt=1, description="pi, probability of class +1")
    test: int = Field(1000, gt=0, description="test samples")
    error: float = Field(0.1, ge=0, lt=1, description="a trial succeeds if the test error is at most this")
    lr: float = Field(0.3, gt=0, description="step size of gradient descent")
    steps: int = Field(200, gt=0, description="T, steps")
    watch: int = Field(0, ge=0, description="steps between tests during training; 0 for none")

    def check(self) -> None:
        """See `Task.check`."""
        if self.relevant > self.tokens:
            raise UserError(
                "sparse_tokens: there are more relevant tokens than tokens",
                got=f"relevant={self.relevant}, tokens={self.tokens}", allowed=f"relevant of {self.tokens} or fewer",
                next_step="lower relevant or raise tokens",
            )  # fmt: skip

    def recipe(self) -> Recipe:
        """See `Task.recipe`: gradient descent on all samples."""
        return Recipe(
            "logistic", "sgd", self.lr, batch=0, epochs=self.steps, steps=self.steps, fixed_selection=True,
            watch=self.watch,
        )  # fmt: skip

    def success(self, test_loss: float, accuracy: float) -> bool:
        """See `Task.success`."""
        return 1 - accuracy < self.error + ROUNDING

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`. Only the signal depends on theta. A smaller training set is the beginning of a larger one.

        `Data.patterns` is xi.
        """
        self.check()
        law = self.name, self.tokens, self.d, self.relevant, self.positive, repetition
        xi = seeds.generator(self.name, self.d, repetition, "xi").standard_normal((self.d, 1))
        xi /= np.linalg.norm(xi)
        train, test = (
            self._split(xi[:, 0], n, partial(seeds.generator, *law, split))
            for split, n in (("train", n_train), ("test", self.test))
        )
        return Data(train, test, ("-1", "+1"), patterns=xi)

    def _split(self, xi: np.ndarray, n: int, rng: Callable[[str], np.random.Generator]) -> Split:
        """Return n samples; each quantity has its own generator."""
        labels = (rng("labels").random(n) < self.positive).astype(np.int64)
        v = rng("places").permuted(np.tile(np.arange(self.tokens) < self.relevant, (n, 1)), axis=1)
        relevant = v & (labels == 1)[:, None]
        inputs = rng("noise").standard_normal((n, self.tokens, self.d), dtype=np.float32)
        inputs[relevant] += (self.theta * xi).astype(np.float32)
        return Split(inputs, labels, np.zeros(n, dtype=np.int64), relevant.astype(np.float32))
