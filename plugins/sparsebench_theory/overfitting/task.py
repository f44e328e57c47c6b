"""The data model of Jiang et al. (NeurIPS 2024): one signal token among noise, of which one token is much stronger."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task
from sparsebench_theory.patterns import balanced_classes


class Overfitting(Task):
    """Does a network that fits the noise still see the signal? Benign and harmful overfitting.

    Each sample has one token mu_+ = signal e_1 or mu_- = signal e_2, according to its class, one token of strong noise
    N(0, (strong noise)^2 I), and otherwise tokens of weak noise N(0, noise^2 I), in random order. The signal-to-noise
    ratio is that to the weak noise, signal / (noise sqrt(d)). A trial succeeds, that is, overfits benignly, if the test
    loss is below the threshold after the step at which the training loss fell below `fitted`.
    """

    name: ClassVar[str] = "overfitting"
    inputs: ClassVar[Inputs] = "tokens"
    classes: ClassVar[int] = 2
    default_model: ClassVar[str] = "two_layer"

    tokens: int = Field(16, gt=2, description="M, tokens per sample")
    d: int = Field(1024, gt=2, description="width of a token")
    signal: float = Field(64.0, gt=0, description="||mu||, length of the signal token")
    noise: float = Field(0.2, gt=0, description="sigma_p, standard deviation of the weak noise on a token's entries")
    strong: float = Field(20.0, ge=1, description="C_p, factor of the noise of the token of strong noise")
    projected: bool = Field(
        False, description="noise orthogonal to the signals, as in the theory, not in the published code"
    )
    test: int = Field(100, gt=0, description="test samples")
    threshold: float = Field(0.2, gt=0, description="a trial succeeds if the mean logistic test loss is below this")
    fitted: float = Field(0.01, ge=0, description="training ends when the mean training loss is below this")
    lr: float = Field(0.1, gt=0, description="step size of gradient descent")
    steps: int = Field(1000, gt=0, description="T, largest number of steps")
    watch: int = Field(0, ge=0, description="steps between tests during training; 0 for none")

    @property
    def snr(self) -> float:
        """The signal-to-noise ratio."""
        return float(self.signal / (self.noise * self.d**0.5))

    def recipe(self) -> Recipe:
        """See `Task.recipe`: gradient descent on all samples."""
        return Recipe(
            "logistic", "sgd", self.lr, batch=0, epochs=self.steps, steps=self.steps, stop_below=self.fitted,
            fixed_selection=True, watch=self.watch,
        )  # fmt: skip

    def success(self, test_loss: float, accuracy: float) -> bool:
        """See `Task.success`: the threshold is that of the paper's heat map."""
        return test_loss < self.threshold

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`. Only the signal tokens depend on `signal`. A smaller training set begins a larger one."""
        if n_train < 2:
            raise UserError("overfitting: a training set needs both classes", got=f"N={n_train}", allowed="2 or more")
        law = self.tokens, self.d, self.noise, self.strong, self.projected
        train, test = (
            self._split(n, (*law, split, repetition)) for split, n in (("train", n_train), ("test", self.test))
        )
        return Data(train, test, ("-1", "+1"))

    def _split(self, n: int, law: tuple[object, ...]) -> Split:
        def rng(name: str) -> np.random.Generator:
            return seeds.generator(self.name, *law, name)

        labels = balanced_classes(rng("labels"), n, 2)
        roles = rng("places").permuted(np.tile(np.arange(self.tokens), (n, 1)), axis=1)  # 0 is signal, 1 strong noise
        inputs = rng("noise").standard_normal((n, self.tokens, self.d), dtype=np.float32)
        inputs *= np.where(roles == 1, self.strong * self.noise, self.noise).astype(np.float32)[:, :, None]
        if self.projected:
            inputs[:, :, :2] = 0
        signal = roles == 0
        inputs[signal] = 0
        inputs[signal, 1 - labels] = self.signal
        return Split(inputs, labels, np.zeros(n, dtype=np.int64), signal.astype(np.float32))
