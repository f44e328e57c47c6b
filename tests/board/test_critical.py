import io

import numpy as np
import pytest
from PIL import Image
from scipy.stats import friedmanchisquare

from sparsebench.board.build import Ranking
from sparsebench.board.critical import Critical, critical, draw
from sparsebench.stats.paired import compare


def ranking(task: str, **accuracies: float) -> Ranking:
    rows = [{"strategy": name, "budget": "b", "accuracy": x} for name, x in accuracies.items()]
    return Ranking(task, rows, compare([]))


def test_mean_ranks_and_the_distance_are_those_of_demsar() -> None:
    """Demsar 2006, 3.2.2: 4 algorithms on 14 data sets, q 2.569: critical difference 1.25."""
    accuracies = np.random.default_rng(0).random((14, 4))
    found = critical(ranking(f"t{i}", **dict(zip("abcd", row, strict=True))) for i, row in enumerate(accuracies))
    assert found is not None
    assert found.distance == pytest.approx(1.25, abs=0.005)
    ranks = {name[0]: rank for name, rank in zip(found.names, found.ranks, strict=True)}
    by_hand = (-accuracies).argsort(axis=1).argsort(axis=1).mean(axis=0) + 1
    assert [ranks[c] for c in "abcd"] == pytest.approx(by_hand.tolist())
    assert list(found.ranks) == sorted(found.ranks)
    assert found.p == pytest.approx(friedmanchisquare(*accuracies.T).pvalue)


def test_equal_accuracies_share_their_rank() -> None:
    found = critical(ranking(f"t{i}", a=0.5, b=0.5, c=0.1) for i in range(3))
    assert found is not None and found.ranks.tolist() == [1.5, 1.5, 3]


def test_only_strategies_that_every_task_ranks_are_compared_and_few_are_not() -> None:
    three = [ranking(f"t{i}", a=0.1, b=0.2, c=0.3) for i in range(3)]
    assert critical([*three, ranking("t", a=0.1, b=0.2, d=0.3)]) is None
    assert critical(three[:2]) is None and critical([]) is None


def test_of_more_than_ten_strategies_there_is_none() -> None:
    def rankings(k: int) -> list[Ranking]:
        return [ranking(f"t{i}", **{f"s{j}": 0.1 * j for j in range(k)}) for i in range(5)]

    assert critical(rankings(10)) is not None and critical(rankings(11)) is None


def test_bars_are_the_longest_rows_of_those_not_told_apart() -> None:
    found = Critical(list("abcde"), np.array([1.0, 1.5, 2.0, 4.0, 4.5]), 1.0, 0.01, ["t"])
    assert found.groups() == [(0, 2), (3, 4)]


def test_the_picture_is_the_same_each_time() -> None:
    found = critical(ranking(f"t{i}", a=0.5, b=0.4, c=0.1 * i) for i in range(4))
    assert found is not None
    assert draw(found) == draw(found)
    assert Image.open(io.BytesIO(draw(found))).width > 300
