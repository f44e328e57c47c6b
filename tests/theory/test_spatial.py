import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sparsebench_theory.spatial.task import PRETRAINED_ON, Spatial

SMALL = Spatial(tokens=12, group=3, d=16, test=9)


def changed(task=SMALL, **updates):
    return type(task)(**task.model_dump() | updates)


def shown(data, split):
    """Return (n, tokens), how much of w* each patch shows."""
    return split.inputs.astype(float) @ data.patterns[:, 0]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_sets_part_the_positions_into_equal_shares(number, group, structure):
    assume(number * group > 1)
    sets = Spatial(tokens=number * group, group=group, structure=structure).sets()
    assert np.bincount(sets).tolist() == [group] * number


def test_sets_belong_to_the_structure():
    sets = [changed(structure=structure).sets() for structure in range(4)]
    assert len({tuple(s) for s in sets}) == 4
    np.testing.assert_array_equal(sets[0], changed(feature=3, permuted=True, rate=0.5, noise=1).sets())
    assert any(np.ptp(np.flatnonzero(sets[0] == k)) > 2 for k in range(4))  # not one after the other
    for repetition in (0, 5):
        relevance = SMALL.draw(40, repetition, {}).train.relevance
        together = relevance.T @ relevance > 0
        np.testing.assert_array_equal(together, sets[0][:, None] == sets[0])


def test_one_set_of_a_sample_shows_its_label_and_is_what_matters():
    task = changed(noise=0.0, rate=0.0)
    data = task.draw(60, 0, {})
    for split, n in ((data.train, 60), (data.test, 9)):
        assert split.inputs.shape == (n, 12, 16) and split.inputs.dtype == np.float32
        assert split.relevance.dtype == np.float32
        for row, label, relevant in zip(shown(data, split), split.labels, split.relevance, strict=True):
            (number,) = set(task.sets()[relevant == 1])
            np.testing.assert_array_equal(relevant, task.sets() == number)
            np.testing.assert_allclose(row, (2 * label - 1) * relevant, atol=1e-6)
    which = data.train.relevance @ task.sets() / 3
    assert set(which) == {0, 1, 2, 3}  # each set has its turn
    assert data.train.labels.sum() == 30 and data.classes == ("-1", "+1") and (data.train.groups == 0).all()


@pytest.mark.parametrize("label", [0, 1])
def test_any_set_carries_either_label(label):
    split = SMALL.draw(1200, 0, {}).train
    which = (split.relevance @ SMALL.sets() / 3).astype(int)[split.labels == label]
    np.testing.assert_allclose(np.bincount(which) / 600, 1 / 4, atol=0.07)


@pytest.mark.parametrize(("rate", "q"), [(0.4, 0.4), (1.0, 1.0), (0.0, 0.0), (None, math.log(16) / 12)])
def test_another_patch_shows_the_feature_or_its_opposite_at_half_the_rate_each(rate, q):
    data = changed(rate=rate, noise=0.0).draw(3000, 0, {})
    other = data.train.relevance == 0
    delta = shown(data, data.train)[other].round(4)
    assert set(np.abs(delta)) <= {0.0, 1.0}
    n = other.sum()
    bound = 5 * math.sqrt(q / 2 * (1 - q / 2) / n)  # five standard deviations
    assert abs((delta == 1).mean() - q / 2) <= bound and abs((delta == -1).mean() - q / 2) <= bound
    labels = np.broadcast_to(data.train.labels[:, None], other.shape)[other]
    if q > 0:
        assert delta[labels == 1].mean() == pytest.approx(0, abs=0.05)  # it does not go with the label


def test_noise_is_of_the_width_asked_for_and_orthogonal_to_the_feature_if_it_is_projected():
    for noise, expected in ((None, 0.25), (0.7, 0.7), (0.0, 0.0)):
        task = changed(noise=noise, rate=0.0)
        projected, whole = task.draw(400, 0, {}), changed(task, projected=False).draw(400, 0, {})
        w = projected.patterns[:, 0]
        np.testing.assert_array_equal(w, whole.patterns[:, 0])
        signal = (2 * projected.train.labels[:, None] - 1) * projected.train.relevance
        np.testing.assert_allclose(shown(projected, projected.train), signal, atol=1e-5)
        along = shown(whole, whole.train) - signal
        assert along.std() == pytest.approx(expected, rel=0.05, abs=1e-6)
        rest = projected.train.inputs - signal[:, :, None] * w
        assert (rest**2).sum(axis=2).mean() == pytest.approx(15 * expected**2, rel=0.02, abs=1e-9)


def test_features_are_orthogonal_unit_vectors_of_the_structure():
    w = np.stack([changed(feature=k).draw(2, 0, {}).patterns[:, 0] for k in range(16)])
    np.testing.assert_allclose(w @ w.T, np.eye(16), atol=1e-6)
    again = changed(feature=3, permuted=True, start="pretrained", rate=0.1).draw(4, 7, {}).patterns
    np.testing.assert_array_equal(again[:, 0], w[3])
    assert abs(changed(structure=1).draw(2, 0, {}).patterns[:, 0] @ w[0]) < 0.99
    assert again.shape == (16, 1) and again.dtype == np.float32


def test_permuted_patches_are_the_plain_ones_in_another_order_one_for_all_samples():
    plain, task = SMALL.draw(10, 2, {}), changed(permuted=True)
    moved, order = task.draw(10, 2, {}), task.order()
    assert sorted(order) == list(range(12)) and not np.array_equal(order, np.arange(12))
    np.testing.assert_array_equal(SMALL.order(), np.arange(12))
    assert not np.array_equal(order, changed(permuted=True, structure=1).order())
    for mine, theirs in ((moved.train, plain.train), (moved.test, plain.test)):
        np.testing.assert_array_equal(mine.labels, theirs.labels)
        for place in range(12):
            np.testing.assert_array_equal(mine.inputs[:, place], theirs.inputs[:, order[place]])
            np.testing.assert_array_equal(mine.relevance[:, place], theirs.relevance[:, order[place]])


def test_training_begins_with_nothing_or_with_what_feature_0_taught_in_plain_order():
    assert changed(feature=2, permuted=True).initial() is None
    task = changed(feature=2, permuted=True, start="pretrained", structure=3, lr_attention=5, watch=10, steps=40)
    first, samples = task.initial()
    assert first == changed(task, feature=0, permuted=False, start="random", watch=0)
    assert samples == PRETRAINED_ON == 2000 and first.initial() is None
    np.testing.assert_array_equal(first.sets(), task.sets())
