"""How often the rule by which boards tell strategies apart is wrong, how often its intervals hold, and what it tells.

python benchmarks/judging.py              # 20 minutes; prints the tables of RESULTS.md
python benchmarks/judging.py --worlds 20  # fewer of them

A world has 35 strategies, whose accuracies are made up item by item and seed by seed. Then the boards that are published.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.special import expit, ndtri
from scipy.stats import ttest_rel
from tabulate import tabulate

from sparsebench.board import flat
from sparsebench.board.entries import PRETRAINING, frame_of, settings_of
from sparsebench.board.paired import Contender, Pairs, compare, holm
from sparsebench.board.statistics import LEVEL

BOARDS = Path(__file__).resolve().parents[1] / "leaderboard"
KINDS = ("no seed noise", "one seed noise", "five unsteady", "unequal seed noise", "families")
FIVE, FAMILIES = 5, 7
SPREAD = {"five unsteady": 4.0, "unequal seed noise": 0.8, "families": 2.0}
"""Noise of the unsteady as a multiple of the others'; of its logarithm; and of the noisiest family."""


@dataclass(frozen=True)
class World:
    """What strategies are like that are equal in the mean over seeds and items.

    Attributes:
        kind: one of KINDS: how the noise of seeds differs. Strategies of a family share most of it, and of their items.
        S, R, I: seeds, strategies and test items.
        shared: whether all seeds have the same items.
        noise: standard deviation of a seed, in logits; .075 is what the spurious task of leaderboard/all has.
        cluster: items that show the same foreground and share most of how hard they are.
    """

    kind: str
    S: int = 3
    R: int = 35
    I: int = 1000
    shared: bool = False
    noise: float = 0.075
    cluster: int = 1

    def noises(self, rng: np.random.Generator) -> np.ndarray:
        """Return (R,) standard deviations."""
        kind, noise = self.kind, np.full(self.R, self.noise * (self.kind != KINDS[0]))
        if kind == "five unsteady":
            noise[:FIVE] *= SPREAD[kind]
        elif kind == "unequal seed noise":
            noise *= np.exp(rng.normal(0, SPREAD[kind], self.R))
        elif kind == "families":
            noise *= np.linspace(0, SPREAD[kind], FAMILIES)[np.arange(self.R) % FAMILIES]
        return noise

    def draw(self, rng: np.random.Generator, better: np.ndarray | float = 0.0) -> np.ndarray:
        """Return (R, S, I) which items are right, of strategies that are so much better, in logits."""
        R, S, I, tests = self.R, self.S, self.I, 1 if self.shared else self.S
        family, alike = np.arange(R) % FAMILIES, 0.8 * (self.kind == "families")

        def effects(n: int, *shape: int) -> np.ndarray:
            """Return effects of n strategies, which families share in part."""
            mine, theirs = rng.normal(0, 1, (n, *shape)), rng.normal(0, 1, (FAMILIES, *shape))
            return np.sqrt(alike) * theirs[family] + np.sqrt(1 - alike) * mine

        foregrounds = I // self.cluster
        items = rng.normal(0, 1, (1, tests, foregrounds)) + 0.5 * effects(R, tests, foregrounds)
        seeds = self.noises(rng)[:, None, None] * effects(R, S, 1)
        logits = np.repeat(items, self.cluster, axis=2) + seeds + np.reshape(better, (-1, 1, 1))
        return rng.random((R, S, I)) < expit(logits)

    def contenders(self, hits: np.ndarray) -> list[Contender]:
        """Return what (R, S, I) outcomes are to the judge."""
        clusters = None
        if self.cluster > 1:
            of_test = np.arange(self.I) // self.cluster
            clusters = {s: of_test + (0 if self.shared else s * self.I) for s in range(self.S)}
        return [
            Contender(
                {s: float(one.mean()) for s, one in enumerate(mine)},
                {s: ("same" if self.shared else f"items {s}", one) for s, one in enumerate(mine)},
                clusters,
            )
            for mine in hits
        ]

    def judged(self, seed: int) -> Pairs:
        """Return what the judge says of one such world."""
        return compare(self.contenders(self.draw(np.random.default_rng([seed, self.S, len(self.kind)]))))

    @property
    def name(self) -> str:
        """What tables call it."""
        of = f"{self.kind} {self.noise:g}" if self.kind != KINDS[0] else self.kind
        return of + (", items of all seeds the same" if self.shared else "") + (", clusters" * (self.cluster > 1))


