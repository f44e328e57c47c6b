import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sparsebench_theory.sparse_tokens.task import SparseTokens

from sparsebench.errors import UserError

SMALL = SparseTokens(tokens=9, d=5, relevant=3, theta=2.5, test=7)


def test_a_positive_sample_is_noise_with_the_signal_in_r_tokens_and_a_negative_one_is_noise():
    strong, silent = SMALL.draw(40, 0, {}), SMALL.model_copy(update={"theta": 0.0}).draw(40, 0, {})
    xi = strong.patterns[:, 0]
    assert strong.patterns.shape == (5, 1) and np.linalg.norm(xi) == pytest.approx(1, rel=1e-12)
    for split, noise, n in ((strong.train, silent.train, 40), (strong.test, silent.test, 7)):
        assert split.inputs.shape == (n, 9, 5) and split.inputs.dtype == np.float32
        assert split.relevance.shape == (n, 9) and split.relevance.dtype == np.float32
        assert set(split.labels) == {0, 1} and (split.groups == 0).all()
        for X, Z, v, y in zip(split.inputs, noise.inputs, split.relevance, split.labels, strict=True):
            assert v.sum() == (3 if y == 1 else 0)
            np.testing.assert_allclose(X, Z + 2.5 * np.outer(v, xi), rtol=1e-5, atol=1e-6)
    assert strong.classes == ("-1", "+1")


def test_the_noise_is_standard_normal():
    inputs = SparseTokens(tokens=50, d=20, theta=0, test=1).draw(100, 0, {}).train.inputs
    assert inputs.mean() == pytest.approx(0, abs=0.01) and inputs.std() == pytest.approx(1, abs=0.01)
    across = np.corrcoef(inputs.reshape(100, -1)[:, :50], rowvar=False)
    assert np.abs(across - np.eye(50)).max() < 0.5


def test_places_are_drawn_anew_for_each_sample():
    split = SparseTokens(tokens=5, relevant=2, test=1).draw(3000, 0, {}).train
    places = split.relevance[split.labels == 1]
    np.testing.assert_allclose(places.mean(axis=0), 2 / 5, atol=0.05)
    together = places.T @ places / len(places)
    np.testing.assert_allclose(together[~np.eye(5, dtype=bool)], 1 / 10, atol=0.03)


@pytest.mark.parametrize("positive", [0.2, 0.5, 0.9])
def test_class_1_has_its_probability(positive):
    labels = SparseTokens(tokens=4, d=1, positive=positive, test=4000).draw(2, 0, {}).test.labels
    assert labels.mean() == pytest.approx(positive, abs=0.03)


@given(st.integers(1, 25), st.integers(0, 10), st.integers(0, 10), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_a_smaller_set_begins_the_larger_and_the_test_set_is_the_same(n, more, tests, repetition):
    longer = SMALL.model_copy(update={"test": 7 + tests})
    small, large = SMALL.draw(n, repetition, {}), longer.draw(n + more, repetition, {})
    for field in ("inputs", "labels", "groups", "relevance"):
        np.testing.assert_array_equal(getattr(small.train, field), getattr(large.train, field)[:n])
        np.testing.assert_array_equal(getattr(small.test, field), getattr(large.test, field)[:7])


def test_a_repetition_is_the_same_again_and_unlike_the_next():
    first, again, other = (SMALL.draw(8, repetition, {}) for repetition in (0, 0, 1))
    np.testing.assert_array_equal(first.train.inputs, again.train.inputs)
    assert not np.isclose(first.train.inputs, other.train.inputs).any()
    assert not np.allclose(first.patterns, other.patterns)
    assert not np.allclose(first.train.inputs[:7], first.test.inputs)


def test_how_a_network_is_trained_does_not_change_the_data():
    tuned = SMALL.model_copy(update={"lr": 7.0, "steps": 3, "error": 0.3, "watch": 2})
    np.testing.assert_array_equal(SMALL.draw(6, 0, {}).train.inputs, tuned.draw(6, 0, {}).train.inputs)


@pytest.mark.parametrize(("right", "succeeds"), [(1.0, True), (0.9, True), (0.899, False), (0.0, False)])
def test_a_trial_succeeds_by_its_test_error_whatever_its_loss(right, succeeds):
    assert all(SparseTokens().success(loss, right) is succeeds for loss in (0.0, 9.0))
    assert SparseTokens(error=0.5).success(1.0, 0.6) is True


def test_the_recipe_is_gradient_descent_on_the_logistic_loss():
    recipe = SparseTokens(lr=0.7, steps=77, watch=5).recipe()
    assert (recipe.loss, recipe.optimizer, recipe.lr, recipe.batch) == ("logistic", "sgd", 0.7, 0)
    assert (recipe.steps, recipe.epochs, recipe.watch) == (77, 77, 5)
    assert recipe.fixed_selection and recipe.stop_below == 0 and not recipe.stop_at_zero_loss and not recipe.rates


def test_more_relevant_tokens_than_tokens_are_a_user_error():
    with pytest.raises(UserError, match=r"got relevant=4, tokens=3; allowed: relevant of 3 or fewer"):
        SparseTokens(tokens=3).check()
    with pytest.raises(UserError, match="relevant=4"):
        SparseTokens(tokens=3).draw(2, 0, {})
    assert SparseTokens(tokens=4, test=50).draw(2, 0, {}).test.relevance.sum(axis=1).max() == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0}, {"d": 0}, {"relevant": 0}, {"theta": -1}, {"positive": 0}, {"positive": 1}, {"test": 0},
        {"error": 1}, {"lr": 0}, {"steps": 0}, {"watch": -1}, {"theta": float("nan")},
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        SparseTokens(**wrong)
