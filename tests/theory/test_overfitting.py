import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparsebench_theory.overfitting.task import Overfitting

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


def test_the_signal_to_noise_ratio_is_that_of_the_weak_noise():
    assert Overfitting().snr == pytest.approx(64 / (0.2 * 32)) == pytest.approx(10)
    assert Overfitting(tokens=3, d=2048, signal=1, noise=0.05, strong=7).snr == pytest.approx(0.442, abs=5e-4)
    assert Overfitting(signal=32).snr == pytest.approx(5) and Overfitting(strong=1).snr == pytest.approx(10)
