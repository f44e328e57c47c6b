import numpy as np
import pytest

from sparsebench.measure.scores import group_accuracies, group_summary


def outcomes(*groups):
    """Return correct and groups arrays from (hits, misses) of each group."""
    correct = [c for hits, misses in groups for c in [1] * hits + [0] * misses]
    number = [g for g, (hits, misses) in enumerate(groups) for _ in range(hits + misses)]
    return np.array(correct, dtype=bool), np.array(number)


def test_each_group_has_its_own_accuracy_and_an_empty_one_has_none():
    correct, groups = outcomes((3, 1), (0, 0), (1, 4))
    np.testing.assert_array_equal(group_accuracies(correct, groups, 4), [0.75, np.nan, 0.2, np.nan])


def test_the_two_averages_weigh_groups_by_test_and_by_training():
    correct, groups = outcomes((10, 0), (2, 8), (6, 4), (9, 1))
    found = group_summary(correct, groups, np.array([90, 10, 10, 90]))
    assert found["average_test"] == pytest.approx(27 / 40)
    assert found["average_train"] == pytest.approx((90 * 1 + 10 * 0.2 + 10 * 0.6 + 90 * 0.9) / 200)
    assert found["worst_group_accuracy"] == pytest.approx(0.2)
    assert found["spurious_gap"] == pytest.approx(27 / 40 - 0.2)


def test_unequal_test_groups_move_the_test_average_and_not_the_training_average():
    train = np.array([1, 1])
    small = group_summary(*outcomes((1, 0), (0, 1)), train)
    large = group_summary(*outcomes((9, 0), (0, 1)), train)
    assert (small["average_test"], large["average_test"]) == (0.5, 0.9)
    assert small["average_train"] == large["average_train"] == 0.5


def test_a_group_that_the_test_lacks_is_neither_the_worst_nor_weighed():
    correct, groups = outcomes((4, 0), (0, 0), (3, 1))
    found = group_summary(correct, groups, np.array([1, 3, 1]))
    assert found["worst_group_accuracy"] == 0.75
    assert found["average_train"] == pytest.approx((1 + 0.75) / 2)


def test_where_training_has_none_of_the_groups_of_the_test_its_average_is_the_tests():
    correct, groups = outcomes((3, 1), (0, 0))
    assert group_summary(correct, groups, np.array([0, 2]))["average_train"] == 0.75


def test_one_group_has_no_gap():
    correct, groups = outcomes((7, 3))
    found = group_summary(correct, groups, np.array([5]))
    assert set(found.values()) == {0.7, 0.0}
