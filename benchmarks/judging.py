"""Simulate the comparison rule of boards: false positives, coverage of intervals, and power.

python benchmarks/judging.py              # 20 minutes; prints the tables of RESULTS.md
python benchmarks/judging.py --worlds 20  # fewer worlds
python benchmarks/judging.py --board leaderboard/embedded  # worlds whose strategies vary like those of a board

A world has 35 strategies with simulated outcomes of each item and seed. The last table is of the published boards.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import expit, stdtrit
from scipy.stats import spearmanr
from tabulate import tabulate

from sparsebench.board.judge import judge
from sparsebench.board.over_budgets import Curves, points_of
from sparsebench.board.reading import DENSE, read
from sparsebench.stats import curves
from sparsebench.stats.intervals import LEVEL
from sparsebench.stats.paired import NOT_SIGNIFICANT, Pairs, Results, compare, holm, marks, student

BOARDS = Path(__file__).resolve().parents[1] / "leaderboard"
KINDS = ("no seed noise", "one seed noise", "five unsteady", "unequal seed noise", "families")
FIVE, FAMILIES = 5, 7
SPREAD = {"five unsteady": 4.0, "unequal seed noise": 0.8, "families": 2.0}
"""Noise of the five unsteady strategies as a multiple of the others'; standard deviation of the logarithm of the noise;
and noise of the noisiest family as a multiple."""


@dataclass(frozen=True)
class World:
    """A distribution of strategies with equal means over seeds and items.

    Attributes:
        kind: one of KINDS: how the noise of seeds differs between strategies. Strategies of a family share most of
            their effects of seeds and items.
        S, R, I: seeds, strategies and test items.
        shared: whether all seeds have the same items.
        noise: standard deviation of a seed, in logits; .075 as in the spurious task of a board of 37 strategies.
        cluster: number of items with the same foreground, which share most of their difficulty.
    """

    kind: str
    S: int = 3
    R: int = 35
    I: int = 1000
    shared: bool = False
    noise: float = 0.075
    cluster: int = 1

    def noises(self, rng: np.random.Generator) -> np.ndarray:
        """Return (R,) standard deviations of seeds."""
        kind, noise = self.kind, np.full(self.R, self.noise * (self.kind != KINDS[0]))
        if kind == "five unsteady":
            noise[:FIVE] *= SPREAD[kind]
        elif kind == "unequal seed noise":
            noise *= np.exp(rng.normal(0, SPREAD[kind], self.R))
        elif kind == "families":
            noise *= np.linspace(0, SPREAD[kind], FAMILIES)[np.arange(self.R) % FAMILIES]
        return noise

    def draw(self, rng: np.random.Generator, better: np.ndarray | float = 0.0) -> np.ndarray:
        """Return (R, S, I) booleans: whether items are correct, for strategies better by `better` in logits."""
        R, S, I, tests = self.R, self.S, self.I, 1 if self.shared else self.S
        family, alike = np.arange(R) % FAMILIES, 0.8 * (self.kind == "families")

        def effects(n: int, *shape: int) -> np.ndarray:
            """Return effects of n strategies, partly shared within families."""
            single, common = rng.normal(0, 1, (n, *shape)), rng.normal(0, 1, (FAMILIES, *shape))
            return np.sqrt(alike) * common[family] + np.sqrt(1 - alike) * single

        foregrounds = I // self.cluster
        items = rng.normal(0, 1, (1, tests, foregrounds)) + 0.5 * effects(R, tests, foregrounds)
        seeds = self.noises(rng)[:, None, None] * effects(R, S, 1)
        logits = np.repeat(items, self.cluster, axis=2) + seeds + np.reshape(better, (-1, 1, 1))
        return rng.random((R, S, I)) < expit(logits)

    def results(self, hits: np.ndarray) -> list[Results]:
        """Return the results of (R, S, I) outcomes."""
        clusters = None
        if self.cluster > 1:
            of_test = np.arange(self.I) // self.cluster
            clusters = {s: of_test + (0 if self.shared else s * self.I) for s in range(self.S)}
        return [
            Results(
                {s: float(items.mean()) for s, items in enumerate(seeds)},
                {s: ("same" if self.shared else f"items {s}", items) for s, items in enumerate(seeds)},
                clusters,
            )
            for seeds in hits
        ]

    def drawn(self, rng: np.random.Generator, better: float) -> list[Results]:
        """Return results of accuracy 1/2, the last of which is better by `better`."""
        hits = self.draw(rng)
        hits[-1] |= rng.random(hits[-1].shape) < 2 * better
        return self.results(hits)

    def judged(self, seed: int) -> Pairs:
        """Return the judge's comparisons in one simulated world."""
        return compare(self.results(self.draw(np.random.default_rng([seed, self.S, len(self.kind)]))))

    @property
    def name(self) -> str:
        """The name of the world in tables."""
        of = f"{self.kind} {self.noise:g}" if self.kind != KINDS[0] else self.kind
        return of + (", items of all seeds the same" if self.shared else "") + (", clusters" * (self.cluster > 1))


