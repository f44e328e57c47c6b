"""Images to a target: crossings in log N, ends beyond the numbers tried, ties, and the coverage of intervals."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from sparsebench.stats.intervals import BELOW
from sparsebench.stats.paired import Results
from sparsebench.stats.targets import Target, images_to_target, ties

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import probes

SIZES = (10, 40, 160)


def curve(*accuracies: float, items: int = 1000, seeds: int = 4, spread: float = 0.0) -> list[Results]:
    """Return a learning curve whose repetitions differ by `spread` about exact accuracies."""
    points = []
    for accuracy in accuracies:
        hits, means = {}, {}
        for seed in range(seeds):
            shift = spread * (2 * (seed % 2) - 1)
            correct = np.arange(items) < round((accuracy + shift) * items)
            hits[seed] = f"items of {seed}", correct
            means[seed] = float(correct.mean())
        points.append(Results(means, hits))
    return points


def reached(points: list[Results], target: Target, dense: Results | None = None) -> tuple[float, float, float]:
    ((value, low, high),) = images_to_target([points], SIZES, target, dense, lone=False)
    assert low is not None and high is not None
    return value, low, high


def test_the_target_is_reached_between_two_numbers_in_log_n() -> None:
    value, low, high = reached(curve(0.2, 0.4, 0.8, spread=0.01), Target(0.6))
    assert value == pytest.approx(80)  # half of the way from 40 to 160 in log N
    assert 40 < low < value < high < 160


def test_the_relative_target_is_that_of_dense_with_the_most_images() -> None:
    """Chance is .5 and dense reaches .9, so the target is .5 + .9 * .4 = .86."""
    dense = curve(0.7, 0.8, 0.9)[-1]
    value, _, _ = reached(curve(0.56, 0.76, 0.96), Target.of_dense(0.5), dense)
    assert value == pytest.approx(80)


def test_numbers_beyond_those_tried_are_bounds() -> None:
    assert reached(curve(0.7, 0.8, 0.9), Target(0.5)) == (BELOW, BELOW, BELOW)
    assert reached(curve(0.1, 0.2, 0.3), Target(0.9)) == (math.inf, math.inf, math.inf)
    value, low, high = reached(curve(0.1, 0.3, 0.49, spread=0.05), Target(0.5))
    assert value == high == math.inf and 40 < low < 160


def test_a_curve_that_falls_again_counts_from_its_last_crossing() -> None:
    value, low, _ = reached(curve(0.7, 0.4, 0.8), Target(0.6))
    assert value == pytest.approx(80)
    assert low == BELOW


def test_the_error_of_the_target_makes_the_interval_wider() -> None:
    points, dense = curve(0.2, 0.4, 0.8, spread=0.01), curve(2 / 3, spread=0.1)[0]
    _, low, high = reached(points, Target(0.6))
    _, lower, higher = reached(points, Target(0.0, 0.9), dense)
    assert lower < low < high < higher


def test_a_single_repetition_has_an_interval_only_if_all_have_one() -> None:
    points = curve(0.2, 0.4, 0.8, seeds=1)
    ((_, low, _),) = images_to_target([points], SIZES, Target(0.6), None, lone=False)
    assert low is None
    ((value, low, high),) = images_to_target([points], SIZES, Target(0.6), None, lone=True)
    assert low is not None and high is not None and low < value < high


def test_what_lies_beyond_the_numbers_tried_is_a_tie() -> None:
    values = [math.inf, 30.0, BELOW, math.nan, BELOW, math.inf]
    assert ties(values) == [(4, 5), (3, 3), (1, 2), None, (1, 2), (4, 5)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 4])
def test_intervals_cover_as_often_as_they_say(number: int) -> None:
    """2,000 simulated sets; a quarter of the true numbers lie beyond those tried."""
    share, censored, _ = probes.coverage(probes.SETTINGS[number], 2000)
    assert 0.93 <= share <= 0.97
    assert censored > 0.1
