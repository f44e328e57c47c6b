"""Simulate boards of trained networks that are only tested: coverage of intervals and rates of false positives.

python benchmarks/checkpoints.py              # 15 minutes; prints the tables of RESULTS.md
python benchmarks/checkpoints.py --sets 200   # fewer sets
python benchmarks/checkpoints.py --board leaderboard/vit-s  # what more networks or pictures would tell of a board

A set has the data of one board: whether each picture is classified correctly, by one checkpoint or by three, without a
strategy and with each strategy. The last strategy is random: it has three repetitions on each network, and its mean
counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from judging import power
from scipy.optimize import brentq
from scipy.special import expit
from tabulate import tabulate

from sparsebench.board.judge import judge
from sparsebench.board.reading import read
from sparsebench.stats.curves import area, kept_accuracy, weights
from sparsebench.stats.paired import NOT_SIGNIFICANT, Pairs, Results, compare, marks

ITEMS, OWN, ON_NETWORK = 1.5, 0.7, 0.7
"""Standard deviations in logits of a picture's difficulty: common, for one strategy, and for one network."""
NETWORK = 0.2
"""Standard deviation of a network's accuracy, in logits."""
DRAWS = 3
SPENT = (0.4, 0.7)
"""Shares of MACs of the curve: those of the second and third strategy; the first strategy is dense at 1."""
NODES, SHARES = np.polynomial.hermite_e.hermegauss(80)
MANY = 2_000
"""Number of networks that represent the population."""
DESIGNS = ((1, 400), (1, 2000), (3, 400), (3, 2000), (6, 400), (6, 2000))
"""Numbers of networks and of pictures for which the pairs of a board are simulated."""
BUDGETS = (0.5, 0.3)


@dataclass(frozen=True)
class Checkpoints:
    """Networks that are tested on the same pictures.

    Attributes:
        S, R, I: networks, strategies and pictures.
        accuracy: accuracy of the first strategy, mean over networks and pictures.
        apart: standard deviation of the strategies' accuracies, in logits; 0 for equal strategies.
        accuracies: accuracies of all strategies; by default they are drawn, as above.
        unsteady: standard deviation of the interaction of strategies and networks, in logits. With a single network the
            interaction is part of the true accuracy.
        kind: as in `judging.World`.
    """

    S: int = 1
    R: int = 8
    I: int = 200
    accuracy: float = 0.8
    apart: float = 0.5
    unsteady: float = 0.1
    kind: str = "one seed noise"
    accuracies: tuple[float, ...] = ()

    @cached_property
    def level(self) -> float:
        """The logit of the accuracy."""
        return self._logit(self.accuracy)

    def _logit(self, accuracy: float) -> float:
        return float(brentq(lambda x: self.truth(np.array([x]))[0] - accuracy, -20, 20))

    @cached_property
    def true_logits(self) -> np.ndarray:
        """The (R,) logits of `accuracies`."""
        return np.array([self._logit(accuracy) for accuracy in self.accuracies])

    def set_of(self, rng: np.random.Generator, better: float = 0.0) -> tuple[list[Results], np.ndarray]:
        """Return results, the last of which is better by `better`, and their logits, mean over networks.

        A single network equals the mean of many networks.
        """
        S, R, I = self.S, self.R, self.I
        logits = self.true_logits
        if not self.accuracies:
            logits = self.level + self.apart * rng.standard_normal(R) * (np.arange(R) > 0)
        of_networks = self._networks(rng, S) if S > 1 else np.zeros((R, 1))
        items = ITEMS * rng.standard_normal((1, 1, I)) + OWN * rng.standard_normal((R, 1, I))
        chance = expit(
            logits[:, None, None] + of_networks[:, :, None] + items + ON_NETWORK * rng.standard_normal((1, S, I))
        )
        hits = rng.random((R, S, I)) < chance
        drawn = (rng.random((DRAWS, S, I)) < chance[-1]).mean(axis=0)
        results = [_contender(rows) for rows in (*hits[:-1], drawn)]
        if better:
            results[-1] = _contender(hits[-1] | (rng.random((S, I)) < better / (1 - self.accuracy)))
        return results, logits

    def _networks(self, rng: np.random.Generator, S: int) -> np.ndarray:
        """Return (R, S) effects of networks on strategies, in logits."""
        return NETWORK * rng.standard_normal((1, S)) + self.unsteady * rng.standard_normal((self.R, S))

    def truth(self, logits: np.ndarray) -> np.ndarray:
        """Return the true accuracies: mean over all pictures and, with several networks, over all networks."""
        return _mean(logits, NETWORK**2 + self.unsteady**2 if self.S > 1 else 0.0)

    def kept(self, logits: np.ndarray) -> float:
        """Return the true kept accuracy of the second and third strategy as points of a curve."""
        curve = logits[[1, 2, 0]][:, None]
        if self.S > 1:
            curve = curve + self._networks(np.random.default_rng(0), MANY)[:3]
        accuracies = _mean(curve, 0.0)
        return float((weights(SPENT, SPENT[0]) @ accuracies / accuracies[-1]).mean())

    def judged(self, seed: int) -> Pairs:
        """Return the judge's comparisons of one set."""
        return compare(self.set_of(np.random.default_rng([seed, self.S, self.I]))[0])

    def drawn(self, rng: np.random.Generator, better: float) -> list[Results]:
        """Return results, the last of which is better by `better` and here not random."""
        return self.set_of(rng, better)[0]