@dataclass(frozen=True, eq=False)
class LikeBoard(World):
    """Strategies with equal means that vary like those of a published board of trained networks.

    Effects of networks are normal. Their covariance is that of the board's networks beyond the variance that items
    explain. Items are those of the board minus each strategy's mean. Foregrounds are resampled, with the same sample
    for all networks.

    Attributes:
        rest: (R, networks, items) deviation of each item from a strategy's mean with a network.
        clusters: (networks, items) number of the foreground of an item.
        effects: (R, R) a square root of the covariance of networks.
    """

    what: str = ""
    rest: np.ndarray = field(default_factory=lambda: np.empty(0))
    clusters: np.ndarray = field(default_factory=lambda: np.empty(0))
    effects: np.ndarray = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, what: str, S: int, results: Sequence[Results]) -> LikeBoard:
        """Return the world of S networks like those of the results, which all have the same networks."""
        seeds = sorted(results[0].means)
        scores = np.array([[contender.hits[s][1] for s in seeds] for contender in results], dtype=float)
        means = scores.mean(axis=2, keepdims=True)
        assert results[0].clusters is not None
        numbers = np.array([results[0].clusters[s] for s in seeds])
        rest, between, items = scores - means, np.cov(means[:, :, 0]), np.zeros((len(scores), len(scores)))
        for of_network, of_test in zip(rest.transpose(1, 0, 2), numbers, strict=True):
            names, place = np.unique(of_test, return_inverse=True)
            totals = np.array([np.bincount(place, row, len(names)) for row in of_network])
            items += totals @ totals.T / of_network.shape[1] ** 2 / len(seeds)
        values, vectors = np.linalg.eigh(between - items)
        effects = vectors * np.sqrt(np.maximum(values, 0.0))
        shape = {"R": len(scores), "I": scores.shape[2], "S": S}
        return cls("as on the board", **shape, what=what, rest=rest, clusters=numbers, effects=effects)

    def judged(self, seed: int) -> Pairs:
        """See `World.judged`."""
        return compare(self.drawn(np.random.default_rng([seed, self.S, 3]), 0.0))

    def drawn(self, rng: np.random.Generator, better: float) -> list[Results]:
        """Return results, the last of which is better by `better`."""
        networks = rng.permutation(len(self.clusters))[: self.S]
        every = np.unique(self.clusters)
        often = np.bincount(rng.integers(0, len(every), len(every)), minlength=len(every))
        effects = self.effects @ rng.standard_normal((self.R, self.S)) + 0.5
        effects[-1] += better
        hits: list[dict[int, tuple[str, np.ndarray]]] = [{} for _ in range(self.R)]
        clusters = {}
        for s, network in enumerate(networks.tolist()):
            place = np.searchsorted(every, self.clusters[network])
            items = np.repeat(np.arange(self.I), often[place])
            copy = np.concatenate([np.arange(n) for n in often[place]])  # a foreground drawn twice counts as two
            clusters[s] = place[items] + copy * len(every)
            for r in range(self.R):
                hits[r][s] = f"items {s}", self.rest[r, network, items] + effects[r, s]
        return [Results({s: float(x.mean()) for s, (_, x) in seeds.items()}, seeds, clusters) for seeds in hits]

    @property
    def name(self) -> str:
        """See `World.name`."""
        return f"{self.what}, {self.R} strategies"


def errors(world: World, worlds: int) -> tuple[float, float, float, float]:
    """Return the shares of worlds with any significant pair and with any mark, and the coverage of intervals.

    Marks are comparisons with the last strategy. The coverage is of differences of pairs, then of accuracies.
    """
    upper, told, marked, covered, own = np.triu_indices(world.R, 1), [], [], [], []
    for seed in range(worlds):
        pairs = world.judged(seed)
        told.append(pairs.better().any())
        marked.append(set(marks(pairs, dict.fromkeys(range(world.R - 1), world.R - 1)).values()) != {NOT_SIGNIFICANT})
        covered.append((np.abs(pairs.mean) <= pairs.half)[upper].mean())
        own.append(((pairs.accuracy[:, 0] <= 0.5) & (pairs.accuracy[:, 1] >= 0.5)).mean())
    return float(np.mean(told)), float(np.mean(marked)), float(np.mean(covered)), float(np.mean(own))


