import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sparsebench_theory.overfitting.task import Overfitting

from sparsebench.errors import UserError

SMALL = Overfitting(tokens=6, d=40, signal=3, noise=0.5, strong=10, test=7)


def longest_but_signal(split):
    """Return (n,) the place of the longest token that is not the signal."""
    return (np.linalg.norm(split.inputs, axis=2) * (1 - split.relevance)).argmax(axis=1)


def test_each_sample_has_one_signal_token_that_is_its_label():
    data = SMALL.draw(30, 0, {})
    for split, n in ((data.train, 30), (data.test, 7)):
        assert split.inputs.shape == (n, 6, 40) and split.inputs.dtype == np.float32
        assert split.relevance.dtype == np.float32 and split.relevance.shape == (n, 6)
        assert (split.relevance.sum(axis=1) == 1).all()
        for tokens, label, relevant in zip(split.inputs, split.labels, split.relevance, strict=True):
            (signal,) = tokens[relevant == 1]
            expected = np.zeros(40)
            expected[0 if label == 1 else 1] = 3
            np.testing.assert_array_equal(signal, expected)
    assert data.classes == ("-1", "+1") and data.patterns is None and (data.train.groups == 0).all()


def test_only_the_signal_is_relevant_and_every_other_token_is_noise():
    split = SMALL.draw(30, 0, {}).train
    norms = np.linalg.norm(split.inputs[split.relevance == 0], axis=1)
    assert norms.min() > 1 and not np.isclose(norms, 3).any()
    assert len({tuple(token) for token in split.inputs[split.relevance == 0]}) == 30 * 5


def test_one_token_has_the_strong_noise_and_the_others_the_weak():
    task = Overfitting(tokens=6, d=500, signal=3, noise=0.2, strong=20)
    split = task.draw(60, 0, {}).train
    rows, strong = np.arange(60), longest_but_signal(split)
    assert split.inputs[rows, strong].std() == pytest.approx(4.0, rel=0.02)
    assert abs(split.inputs[rows, strong].mean()) < 0.1
    weak = split.relevance == 0
    weak[rows, strong] = False
    assert weak.sum() == 60 * 4
    assert split.inputs[weak].std() == pytest.approx(0.2, rel=0.01)
    spread = split.inputs[weak].std(axis=1)
    assert spread.min() > 0.17 and spread.max() < 0.23  # one strong token, and no second


def test_signal_and_strong_noise_are_at_random_places_of_their_own():
    split = Overfitting(tokens=4, d=20, noise=0.1, strong=50).draw(1200, 0, {}).train
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (split.relevance.argmax(axis=1), longest_but_signal(split)), 1)
    assert (np.diag(pairs) == 0).all()
    np.testing.assert_allclose(pairs[~np.eye(4, dtype=bool)] / 1200, 1 / 12, atol=0.03)


def test_the_noise_is_orthogonal_to_both_signals_if_it_is_projected():
    for split in (
        SMALL.model_copy(update={"projected": True}).draw(10, 0, {}).train,
        SMALL.model_copy(update={"projected": True}).draw(10, 0, {}).test,
    ):
        noise = split.inputs[split.relevance == 0]
        assert (noise[:, :2] == 0).all() and (np.abs(noise[:, 2:]) > 0).all()
        assert (split.inputs[split.relevance == 1][:, :2].sum(axis=1) == 3).all()
    plain = SMALL.draw(10, 0, {}).train
    along = plain.inputs[plain.relevance == 0][:, :2]
    assert (along != 0).all() and along.std() > 0.3


