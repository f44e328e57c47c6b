"""Short runs of benchmarks/judging.py and checkpoints.py: error rates and power of the judge."""

import sys
from pathlib import Path

import pytest
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import checkpoints
import judging
from checkpoints import Checkpoints
from judging import World

WORLDS = 200
MOST = stats.binom.ppf(0.995, WORLDS, 0.05) / WORLDS
"""Largest share of worlds with an error, if the error rate is 5 %, in each of ten settings."""
SEED_NOISE = judging.KINDS[1:]
SETS = 100
"""Number of test sets of pictures; the intervals of a set count as one sample."""
FEWEST = stats.binom.ppf(0.0005, SETS, 0.95) / SETS


@pytest.mark.parametrize("accuracy", [0.8, 0.95])
def test_intervals_over_the_items_of_one_network_hold(accuracy: float) -> None:
    shares = checkpoints.holding(Checkpoints(S=1, accuracy=accuracy), SETS)
    assert min(shares) >= FEWEST and max(shares[:2]) < 0.98  # wider ones would hold more often


def test_intervals_over_three_networks_and_their_items_hold() -> None:
    assert min(checkpoints.holding(Checkpoints(S=3, unsteady=0.4), SETS)) >= FEWEST


@pytest.mark.parametrize("S", [1, 3])
def test_equals_on_checkpoints_have_no_winner_and_what_is_better_has_won(S: int) -> None:
    world = Checkpoints(S=S, apart=0.0)
    assert max(checkpoints.erring(world, SETS)) <= stats.binom.ppf(0.9995, SETS, 0.05) / SETS
    difference, told = judging.power(world, 60)
    assert difference < 0.3 and told >= 0.7


@pytest.mark.slow
def test_few_items_on_which_equals_differ_do_not_tell_them_apart() -> None:
    """The reference draws at random, so it differs by thirds from 34 others, on few of 200 items."""
    world = Checkpoints(S=1, R=35, accuracy=0.98, apart=0.0)
    assert max(checkpoints.erring(world, SETS)) <= stats.binom.ppf(0.9995, SETS, 0.05) / SETS


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["items of each seed", "the same items"])
@pytest.mark.parametrize("kind", SEED_NOISE)
def test_equals_have_no_winner_and_intervals_hold(kind: str, shared: bool) -> None:
    told, marked, covered, own = judging.errors(World(kind, shared=shared), WORLDS)
    assert max(told, marked) <= MOST
    assert 0.93 <= covered <= 0.98 and own >= 0.93


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["clusters of each seed", "the same clusters"])
def test_clusters_are_no_surer_than_they_are(shared: bool) -> None:
    world = World("one seed noise", shared=shared, cluster=5)
    told, marked, covered, own = judging.errors(world, WORLDS)
    assert max(told, marked) <= MOST
    assert 0.93 <= covered <= 0.985 and own >= 0.93


@pytest.mark.slow
def test_without_noise_of_seeds_the_judge_is_careful_and_no_more() -> None:
    told, marked, covered, _ = judging.errors(World(judging.KINDS[0]), WORLDS)
    assert max(told, marked) <= 0.05 and 0.95 <= covered <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["items of each seed", "the same items"])
@pytest.mark.parametrize("kind", judging.KINDS)
def test_a_difference_beyond_the_critical_value_is_told(kind: str, shared: bool) -> None:
    """A judge that never finds a difference fails: its critical value is too large, or is not detected."""
    difference, told = judging.power(World(kind, shared=shared), 150)
    assert difference < 0.25 and told >= 0.8


@pytest.mark.slow
def test_what_boards_call_detectable_is_told_in_four_of_five_pairs() -> None:
    for world in (World("no seed noise"), World("one seed noise")):
        least, told = judging.detectable(world, 150)
        assert least < 0.15 and 0.7 <= told <= 0.9