def steady(world: World) -> np.ndarray:
    """Return the (n,) numbers of the strategies without extra noise."""
    return np.arange(FIVE if world.kind == "five unsteady" else 0, world.R)


def power(world: World, worlds: int, beyond: float = 3.0) -> tuple[float, float]:
    """Return a difference above the critical value by `beyond` standard errors, and the share of pairs that detect it.

    The critical value is that of the first pair in Holm's method, median over steady pairs and worlds. The standard
    error is that of these pairs' differences between worlds. The last strategy is better than the others by this
    difference.
    """
    steadies, last = steady(world)[:-1], world.R - 1
    level = (1 - LEVEL) / (world.R * (world.R - 1))
    null = [world.judged(seed) for seed in range(worlds)]
    critical = [stdtrit(pairs.freedom[last, steadies], 1 - level) * pairs.error[last, steadies] for pairs in null]
    difference = float(np.median(critical) + beyond * np.std([pairs.mean[last, steadies] for pairs in null]))
    return difference, planted(world, worlds, difference)


def detectable(world: World, worlds: int) -> tuple[float, float]:
    """Return the difference that boards claim to detect in 4 of 5 pairs, and the share of pairs that detect it."""
    least = float(np.median([world.judged(seed).least() for seed in range(worlds)]))
    return least, planted(world, worlds, least)


def planted(world: World, worlds: int, difference: float) -> float:
    """Return the share of steady strategies that are significantly worse than the last, better by `difference`."""
    told = []
    for seed in range(worlds):
        rng = np.random.default_rng([seed, world.S, 7])
        told.append(compare(world.drawn(rng, difference)).better()[-1, steady(world)[:-1]].mean())
    return float(np.mean(told))


def differing(world: World, worlds: int) -> tuple[float, float, float]:
    """Return shares of significant pairs if strategies differ: by the former rule, this rule, and with a wrong sign."""
    counts = []
    for seed in range(worlds):
        rng = np.random.default_rng([seed, world.S, 9])
        better = rng.normal(0, 0.25, world.R)
        results = world.results(world.draw(rng, better))
        told = compare(results).better()
        counts.append((before(results), told.sum(), (told & (better[:, None] <= better)).sum()))
    former, current, wrong = np.mean(counts, axis=0) / (world.R * (world.R - 1) / 2)
    return float(former), float(current), float(wrong)


def before(results: list[Results]) -> int:
    """Return the number of significant pairs by the former rule: the larger p of McNemar and Student, with Holm."""
    pairs, upper = compare(results), np.triu_indices(len(results), 1)
    p = [_student(results[i], results[j]) for i, j in zip(*upper, strict=True)]
    return int((holm(np.fmax(p, pairs.p_items[upper])) <= 1 - LEVEL).sum())


def _student(a: Results, b: Results) -> float:
    """Return p of Student's paired t test over the common seeds."""
    gains = np.array([a.means[s] - b.means[s] for s in sorted(set(a.means) & set(b.means))])
    if len(gains) < 2:
        return float("nan")
    return float(student(gains.mean(), gains.var(ddof=1) / len(gains), np.array(len(gains) - 1.0)))


def settings() -> Iterator[World]:
    """Yield the simulated worlds."""
    for S in (3, 5):
        for shared in (False, True):
            for kind in KINDS:
                for noise in (0.075, 0.2) if kind != KINDS[0] else (0.0,):
                    yield World(kind, S=S, shared=shared, noise=noise)
    for shared in (False, True):
        for kind in KINDS:
            yield World(kind, shared=shared, cluster=5)


Lines = list[tuple[pd.DataFrame, list[Results]]]
"""For each strategy, the rows with fewer MACs than dense and their results."""


def measured(folder: Path) -> tuple[Curves, Results, Lines]:
    """Return the table of curves of a board, dense, and the points of each strategy with results of all networks.

    Oracles are left out.
    """
    (ranking,) = judge(read(folder)).rankings
    board, every, results = ranking.curves, ranking.every, ranking.comparison.results
    assert board is not None
    dense = results[every.index[every["curve"] == DENSE][0]]
    lines, below = [], points_of(every)
    for name, kind in board.rows["kind"].items():
        rows = below.get(name, every[:0])
        points = [results[entry] for entry in rows.index]
        if name != DENSE and kind != "oracle" and all(point.means.keys() == dense.means.keys() for point in points):
            lines.append((rows, points))
    return board, dense, lines


