"""Agreement of orders, in simulated worlds with known answers."""

from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import spearmanr

from sparsebench.stats.agreement import rank_correlation, share_interval
from sparsebench.stats.intervals import Interval
from sparsebench.stats.paired import Results

WORLDS = 80


def of_networks(means: np.ndarray) -> list[Results]:
    """Return results of R strategies on N networks from (R, N) accuracies."""
    return [Results(dict(enumerate(row.tolist())), {}) for row in means]


def of_items(rates: np.ndarray, rng: np.random.Generator, n: int = 400) -> list[Results]:
    """Return results of strategies with these rates of correct items on one network."""
    hits = rng.random(n) < rates[:, None]
    return [Results({0: float(row.mean())}, {0: ("items", row)}) for row in hits]


def worlds(R: int, correlation: float, networks: tuple[int, int], noise: float = 0.2) -> list[Interval]:
    """Return the agreement in worlds whose accuracies are normal, with noise from network to network."""
    rng = np.random.default_rng([R, networks[0]])
    found = []
    for _ in range(WORLDS):
        common, own = rng.normal(size=(2, R))
        true = common, correlation * common + np.sqrt(1 - correlation**2) * own
        boards = [
            of_networks(of_board[:, None] + noise * rng.normal(size=(R, n)))
            for of_board, n in zip(true, networks, strict=True)
        ]
        found.append(rank_correlation(*boards))
    return found


def covers(interval: Interval, value: float) -> bool:
    _, low, high = interval
    assert low is not None and high is not None
    return low <= value <= high


@pytest.mark.parametrize(("R", "correlation"), [(10, 0.6), (17, 0.85)])
def test_intervals_cover_the_correlation_of_boards(R: int, correlation: float) -> None:
    true = 6 / np.pi * np.arcsin(correlation / 2)  # Spearman's correlation of two normal numbers
    found = worlds(R, correlation, (24, 3))
    assert np.mean([covers(interval, true) for interval in found]) >= 0.88  # .95 less three standard errors


def test_equal_orders_are_told_from_unrelated_ones() -> None:
    related, unrelated = worlds(17, 0.9, (24, 3)), worlds(17, 0.0, (24, 3))
    assert np.mean([not covers(interval, 0) for interval in related]) >= 0.95
    assert np.mean([not covers(interval, 0) for interval in unrelated]) <= 0.1


def test_the_value_is_spearmans_with_ties() -> None:
    first, second = np.array([0.5, 0.7, 0.7, 0.9, 0.2]), np.array([0.3, 0.8, 0.6, 0.6, 0.1])
    value, low, high = rank_correlation(of_networks(first[:, None]), of_networks(second[:, None]))
    assert value == pytest.approx(spearmanr(first, second).statistic)
    assert low is not None and high is not None and low < value <= high


def test_networks_that_boards_share_are_drawn_once() -> None:
    """With networks that move all strategies of both boards alike, only strategies vary."""
    rng = np.random.default_rng(0)
    board = of_networks(rng.normal(size=(8, 1)) + 2 * rng.normal(size=(8, 4)))
    value, low, _ = rank_correlation(board, board, same_networks=True)
    assert value == pytest.approx(1) and low == pytest.approx(1)
    _, low_of_others, _ = rank_correlation(board, board)
    assert low_of_others is not None and low_of_others < 0.9


def test_items_vary_on_a_board_of_one_network() -> None:
    rng = np.random.default_rng(1)
    rates = np.linspace(0.6, 0.64, 12)
    few, many = (of_items(rates, rng, n) for n in (60, 6_000))
    exact = of_networks(rates[:, None])
    widths = []
    for board in (few, many):
        _, low, high = rank_correlation(board, exact)
        assert low is not None and high is not None
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_few_strategies_have_no_interval() -> None:
    board = of_networks(np.arange(8.0).reshape(4, 2))
    assert rank_correlation(board, board) == (pytest.approx(1), None, None)


SIZES = (34, 18, 6, 3, 1, 1, 1)


def votes(rng: np.random.Generator, share: float, dependence: float) -> tuple[list[bool], list[int]]:
    """Return votes of sources; a dependent vote is that of its source."""
    agrees, sources = [], []
    for source, size in enumerate(SIZES):
        of_source = rng.random() < share
        for _ in range(size):
            agrees.append(bool(of_source if rng.random() < dependence else rng.random() < share))
            sources.append(source)
    return agrees, sources


@pytest.mark.parametrize(("share", "dependence"), [(0.7, 0.0), (0.7, 0.5), (0.9, 0.3), (0.5, 1.0)])
def test_intervals_of_a_share_cover_it_though_votes_of_a_source_depend_on_each_other(
    share: float, dependence: float
) -> None:
    rng = np.random.default_rng(0)
    found = [share_interval(*votes(rng, share, dependence)) for _ in range(600)]
    assert np.mean([covers(interval, share) for interval in found]) >= 0.93


def ends(agrees: Sequence[bool], sources: Sequence[int]) -> tuple[float, float]:
    _, low, high = share_interval(agrees, sources)
    assert low is not None and high is not None
    return low, high


def test_many_independent_votes_give_the_usual_interval() -> None:
    agrees = [place % 10 != 0 for place in range(200)]
    low, high = ends(agrees, range(200))
    assert (low, high) == (pytest.approx(0.85, abs=0.01), pytest.approx(0.938, abs=0.01))  # Clopper and Pearson's


def test_votes_that_all_agree_count_as_the_sources() -> None:
    low, high = ends([True] * 40, [place % 4 for place in range(40)])
    assert (low, high) == (pytest.approx(0.025 ** (1 / 4)), 1)
    assert share_interval([True, False], ["one", "one"]) == (0.5, None, None)
