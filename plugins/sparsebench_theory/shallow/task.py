"""The data model of Li et al. (ICLR 2023): label-relevant, confusing and irrelevant patterns as tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sparsebench import seeds
from sparsebench.errors import UserError
from sparsebench.tasks.base import Data, Inputs, Locations, Recipe, Split, Task
from sparsebench_theory.patterns import around, balanced_classes, orthonormal, scales, spread

CONFUSION = 0.04
"""Default of alpha_#."""
RULES = ("confusion", "irrelevant", "confusion_ratio")
"""The three parameters that determine alpha_#."""
KAPPA = 2**0.5
"""Distance of two orthonormal patterns."""
ROUNDING = 1e-9
"""Tolerance for shares of the test samples, which differ by at least one sample."""
NAMES = {2: ("-1", "+1"), 4: ("(-1,-1)", "(-1,+1)", "(+1,-1)", "(+1,+1)")}
"""Names of the classes, by their number."""


class Theory(Task):
    """Which pattern has the most tokens? Li et al. 2023, Section 4.1, with a step size that trains.

    Each sample has round(alpha_* L) tokens of the pattern of its class, which are relevant. Confusing tokens have the
    patterns of other classes. The other tokens are spread evenly over the irrelevant patterns. Two classes have two
    discriminative patterns; the four classes y in {+1,-1}^2 of Appendix G have four. The pattern of class number c is
    mu_(classes - c): mu_1 for +1 and mu_2 for -1; mu_1 to mu_4 for (+1,+1), (+1,-1), (-1,+1) and (-1,-1). A token is a
    vector of its pattern's set plus Gaussian noise.

    With `spurious`, some of the irrelevant tokens have an additional pattern mu_s: in most training samples of class
    +1, in few of class -1, and in half of the test samples of each class. Groups are then (class, presence of mu_s).
    """

    name: ClassVar[str] = "theory"
    inputs: ClassVar[Inputs] = "tokens"
    default_model: ClassVar[str] = "shallow"
    added: ClassVar[frozenset[str]] = frozenset({"criterion", "error"})

    tokens: int = Field(50, gt=1, description="L, tokens per sample")
    d: int = Field(10, gt=1, description="width of a token")
    patterns: int = Field(5, gt=2, description="M, number of patterns; one for each class is discriminative")
    classes: Literal[2, 4] = Field(2, description="2, or 4 as in Appendix G")
    relevant: float = Field(0.2, gt=0, lt=1, description="alpha_*, share of label-relevant tokens")
    confusion: float | None = Field(None, ge=0, lt=1, description="alpha_#, share of confusing tokens; by default 0.04")
    irrelevant: float | None = Field(None, gt=0, lt=1, description="alpha_nd instead: alpha_# = 1 - alpha_* - alpha_nd")
    confusion_ratio: float | None = Field(None, ge=0, description="alpha_# / alpha_* instead")
    labels: Literal["balanced", "iid"] = Field(
        "balanced", description="balanced: classes are equally frequent; iid: labels are drawn independently"
    )
    positions: Literal["permuted", "fixed"] = Field(
        "permuted", description="positions of the patterns: random in each sample, or sorted"
    )
    set_size: int = Field(1, gt=0, description="K, vectors in each pattern's set (Appendix G)")
    set_diameter: float = Field(0.0, ge=0, description="Delta, diameter of a pattern's set")
    noise: float = Field(0.01, ge=0, description="c0, standard deviation of the noise on a token's entries")
    noisy_share: float = Field(0.0, ge=0, le=1, description="share of tokens with the larger noise")
    noisy_std: float = Field(0.35, ge=0, description="standard deviation of the larger noise")
    spurious: float = Field(0.0, ge=0, lt=1, description="alpha_s, share of tokens of the spurious pattern; 0 for none")
    spurious_rate: float = Field(
        0.9, ge=0, le=1, description="rho, share of the training samples of class +1 with it; class -1: 1 - rho"
    )
    test: int = Field(100, gt=0, description="test samples")
    threshold: float = Field(1e-3, gt=0, description="a trial succeeds when the mean test hinge loss is below it")
    criterion: Literal["loss", "error"] = Field(
        "loss", description="criterion of success: the paper's, on the test loss, or the test error"
    )
    error: float = Field(0.01, ge=0, lt=1, description="largest test error of a successful trial, with criterion=error")
    lr: float | None = Field(None, gt=0, description="step size; by default L / 50")
    batch: int = Field(20, gt=0, description="B, samples per step")
    steps: int = Field(600, gt=0, description="T, largest number of steps")
    watch: int = Field(0, ge=0, description="steps between tests during training; 0 for none")

    def check(self) -> None:
        """See `Task.check`."""
        self._numbers()
        if self.spurious and self.classes != 2:
            raise UserError(
                "theory: the spurious pattern needs two classes", got=f"classes={self.classes}",
                allowed="classes=2", next_step="leave spurious or classes out",
            )  # fmt: skip
        if self.d < self._patterns:
            raise UserError(
                "theory: patterns are orthonormal, so d must be at least their number", got=f"d={self.d}",
                allowed=f"d of {self._patterns} or more", next_step="raise d or lower patterns",
            )  # fmt: skip
        if self.set_diameter >= KAPPA or (self.set_diameter > 0 and self.set_size == 1):
            raise UserError(
                "theory: the vectors of a pattern's set must be nearer to each other than patterns are",
                got=f"set_size={self.set_size}, set_diameter={self.set_diameter:g}",
                allowed="set_size of 2 or more with 2 tau + set_diameter < kappa, which is 1.414",
                next_step="raise set_size or lower set_diameter",
            )

    def recipe(self) -> Recipe:
        """See `Task.recipe`: Algorithm 1, plain SGD on the hinge loss."""
        lr = self.tokens / 50 if self.lr is None else self.lr
        return Recipe(
            "hinge", "sgd", lr, self.batch, epochs=self.steps, steps=self.steps, stop_at_zero_loss=True,
            fixed_selection=True, watch=self.watch,
        )  # fmt: skip

    def success(self, test_loss: float, accuracy: float) -> bool:
        """See `Task.success`; by default the paper's criterion."""
        if self.criterion == "loss":
            return test_loss < self.threshold
        return 1 - accuracy < self.error + ROUNDING

    def successes(self, test_loss: float, accuracy: float) -> dict[str, bool]:
        """See `Task.successes`; with criterion=error also the paper's criterion, as `success_loss`."""
        successes = super().successes(test_loss, accuracy)
        return successes if self.criterion == "loss" else successes | {"success_loss": test_loss < self.threshold}

    def counts(self) -> np.ndarray:
        """Return (M,) tokens of each pattern in a sample of class +1 or (+1,+1) without the spurious pattern.

        The relevant pattern is first, followed by the confusing and the irrelevant ones.
        """
        return self._counts(0)[: self.patterns]

    def realised_shares(self) -> tuple[float, float, float]:
        """Return alpha_*, alpha_# and alpha_nd after rounding to whole tokens; alpha_nd includes spurious tokens."""
        relevant, confusing, irrelevant = self._numbers()
        return relevant / self.tokens, confusing / self.tokens, irrelevant / self.tokens

    @property
    def _patterns(self) -> int:
        """The number of patterns, including the spurious one."""
        return self.patterns + (self.spurious > 0)

    def _numbers(self) -> tuple[int, int, int]:
        """Return the numbers of relevant, confusing and irrelevant tokens of a sample.

        The two given shares are rounded, and the third is the rest.

        Raises:
            UserError: such samples are impossible.
        """
        counts = [rule for rule in RULES if getattr(self, rule) is not None]
        if len(counts) > 1:
            raise UserError(
                "theory: the share of confusing tokens is given more than once", got=" and ".join(counts),
                allowed=f"one of {', '.join(RULES)}", next_step="leave the others out",
            )  # fmt: skip
        relevant = round(self.relevant * self.tokens)
        if self.irrelevant is not None:
            confusing = self.tokens - relevant - round(self.irrelevant * self.tokens)
        else:
            share = CONFUSION if self.confusion is None else self.confusion
            if self.confusion_ratio is not None:
                share = self.confusion_ratio * self.relevant
            confusing = round(share * self.tokens)
        irrelevant = self.tokens - relevant - confusing
        spurious = round(self.spurious * self.tokens)
        silent = self.patterns - self.classes
        obstacle = None
        if min(confusing, irrelevant) < 0:
            obstacle = "shares that sum to at most 1", "lower one of them"
        elif silent < 1:
            obstacle = f"more patterns than the {self.classes} classes", "raise patterns"
        elif relevant <= max(spread(confusing, self.classes - 1)):
            obstacle = (
                "more relevant tokens than confusing ones of any pattern, so that the label is unique",
                "raise relevant or tokens, or lower the share of confusing tokens",
            )
        elif self.spurious > 0 and spurious < 1:
            obstacle = "a spurious share of a token or more", "raise spurious or tokens"
        elif irrelevant - spurious < silent:
            obstacle = (
                f"an irrelevant token of each of the {silent} irrelevant patterns" + " beside it" * (self.spurious > 0),
                "raise the share of irrelevant tokens or tokens, or lower patterns"
                + " or spurious" * (self.spurious > 0),
            )
        if obstacle is not None:
            allowed, next_step = obstacle
            numbers = f"{relevant} relevant, {confusing} confusing and {irrelevant} irrelevant tokens"
            raise UserError(
                f"theory: {self.tokens} tokens with {self.patterns} patterns cannot have these shares",
                got=numbers + f", {spurious} of them spurious" * (self.spurious > 0),
                allowed=allowed,
                next_step=next_step,
            )
        return relevant, confusing, irrelevant

    def _counts(self, present: int) -> np.ndarray:
        """Return (M + 1,) tokens of each pattern, the spurious one last, in a sample with it (1) or without it (0)."""
        relevant, confusing, irrelevant = self._numbers()
        spurious = present * round(self.spurious * self.tokens)
        others = spread(irrelevant - spurious, self.patterns - self.classes)
        return np.array([relevant, *spread(confusing, self.classes - 1), *others, spurious])

    def _layouts(self) -> np.ndarray:
        """Return (classes, 2, L), the pattern of each token by class and presence of mu_s, before permutation."""
        roles = np.stack([np.repeat(np.arange(self.patterns + 1), self._counts(present)) for present in (0, 1)])
        shifts = self.classes - 1 - np.arange(self.classes)[:, None, None]
        return np.where(roles < self.classes, (roles + shifts) % self.classes, roles)

    def draw(self, n_train: int, repetition: int, locations: Locations) -> Data:
        """See `Task.draw`. A smaller training set is the beginning of a larger one.

        The spurious pattern, if any, is the last of `Data.patterns`.
        """
        self.check()
        training = {"test", "threshold", "criterion", "error", "lr", "batch", "steps", "watch"}
        law = self.model_dump_json(exclude={*training, *RULES, "relevant"}), self.counts().tolist(), repetition
        mu = orthonormal(seeds.generator(*law, "patterns"), self.d, self._patterns)
        members = around(seeds.generator(*law, "sets"), mu, self.set_size, self.set_diameter)
        train, test = (
            self._split(members, n, rate, partial(seeds.generator, *law, split))
            for split, n, rate in (("train", n_train, self.spurious_rate), ("test", self.test, 0.5))
        )
        names = NAMES[self.classes]
        groups = tuple(f"{name} {attribute} spurious" for name in names for attribute in ("without", "with"))
        return Data(train, test, names, groups if self.spurious else ("all",), mu)

    def _split(self, members: np.ndarray, n: int, rate: float, rng: Callable[[str], np.random.Generator]) -> Split:
        """Return n samples from the (M, K, d) members of the patterns. Each quantity has its own generator.

        `rate` is the share of the samples of class +1 with the spurious pattern.
        """
        iid = self.labels == "iid"
        labels = (
            rng("labels").integers(self.classes, size=n) if iid else balanced_classes(rng("labels"), n, self.classes)
        )
        present = np.zeros(n, dtype=np.int64)
        if self.spurious:
            present += rng("spurious").random(n) < np.where(labels == 1, rate, 1 - rate)
        pattern = self._layouts()[labels, present]
        if self.positions == "permuted":
            pattern = rng("places").permuted(pattern, axis=1)
        vector = pattern * self.set_size
        if self.set_size > 1:
            vector += rng("members").integers(self.set_size, size=pattern.shape)
        inputs = rng("noise").standard_normal((n, self.tokens, self.d), dtype=np.float32)
        noisy = round(self.noisy_share * self.tokens)
        inputs *= scales(rng("noisy"), n, self.tokens, (self.noise, self.noisy_std), noisy)
        inputs += members.reshape(-1, self.d).take(vector, axis=0)
        relevance = (pattern == self.classes - 1 - labels[:, None]).astype(np.float32)
        groups = 2 * labels + present if self.spurious else present
        return Split(inputs, labels, groups, relevance)
