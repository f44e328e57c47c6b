"""The data model of Li et al. (ICLR 2023): label-relevant, confusing and irrelevant patterns as tokens."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task


class Theory(Task):
    """Which of two patterns has more tokens? Li et al. 2023, Section 4.1, with a step size that trains.

    Each sample has round(alpha_* L) tokens of the majority pattern, its label; round(alpha_# L) of the other
    discriminative one, the confusion; and the rest spread evenly over the M - 2 that say nothing. Tokens are the
    orthonormal pattern plus Gaussian noise; their places are permuted in each sample.
    """

    name: ClassVar[str] = "theory"
    inputs: ClassVar[Inputs] = "tokens"
    default_model: ClassVar[str] = "shallow"

    tokens: int = Field(50, gt=1, description="L, tokens a sample")
    d: int = Field(10, gt=1, description="width of a token")
    patterns: int = Field(5, gt=2, description="M, patterns; two are discriminative")
    relevant: float = Field(0.2, gt=0, lt=1, description="alpha_*, share of label-relevant tokens")
    confusion: float = Field(0.04, ge=0, lt=1, description="alpha_#, share of confusing tokens")
    noise: float = Field(0.01, ge=0, description="c0, standard deviation of the noise on a token's entries")
    noisy_share: float = Field(0.0, ge=0, le=1, description="share of tokens with the larger noise")
    noisy_std: float = Field(0.35, ge=0, description="the larger noise")
    test: int = Field(100, gt=0, description="test samples")
    threshold: float = Field(1e-3, gt=0, description="a trial succeeds when the mean test hinge loss is below it")
    lr: float | None = Field(None, gt=0, description="step size; by default L / 50")
    batch: int = Field(20, gt=0, description="B, samples a step")
    steps: int = Field(600, gt=0, description="T, the most steps")

    def check(self) -> None:
        """See `Task.check`."""
        self.counts()

    def recipe(self) -> Recipe:
        """See `Task.recipe`: Algorithm 1, plain SGD on the hinge loss."""
        lr = self.tokens / 50 if self.lr is None else self.lr
        return Recipe(
            "hinge", "sgd", lr, self.batch, epochs=self.steps, steps=self.steps, stop_at_zero_loss=True,
            fixed_selection=True,
        )  # fmt: skip

    def success(self, test_loss: float, accuracy: float) -> bool:
        """See `Task.success`; the paper's criterion."""
        return test_loss < self.threshold

    def counts(self) -> np.ndarray:
        """Return (M,) tokens of each pattern: relevant first, confusing second, then the irrelevant ones."""
        relevant, confusion = round(self.relevant * self.tokens), round(self.confusion * self.tokens)
        rest = self.tokens - relevant - confusion
        if relevant <= confusion or rest < 0:
            raise UserError(
                f"theory: {self.tokens} tokens cannot have shares relevant={self.relevant:g} and "
                f"confusion={self.confusion:g} ({relevant} and {confusion} tokens)",
                allowed="more relevant tokens than confusing ones, and no more than there are in all",
            )
        if self.d < self.patterns:
            raise UserError("theory: patterns are orthonormal, so d must be at least their number", got=self.d)
        share, more = divmod(rest, self.patterns - 2)
        return np.array([relevant, confusion] + [share + (k < more) for k in range(self.patterns - 2)])

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`. A smaller training set is the beginning of a larger one."""
        counts = self.counts()
        law = self.model_dump_json(exclude={"test", "threshold", "lr", "batch", "steps"})
        columns = np.linalg.qr(seeds.generator(law, repetition, "patterns").standard_normal((self.d, self.d)))[0]
        mu = columns[:, : self.patterns]
        train, test = (
            self._split(
                mu, counts, n, *(seeds.generator(law, repetition, split, what) for what in ("labels", "tokens"))
            )
            for split, n in (("train", n_train), ("test", self.test))
        )
        return Data(train, test, ("-1", "+1"), patterns=mu)

    def _split(
        self, mu: np.ndarray, counts: np.ndarray, n: int, order: np.random.Generator, rng: np.random.Generator
    ) -> Split:
        # Pairs in random order: as many of each label, and none that a sample's place would give away.
        labels = order.permuted(np.arange(n + n % 2).reshape(-1, 2) % 2, axis=1).ravel()[:n]
        samples = [self._sample(mu, counts, bool(label), rng) for label in labels]
        inputs, relevance = (np.stack(parts).astype(np.float32) for parts in zip(*samples, strict=True))
        return Split(inputs, labels, np.zeros(n, dtype=np.int64), relevance)

    def _sample(
        self, mu: np.ndarray, counts: np.ndarray, positive: bool, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (L, d) tokens and (L,) relevance of one sample."""
        which = rng.permutation(np.repeat(np.arange(self.patterns), counts))
        pattern = which if positive else np.where(which < 2, 1 - which, which)
        scale = np.full(self.tokens, self.noise)
        scale[rng.permutation(self.tokens)[: round(self.noisy_share * self.tokens)]] = self.noisy_std
        noise = rng.standard_normal((self.tokens, self.d)) * scale[:, None]
        return mu.T[pattern] + noise, which == 0