def _contender(hits: np.ndarray) -> Results:
    """Return the contender of (S, I) outcomes. All networks are tested on the same pictures."""
    return Results({s: float(row.mean()) for s, row in enumerate(hits)}, {s: ("", row) for s, row in enumerate(hits)})


def _mean(logits: np.ndarray, among: float) -> np.ndarray:
    """Return the mean accuracies of (...) logits over pictures and over networks with the variance `among`."""
    spread = np.sqrt(ITEMS**2 + OWN**2 + ON_NETWORK**2 + among)
    return expit(logits[..., None] + spread * NODES) @ SHARES / SHARES.sum()


def holding(world: Checkpoints, sets: int) -> tuple[float, float, float]:
    """Return the coverage of intervals: of accuracies, of differences of pairs, and of kept accuracies."""
    upper, held = np.triu_indices(world.R, 1), []
    for seed in range(sets):
        results, logits = world.set_of(np.random.default_rng([seed, world.S, world.I]))
        pairs, truth, lone = compare(results), world.truth(logits), world.S == 1
        own = (pairs.accuracy[:, 0] <= truth) & (truth <= pairs.accuracy[:, 1])
        right = np.abs(pairs.mean - (truth[:, None] - truth)) <= pairs.half
        height = area([results[1], results[2], results[0]], SPENT, SPENT[0])
        assert height is not None
        (_, low, high) = kept_accuracy([height], results[0], lone)[0]
        held.append(
            (
                own.mean(),
                right[upper].mean(),
                low is not None and high is not None and low <= world.kept(logits) <= high,
            )
        )
    return tuple(np.mean(held, axis=0).tolist())  # type: ignore[return-value]


def erring(world: Checkpoints, sets: int) -> tuple[float, float]:
    """Return the share of sets of equal strategies with any significant pair, and with any mark against the last."""
    told, marked, last = [], [], world.R - 1
    for seed in range(sets):
        pairs = world.judged(seed)
        told.append(pairs.better().any())
        marked.append(set(marks(pairs, dict.fromkeys(range(last), last)).values()) != {NOT_SIGNIFICANT})
    return float(np.mean(told)), float(np.mean(marked))


