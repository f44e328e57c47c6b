import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sparsebench.errors import UserError
from sparsebench.tasks.theory import Theory


def pattern_of(data, split):
    """Return (n, L), which pattern each token is nearest to."""
    distances = np.linalg.norm(split.inputs[:, :, None] - data.patterns.T, axis=3)
    return distances.argmin(axis=2)


def test_the_counts_are_the_rounded_shares_and_the_rest_is_spread_evenly():
    assert Theory(tokens=50, relevant=0.2, confusion=0.04).counts().tolist() == [10, 2, 13, 13, 12]
    assert Theory(tokens=100, relevant=0.5, confusion=0.05).counts().tolist() == [50, 5, 15, 15, 15]
    assert Theory(tokens=20, patterns=3, relevant=0.5, confusion=0.45).counts().tolist() == [10, 9, 1]


def test_each_sample_has_those_counts_and_its_label_is_the_majority_of_two():
    task = Theory(tokens=50, relevant=0.2, confusion=0.04)
    data = task.draw(30, 0, {})
    for split, n in ((data.train, 30), (data.test, 100)):
        assert split.inputs.shape == (n, 50, 10) and split.inputs.dtype == np.float32
        which = pattern_of(data, split)
        counts = np.stack([(which == k).sum(axis=1) for k in range(5)], axis=1)
        assert (split.labels == (counts[:, 0] > counts[:, 1])).all()
        assert {tuple(row) for row in counts} == {(10, 2, 13, 13, 12), (2, 10, 13, 13, 12)}
        assert abs(int(split.labels.sum()) * 2 - n) <= 1
    assert data.classes == ("-1", "+1")


def test_relevance_is_on_the_tokens_of_the_majority():
    data = Theory(tokens=50).draw(20, 0, {})
    majority = np.where(data.train.labels == 1, 0, 1)
    np.testing.assert_array_equal(data.train.relevance, pattern_of(data, data.train) == majority[:, None])
    assert data.train.relevance_on(None) is data.train.relevance


def test_patterns_are_orthonormal_and_tokens_are_patterns_with_the_noise_asked_for():
    data = Theory(tokens=50, noise=0.05).draw(40, 0, {})
    np.testing.assert_allclose(data.patterns.T @ data.patterns, np.eye(5), atol=1e-12)
    noise = data.train.inputs - data.patterns.T[pattern_of(data, data.train)]
    assert noise.std() == pytest.approx(0.05, rel=0.03)
    assert abs(noise.mean()) < 0.002


def test_a_share_of_the_tokens_of_each_sample_has_the_larger_noise():
    data = Theory(tokens=50, noise=0.001, noisy_share=0.3, noisy_std=0.1).draw(20, 0, {})
    noise = np.linalg.norm(data.train.inputs - data.patterns.T[pattern_of(data, data.train)], axis=2)
    assert ((noise > 0.02).sum(axis=1) == 15).all()
    assert len({tuple(np.flatnonzero(row > 0.02)) for row in noise}) == 20


def test_places_are_permuted_in_each_sample():
    which = Theory(tokens=50).draw(400, 0, {}).train.relevance
    assert len({tuple(row) for row in which}) == 400
    assert np.abs(which.mean(axis=0) - 0.2).max() < 0.08


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 20))
@settings(max_examples=15, deadline=None)
def test_a_smaller_training_set_begins_the_larger_and_the_test_set_is_the_same(repetition, n, more):
    task = Theory(tokens=12, relevant=0.3, confusion=0.1, test=5)
    small, large = task.draw(n, repetition, {}), task.draw(n + more, repetition, {})
    for field in ("inputs", "labels", "groups", "relevance"):
        np.testing.assert_array_equal(getattr(small.train, field), getattr(large.train, field)[:n])
        np.testing.assert_array_equal(getattr(small.test, field), getattr(large.test, field))


def test_a_repetition_is_the_same_again_and_unlike_the_next():
    task = Theory(tokens=12, relevant=0.3, confusion=0.1)
    first, again, other = (task.draw(6, repetition, {}) for repetition in (0, 0, 1))
    for part in ("train", "test"):
        np.testing.assert_array_equal(getattr(first, part).inputs, getattr(again, part).inputs)
        assert not np.allclose(getattr(first, part).inputs, getattr(other, part).inputs)
    assert not np.allclose(first.patterns, other.patterns)
    assert not np.allclose(first.train.inputs, first.test.inputs[:6])


def test_how_a_network_is_trained_does_not_change_the_data():
    plain = Theory(tokens=12, relevant=0.3, confusion=0.1)
    tuned = Theory(tokens=12, relevant=0.3, confusion=0.1, lr=0.1, batch=3, steps=7, threshold=0.5, test=9)
    np.testing.assert_array_equal(plain.draw(6, 0, {}).train.inputs, tuned.draw(6, 0, {}).train.inputs)
    np.testing.assert_array_equal(plain.draw(6, 0, {}).test.inputs[:9], tuned.draw(6, 0, {}).test.inputs)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"relevant": 0.1, "confusion": 0.1}, "more relevant tokens than confusing ones"),
        ({"relevant": 0.1, "confusion": 0.4}, "5 and 20 tokens"),
        ({"relevant": 0.7, "confusion": 0.5}, "35 and 25 tokens"),
        ({"tokens": 10, "relevant": 0.04, "confusion": 0}, "0 and 0 tokens"),
        ({"d": 4}, "d must be at least their number"),
    ],
)
def test_impossible_shares_are_a_user_error(parameters, said):
    for ask in (lambda task: task.check(), lambda task: task.draw(2, 0, {})):
        with pytest.raises(UserError, match=said):
            ask(Theory(**parameters))


@pytest.mark.parametrize("wrong", [{"relevant": 1}, {"relevant": 0}, {"confusion": -0.1}, {"patterns": 2}, {"test": 0}])
def test_a_parameter_out_of_range_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Theory(**wrong)


def test_the_step_size_follows_the_number_of_tokens_unless_given():
    assert [Theory(tokens=L).recipe().lr for L in (50, 100)] == [1, 2]
    assert Theory(tokens=100, lr=0.3).recipe().lr == 0.3
    recipe = Theory(batch=7, steps=9).recipe()
    assert (recipe.loss, recipe.optimizer, recipe.batch, recipe.steps) == ("hinge", "sgd", 7, 9)
    assert recipe.stop_at_zero_loss and recipe.fixed_selection


def test_a_trial_succeeds_below_the_threshold_whatever_its_accuracy():
    task = Theory(threshold=0.01)
    assert task.success(0.0099, 0.5) is True
    assert task.success(0.01, 1.0) is False