@given(st.integers(2, 25), st.integers(0, 10), st.integers(0, 10), st.integers(0, 10**6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_smaller_set_begins_the_larger_and_the_test_set_is_the_same(n, more, tests, repetition, projected):
    task = SMALL.model_copy(update={"projected": projected})
    longer = task.model_copy(update={"test": 7 + tests})
    small, large = task.draw(n, repetition, {}), longer.draw(n + more, repetition, {})
    for field in ("inputs", "labels", "groups", "relevance"):
        np.testing.assert_array_equal(getattr(small.train, field), getattr(large.train, field)[:n])
        np.testing.assert_array_equal(getattr(small.test, field), getattr(large.test, field)[:7])


@given(st.floats(0.5, 100), st.integers(2, 12), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_noise_labels_and_order_do_not_depend_on_the_signal(signal, n, repetition):
    one, other = SMALL.draw(n, repetition, {}), SMALL.model_copy(update={"signal": signal}).draw(n, repetition, {})
    for mine, theirs in ((one.train, other.train), (one.test, other.test)):
        np.testing.assert_array_equal(mine.labels, theirs.labels)
        np.testing.assert_array_equal(mine.relevance, theirs.relevance)
        noise = mine.relevance == 0
        np.testing.assert_array_equal(mine.inputs[noise], theirs.inputs[noise])
        np.testing.assert_allclose(theirs.inputs[~noise].max(axis=1), signal, rtol=1e-6)


def test_half_of_an_even_set_is_of_each_class_and_labels_tell_nothing_of_the_places():
    for n in (2, 4, 10, 500):
        labels = SMALL.draw(n, 3, {}).train.labels
        assert labels.sum() * 2 == n
        assert (np.sort(labels.reshape(-1, 2), axis=1) == (0, 1)).all()
    split = SMALL.draw(1200, 3, {}).train
    places = split.relevance.argmax(axis=1)
    shares = [np.bincount(places[split.labels == label], minlength=6) / 600 for label in (0, 1)]
    np.testing.assert_allclose(shares, 1 / 6, atol=0.06)


def test_a_repetition_is_the_same_again_and_unlike_the_next():
    first, again, other = (SMALL.draw(8, repetition, {}) for repetition in (0, 0, 1))
    for part in ("train", "test"):
        mine, same, next_ = (getattr(data, part) for data in (first, again, other))
        np.testing.assert_array_equal(mine.inputs, same.inputs)
        assert not np.isclose(mine.inputs[mine.relevance == 0], next_.inputs[next_.relevance == 0]).any()
        assert not np.array_equal(mine.relevance, next_.relevance)
    assert not np.allclose(first.train.inputs[:7], first.test.inputs)


def test_how_a_network_is_trained_does_not_change_the_data():
    tuned = SMALL.model_copy(update={"lr": 7.0, "steps": 3, "fitted": 0.5, "threshold": 0.9, "watch": 2})
    np.testing.assert_array_equal(SMALL.draw(6, 0, {}).train.inputs, tuned.draw(6, 0, {}).train.inputs)


def test_the_signal_to_noise_ratio_is_that_of_the_weak_noise():
    assert Overfitting().snr == pytest.approx(64 / (0.2 * 32)) == pytest.approx(10)
    assert Overfitting(tokens=3, d=2048, signal=1, noise=0.05, strong=7).snr == pytest.approx(0.442, abs=5e-4)
    assert Overfitting(signal=32).snr == pytest.approx(5) and Overfitting(strong=1).snr == pytest.approx(10)


@pytest.mark.parametrize(("loss", "succeeds"), [(0.0, True), (0.1999, True), (0.2, False), (5.0, False)])
def test_a_trial_succeeds_below_the_threshold_whatever_its_accuracy(loss, succeeds):
    assert all(Overfitting().success(loss, accuracy) is succeeds for accuracy in (0.0, 1.0))
    assert Overfitting(threshold=6).success(loss, 0.0) is True


def test_the_recipe_is_gradient_descent_on_the_logistic_loss_until_it_is_low():
    recipe = Overfitting(lr=0.3, steps=77, fitted=0.02, watch=5).recipe()
    assert (recipe.loss, recipe.optimizer, recipe.lr, recipe.batch) == ("logistic", "sgd", 0.3, 0)
    assert (recipe.steps, recipe.epochs, recipe.stop_below, recipe.watch) == (77, 77, 0.02, 5)
    assert recipe.fixed_selection and not recipe.stop_at_zero_loss
    assert not recipe.rates and recipe.weight_decay == 0
    assert Overfitting().recipe().stop_below == 0.01 and Overfitting().recipe().lr == 0.1
    assert Overfitting().initial() is None


def test_a_set_of_one_class_is_a_user_error():
    with pytest.raises(UserError, match=r"both classes.*got N=1; allowed: 2 or more"):
        SMALL.draw(1, 0, {})
    assert set(SMALL.draw(2, 0, {}).train.labels) == {0, 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 2}, {"d": 2}, {"signal": 0}, {"noise": 0}, {"strong": 0.5}, {"test": 0}, {"threshold": 0},
        {"fitted": -1}, {"lr": 0}, {"steps": 0}, {"watch": -1}, {"signal": float("nan")},
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Overfitting(**wrong)
