"""The data model of Jelassi, Sander and Li (NeurIPS 2022): sets of patches, one of which has the label."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task
from sparsebench_theory.patterns import balanced_classes, orthonormal

PRETRAINED_ON = 2000
"""Number of samples for pre-training the attention."""


class Spatial(Task):
    """Which patches belong together? All patches of one set show y w*; others show +w* or -w* now and then.

    The D positions are divided at random into sets of `group` positions, the same in all samples of a `structure`. In a
    sample the patches of one set have the label y in {-1, 1}: X_j = y w* + xi_j. Each patch outside is
    delta_j w* + xi_j with delta_j = 1 or -1, each with probability q / 2, otherwise 0. The noise is N(0, noise^2 I). A
    trial succeeds if the test error is at most the threshold.

    For transfer, `feature` 1 and higher are new w*, orthogonal to that of feature 0, with the same sets. With
    start=pretrained, training starts with the attention learned on feature 0.
    """

    name: ClassVar[str] = "spatial"
    inputs: ClassVar[Inputs] = "tokens"
    classes: ClassVar[int] = 2
    default_model: ClassVar[str] = "positional"

    tokens: int = Field(36, gt=1, description="D, patches per sample")
    group: int = Field(6, gt=0, description="C, patches per set; must divide tokens")
    d: int = Field(64, gt=1, description="width of a patch")
    rate: float | None = Field(
        None, ge=0, le=1, description="q, share of other patches with w* or -w*; by default ln d / D"
    )
    noise: float | None = Field(None, ge=0, description="sigma; by default 1 / sqrt(d)")
    projected: bool = Field(True, description="noise orthogonal to w*, as in the theory; not in the published code")
    structure: int = Field(0, ge=0, description="number of the random partition, features and permutation")
    feature: int = Field(0, ge=0, description="number of w*; pre-training has 0")
    permuted: bool = Field(False, description="patches are permuted, in the same way for all samples")
    start: Literal["random", "pretrained"] = Field("random", description="initial attention")
    test: int = Field(1000, gt=0, description="test samples")
    threshold: float = Field(0.01, ge=0, lt=1, description="a trial succeeds if the test error is at most this")
    lr: float = Field(0.02, gt=0, description="step size of gradient descent")
    lr_attention: float | None = Field(None, gt=0, description="step size of the attention; by default lr")
    steps: int = Field(1500, gt=0, description="T, steps")
    watch: int = Field(0, ge=0, description="steps between tests during training; 0 for none")

    def check(self) -> None:
        """See `Task.check`."""
        if self.tokens % self.group:
            raise UserError(
                "spatial: all sets have one size", got=f"tokens={self.tokens}, group={self.group}",
                allowed="a group that divides tokens", next_step="change one of them",
            )  # fmt: skip
        if self.feature >= self.d:
            raise UserError(
                "spatial: features are orthogonal", got=f"feature={self.feature}", allowed=f"below d={self.d}"
            )

    def recipe(self) -> Recipe:
        """See `Task.recipe`: gradient descent on all samples, with a separate step size of the attention, if given."""
        rates = {} if self.lr_attention is None else {"A": self.lr_attention}
        return Recipe(
            "logistic", "sgd", self.lr, batch=0, epochs=self.steps, steps=self.steps, fixed_selection=True,
            rates=rates, watch=self.watch,
        )  # fmt: skip

    def success(self, test_loss: float, accuracy: float) -> bool:
        """See `Task.success`."""
        return 1 - accuracy <= self.threshold

    def initial(self) -> tuple[Task, int] | None:
        """See `Task.initial`: the same structure with feature 0, in plain order."""
        if self.start == "random":
            return None
        defaults = {"feature": 0, "permuted": False, "start": "random", "watch": 0}
        return self.model_copy(update=defaults), PRETRAINED_ON

    def sets(self) -> np.ndarray:
        """Return (tokens,) the number of each position's set, before permutation."""
        order = self._rng("sets").permutation(self.tokens)
        out = np.empty(self.tokens, dtype=np.int64)
        out[order] = np.arange(self.tokens) // self.group
        return out

    def order(self) -> np.ndarray:
        """Return (tokens,) the original position of the patch at each position."""
        return self._rng("order").permutation(self.tokens) if self.permuted else np.arange(self.tokens)

    def _rng(self, what: str) -> np.random.Generator:
        return seeds.generator(self.name, self.tokens, self.group, self.d, self.structure, what)

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`. `Data.patterns` is w*; a smaller training set is the beginning of a larger one."""
        self.check()
        w = orthonormal(self._rng("features"), self.d, self.feature + 1)[:, self.feature].astype(np.float32)
        train = self._split(n_train, w, "train", repetition)
        test = self._split(self.test, w, "test", repetition)
        return Data(train, test, ("-1", "+1"), patterns=w[:, None])

    def _split(self, n: int, w: np.ndarray, split: str, repetition: int) -> Split:
        """Return n samples with the feature w (d,). Each quantity has its own generator."""
        law = self.tokens, self.group, self.d, self.rate, self.structure, self.feature, split, repetition

        def rng(name: str) -> np.random.Generator:
            return seeds.generator(self.name, *law, name)

        labels = balanced_classes(rng("labels"), n, 2)
        y = 2 * labels[:, None] - 1
        drawn_sets = rng("set").integers(self.tokens // self.group, size=n)
        in_set = self.sets() == drawn_sets[:, None]
        q = math.log(self.d) / self.tokens if self.rate is None else self.rate
        u = rng("delta").random((n, self.tokens), dtype=np.float32)
        delta = (u < q / 2).astype(int) - (u > 1 - q / 2)
        signs = np.where(in_set, y, delta).astype(np.float32)

        inputs = rng("noise").standard_normal((n, self.tokens, self.d), dtype=np.float32)
        if self.projected:
            inputs -= (inputs @ w)[:, :, None] * w
        inputs *= np.float32(self.d**-0.5 if self.noise is None else self.noise)
        inputs += signs[:, :, None] * w
        order = self.order()
        groups = np.zeros(n, dtype=np.int64)
        return Split(inputs[:, order], labels, groups, in_set[:, order].astype(np.float32))


def association(scores: np.ndarray, together: np.ndarray) -> float:
    """Return the share of the rows of (D, D) scores whose largest entries, including the diagonal, are their set.

    `together` (D, D) says which positions are in the same set; positions without a set are left out. Ties are broken by
    position.
    """
    scores = scores.copy()
    np.fill_diagonal(scores, np.inf)
    order, sizes = np.argsort(-scores, axis=1, kind="stable"), together.sum(axis=1)
    first = np.arange(len(scores)) < sizes[:, None]
    right = (np.take_along_axis(together, order, axis=1) | ~first).all(axis=1)
    return float(right[sizes > 0].mean())