def errors(world: World, worlds: int) -> tuple[float, float, float]:
    """Return in which share of worlds anything is told, and which share of intervals of pairs and accuracies hold."""
    upper, told, covered, own = np.triu_indices(world.R, 1), [], [], []
    for seed in range(worlds):
        pairs = world.judged(seed)
        told.append(pairs.better().any())
        covered.append((np.abs(pairs.mean) <= pairs.half)[upper].mean())
        own.append(((pairs.accuracy[:, 0] <= 0.5) & (pairs.accuracy[:, 1] >= 0.5)).mean())
    return float(np.mean(told)), float(np.mean(covered)), float(np.mean(own))


def steady(world: World) -> np.ndarray:
    """Return the (n,) strategies whose noise is not more than others'."""
    return np.arange(FIVE if world.kind == "five unsteady" else 0, world.R)


def power(world: World, worlds: int, beyond: float = 3.0) -> tuple[float, float]:
    """Return in which share of worlds a difference is told that lies so many standard errors beyond the critical value.

    The critical value is that of a normal number whose variance is known, by Bonferroni. The last strategy is better
    than the others; its pairs with steady ones count. Then the share that today's `least` says of its own difference.
    """
    usual, last = steady(world)[:-1], world.R - 1
    null = np.concatenate([world.judged(seed).mean[last, usual] for seed in range(worlds)])
    pairs = world.R * (world.R - 1) / 2
    difference = float(null.std()) * (float(ndtri(1 - (1 - LEVEL) / 2 / pairs)) + beyond)
    return _planted(world, worlds, difference), difference


def _planted(world: World, worlds: int, difference: float) -> float:
    told = []
    for seed in range(worlds):
        rng = np.random.default_rng([seed, world.S, 7])
        hits = world.draw(rng)
        hits[-1] |= rng.random(hits[-1].shape) < 2 * difference
        told.append(compare(world.contenders(hits)).better()[-1, steady(world)[:-1]].mean())
    return float(np.mean(told))


def detectable(world: World, worlds: int) -> tuple[float, float]:
    """Return the difference that is said to be told in 4 of 5 cases, and in which share it is."""
    upper = np.triu_indices(world.R, 1)
    least = float(np.median([np.median(world.judged(seed).least()[upper]) for seed in range(worlds)]))
    return least, _planted(world, worlds, least)


def differing(world: World, worlds: int) -> tuple[float, float, float]:
    """Return of worlds whose strategies differ the share of pairs told, told the wrong way round, and told before."""
    upper, counts = np.triu_indices(world.R, 1), []
    for seed in range(worlds):
        rng = np.random.default_rng([seed, world.S, 9])
        better = rng.normal(0, 0.15, world.R)
        contenders = world.contenders(world.draw(rng, better))
        told = compare(contenders).better()
        right = better[:, None] > better
        counts.append((told[upper].sum() + told.T[upper].sum(), (told & ~right).sum(), before(contenders)))
    return tuple(float(x) for x in np.mean(counts, axis=0) / len(upper[0]))


def before(contenders: list[Contender]) -> int:
    """Return how many pairs the former rule tells: McNemar's and Student's larger p, by Holm's method."""
    means = np.array([list(one.means.values()) for one in contenders])
    pairs, upper = compare(contenders), np.triu_indices(len(contenders), 1)
    with np.errstate(all="ignore"):
        p = np.array([ttest_rel(means[i], means[j]).pvalue for i, j in zip(*upper, strict=True)])
    p[np.isnan(p)] = 1.0
    return int((holm(np.fmax(p, pairs.p_items[upper])) <= 1 - LEVEL).sum())


def settings() -> Iterator[World]:
    """Yield the worlds that are tried."""
    for S in (3, 5):
        for shared in (False, True):
            for kind in KINDS:
                for noise in (0.075, 0.2) if kind != KINDS[0] else (0.0,):
                    yield World(kind, S=S, shared=shared, noise=noise)
    for kind in KINDS:
        for shared in (False, True):
            yield World(kind, shared=shared, cluster=5)


def published() -> Iterator[tuple[str, str, int, int, int, int, int]]:
    """Yield of each task of each published board pairs, and how many are told by the former rule and by this one."""
    for folder in sorted(path.parent for path in BOARDS.glob("*/leaderboard.csv")):
        for one in settings_of(frame_of(flat.frame(folder))):
            entries = [entry.at(one.largest) for key, entry in one.entries.items() if key[1] != "oracle"]
            contenders = [entry.contender for entry in entries if entry.size]
            if one.task == PRETRAINING or len(contenders) < 2:
                continue
            pairs = compare(contenders)
            upper = np.triu_indices(len(contenders), 1)
            told = int(pairs.better()[upper].sum() + pairs.better().T[upper].sum())
            items = int((holm(pairs.p_items[upper]) <= 1 - LEVEL).sum())
            seeds = int(np.median(pairs.n_seeds[upper]))
            yield folder.name, one.task, seeds, len(upper[0]), before(contenders), told, items