def share_of_pairs(world: Checkpoints, sets: int) -> tuple[float, float]:
    """Return the share of pairs that differ significantly, and the mean half width of their intervals."""
    upper = np.triu_indices(world.R, 1)
    shares, widths = [], []
    for seed in range(sets):
        pairs = world.judged(seed)
        better = pairs.better()
        shares.append((better | better.T)[upper].mean())
        widths.append(np.nanmean(pairs.half[upper]))
    return float(np.mean(shares)), float(np.mean(widths))


def of_board(folder: Path, sets: int) -> Iterator[tuple[object, ...]]:
    """Yield for each section and budget of a board the pairs that differ, measured and simulated.

    In a simulation the accuracies of the board, at least 2 % and at most 98 %, are the true ones. Those of a board with
    few pictures differ more than the true ones, so the simulated shares are rather too large. The last column is the
    share of sets with any significant pair if all strategies are equal.
    """
    board = judge(read(folder))
    for ranking in (*board.rankings[:1], *board.sections):
        rows = ranking.rows
        for budget in BUDGETS:
            places = np.flatnonzero(rows["asked"] == budget).tolist()
            if len(places) < 2:
                continue
            pairs = ranking.pairs.among(places)
            upper = np.triu_indices(len(places), 1)
            better = pairs.better()
            measured = (better | better.T)[upper].mean(), np.nanmean(pairs.half[upper])
            items = len(next(iter(ranking.comparison.results[rows.index[places[0]]].hits.values()))[1])
            about = ranking.task, budget, len(places)
            yield (*about, len(ranking.comparison.seeds), items, "measured", *measured, None)
            accuracies = tuple(rows["accuracy"].iloc[places].clip(0.02, 0.98))
            for S, I in DESIGNS:
                world = Checkpoints(S=S, R=len(places), I=I, accuracies=accuracies)
                equal = replace(world, accuracies=(), apart=0.0, accuracy=float(np.median(accuracies)))
                told, _ = erring(equal, sets)
                yield (*about, S, I, "simulated", *share_of_pairs(world, sets), told)


def worlds() -> Iterator[Checkpoints]:
    """Yield the simulated settings."""
    for S in (1, 3):
        for accuracy in (0.5, 0.8, 0.95, 0.98):
            for I in (200, 1000):
                yield Checkpoints(S=S, I=I, accuracy=accuracy)
    yield Checkpoints(S=3, unsteady=0.0)
    yield Checkpoints(S=3, unsteady=0.4)


def main() -> None:
    """Run everything and print the tables."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sets", type=int, default=2000, help="simulated sets for each row of a table")
    arguments.add_argument("--board", type=Path, help="a published board: only its table of pairs")
    asked = arguments.parse_args()
    n = asked.sets

    def show(headers: tuple[str, ...], rows: list[tuple[object, ...]]) -> None:
        print(tabulate(rows, headers=headers, tablefmt="pipe", floatfmt=".3f"), end="\n\n", flush=True)

    if asked.board is not None:
        about_pairs = ("section", "budget", "strategies", "networks", "pictures", "")
        show((*about_pairs, "pairs that differ", "half width", "any pair of equals"), [*of_board(asked.board, n)])
        return

    about = ("networks", "pictures", "accuracy", "unsteady")
    show((*about, "accuracies", "differences", "kept accuracies"),
         [(w.S, w.I, w.accuracy, w.unsteady, *holding(w, n)) for w in worlds()])  # fmt: skip
    equal = [replace(w, apart=0.0) for w in worlds()]
    equal += [replace(w, R=35) for w in equal if w.I == 200 and w.accuracy > 0.5 and w.unsteady == 0.1]
    show(("strategies", *about, "anything told", "anything marked"),
         [(w.R, w.S, w.I, w.accuracy, w.unsteady, *erring(w, n)) for w in equal])  # fmt: skip
    show(("strategies", *about, "difference", "told"),
         [(w.R, w.S, w.I, w.accuracy, w.unsteady, *power(w, n // 10)) for w in equal if w.accuracy < 0.9])  # fmt: skip


if __name__ == "__main__":
    main()