def areas(board: Curves, dense: Results, lines: Lines) -> list[Results]:
    """Return the areas of the curves of the strategies that ran at the lowest budget."""
    heights = (
        curves.area([*points, dense], rows["macs_ratio"].tolist(), board.budgets[-1])
        for rows, points in lines
        if board.budgets[-1] in set(rows["asked"])
    )
    return [area for area in heights if area is not None]


def at(budget: float, lines: Lines) -> list[Results]:
    """Return the strategies at one of a board's budgets."""
    return [
        point for rows, points in lines for asked, point in zip(rows["asked"], points, strict=True) if asked == budget
    ]


def like(folder: Path) -> Iterator[World]:
    """Yield worlds of 3, 5, 10 and all networks like a board: by the areas of curves, and at the middle budget."""
    board, dense, lines = measured(folder)
    most = len(dense.means)
    for S in sorted({n for n in (3, 5, 10, most) if n <= most}):
        yield LikeBoard.of("area", S, areas(board, dense, lines))
        yield LikeBoard.of(f"at {board.middle:g}", S, at(board.middle, lines))


def agreement(folder: Path) -> Iterator[tuple[object, ...]]:
    """Yield Spearman's correlations of a board's orders of strategies between networks, on the area and by budget.

    For pairs of networks these are the smallest, the median and the largest correlation, and the share of at least .9.
    For 200 random halves of the networks it is the median.
    """
    board, dense, lines = measured(folder)
    rng = np.random.default_rng(0)
    for name, block in (("area", areas(board, dense, lines)), *((f"@{b:g}", at(b, lines)) for b in board.budgets)):
        means = np.array([[contender.means[s] for s in sorted(contender.means)] for contender in block])
        S = means.shape[1]
        every = spearmanr(means).statistic[np.triu_indices(S, 1)]
        orders = [rng.permutation(S) for _ in range(200)]
        halves = [spearmanr(means[:, o[: S // 2]].mean(1), means[:, o[S // 2 :]].mean(1)).statistic for o in orders]
        yield name, len(block), every.min(), np.median(every), every.max(), (every >= 0.9).mean(), np.median(halves)


def published() -> Iterator[tuple[object, ...]]:
    """Yield the numbers of significant pairs of each task of each published board: by items alone and by both rules."""
    for folder in sorted(path.parent for path in BOARDS.glob("*/leaderboard.csv")):
        for ranking in judge(read(folder), "task").rankings:
            comparison, entries = ranking.comparison, ranking.rows.index
            results, upper = [comparison.results[i] for i in entries], np.triu_indices(len(entries), 1)
            if not upper[0].size:
                continue
            items = int((holm(ranking.pairs.p_items[upper]) <= 1 - LEVEL).sum())
            significant = int(ranking.pairs.better().sum())
            n = comparison.largest
            seeds = int(np.median(ranking.pairs.n_seeds[upper]))
            yield folder.name, comparison.task, n, seeds, len(upper[0]), items, before(results), significant


def main() -> None:
    """Run everything and print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--worlds", type=int, default=150)
    arguments.add_argument("--board", type=Path, help="a board's folder")
    given = arguments.parse_args()
    n = given.worlds

    def show(headers: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
        print(tabulate(rows, headers=headers, tablefmt="pipe", floatfmt=".3f"), end="\n\n", flush=True)

    worlds = list(settings() if given.board is None else like(given.board))
    show(("seeds", "world", "anything told", "anything marked", "intervals of pairs hold", "of accuracies"),
         [(world.S, world.name, *errors(world, n)) for world in worlds])  # fmt: skip
    some = [world for world in worlds if world.cluster == 1 and world.noise < 0.1]
    show(("seeds", "world", "difference", "told", "said to be told in .8", "told"),
         [(world.S, world.name, *power(world, n // 3), *detectable(world, n // 3)) for world in some])  # fmt: skip
    if given.board is not None:
        show(("order on", "strategies", "least", "median", "largest", "at least .9", "of halves"),
             list(agreement(given.board)))  # fmt: skip
        return
    show(("seeds", "world", "former rule", "this rule", "the wrong way round"),
         [(world.S, world.name, *differing(world, n // 3)) for world in some])  # fmt: skip
    show(("board", "task", "N", "seeds", "pairs", "items alone", "former rule", "this rule"), list(published()))


if __name__ == "__main__":
    main()
