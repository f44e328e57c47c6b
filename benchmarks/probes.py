"""Simulate the intervals of images to target: how often they cover the true number, censored ends counted.

python benchmarks/probes.py             # a few minutes; prints the table of RESULTS.md
python benchmarks/probes.py --sets 200  # fewer sets

A set has the learning curves of dense and of a strategy: outcomes of test items at six numbers of training images, in a
few repetitions. An item is correct if a level, which rises with the number of images, plus normal effects of the item,
the repetition and both is positive, so the true accuracies are known. True numbers below the smallest or above the
largest one are covered if the interval ends there.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri
from tabulate import tabulate

from sparsebench.stats import targets
from sparsebench.stats.intervals import BELOW
from sparsebench.stats.paired import Results
from sparsebench.stats.targets import Target, images_to_target

SIZES = (20, 40, 80, 160, 320, 640)
CHANCE = 0.1
ITEM, COMMON = 0.8, 0.8
"""Standard deviation of the effects of items, and the share of their variance that both curves have in common."""


@dataclass(frozen=True)
class Setting:
    """How sets are drawn.

    Attributes:
        repetitions, items: numbers of both.
        shared: whether all repetitions test the same items.
        noise: standard deviation of the effect of a repetition at 20 images; it falls with the root of their number.
    """

    repetitions: int
    items: int
    shared: bool
    noise: float


def levels(rng: np.random.Generator) -> np.ndarray:
    """Return the (2, 6) true accuracies of dense and of a strategy."""
    top = rng.uniform(0.6, 0.9)
    start = rng.uniform(0.3, 0.8, 2)
    speed = rng.uniform(0.4, 1.2, 2)
    tops = top + np.array([0.0, rng.uniform(-0.12, 0.08)])
    n = np.array(SIZES) / SIZES[0]
    shares = 1 - (1 - start[:, None]) * n ** -speed[:, None]
    return CHANCE + (tops[:, None] - CHANCE) * shares


def draw(setting: Setting, accuracies: np.ndarray, rng: np.random.Generator) -> list[list[Results]]:
    """Return the curves of a set, one for each row of accuracies."""
    R, I, K = setting.repetitions, setting.items, len(SIZES)
    noise = setting.noise / np.sqrt(np.array(SIZES) / SIZES[0])
    spread = np.sqrt(1 + ITEM**2 + noise**2)
    tests = 1 if setting.shared else R
    common = rng.normal(0, 1, (1, tests, I))
    single = rng.normal(0, 1, (2, tests, I))
    item = ITEM * (np.sqrt(COMMON) * common + np.sqrt(1 - COMMON) * single)
    repetition = rng.normal(0, 1, (2, R, 1)) * np.sqrt(0.5) + rng.normal(0, 1, (1, R, 1)) * np.sqrt(0.5)
    curves = []
    for row in range(2):
        points = []
        for k in range(K):
            level = spread[k] * ndtri(accuracies[row, k]) + item[row] + noise[k] * repetition[row]
            hits = level + rng.normal(0, 1, (R, I)) > 0
            means = {s: float(hits[s].mean()) for s in range(R)}
            named = {s: ("same" if setting.shared else f"items {s}", hits[s]) for s in range(R)}
            points.append(Results(means, named))
        curves.append(points)
    return curves


def truth(curve: np.ndarray, target: float) -> float:
    """Return the true number of images: where the interpolated curve crosses the target for the last time."""
    return targets._last_crossing(np.log(np.array(SIZES, dtype=float)), curve - target)


def covers(true: float, low: float, high: float) -> bool:
    """Return whether an interval covers a number. Numbers beyond the grid are covered if the interval ends there."""
    return low <= true <= high


def coverage(setting: Setting, sets: int, seed: int = 0) -> tuple[float, float, float]:
    """Return the coverage for the strategy, the share of true numbers beyond those tried, and their coverage."""
    rng = np.random.default_rng([seed, setting.repetitions, setting.items, setting.shared])
    covered, censored = [], []
    for _ in range(sets):
        accuracies = levels(rng)
        dense, strategy = draw(setting, accuracies, rng)
        target = Target.of_dense(CHANCE)
        ((_, low, high),) = images_to_target([strategy], SIZES, target, dense[-1], setting.repetitions == 1)
        true = truth(accuracies[1], target.constant + target.share * accuracies[0, -1])
        assert low is not None and high is not None
        covered.append(covers(true, low, high))
        censored.append(true == BELOW or math.isinf(true))
    hit, beyond = np.array(covered), np.array(censored)
    return float(hit.mean()), float(beyond.mean()), float(hit[beyond].mean()) if beyond.any() else math.nan


SETTINGS = (
    Setting(3, 600, False, 0.2),
    Setting(3, 600, True, 0.2),
    Setting(5, 600, False, 0.2),
    Setting(5, 600, True, 0.2),
    Setting(10, 300, False, 0.4),
    Setting(10, 300, True, 0.4),
    Setting(1, 600, False, 0.0),
)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sets", type=int, default=2000)
    sets = parser.parse_args().sets
    rows = []
    for setting in SETTINGS:
        share, beyond, of_beyond = coverage(setting, sets)
        kind = "the same" if setting.shared else "other"
        rows.append([setting.repetitions, setting.items, kind, setting.noise, share, beyond, of_beyond])
    headings = ["repetitions", "items", "items of repetitions", "noise", "coverage", "censored", "coverage of censored"]
    print(tabulate(rows, headings, "pipe", floatfmt=".3f"))


if __name__ == "__main__":
    main()
