"""The tasks of the theories: contents and relevance of tokens, and properties of all tasks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from sparsebench_theory.overfitting.task import Overfitting
from sparsebench_theory.shallow.task import RULES, Theory
from sparsebench_theory.sparse_tokens.task import SparseTokens
from sparsebench_theory.spatial.task import PRETRAINED_ON, Spatial

from sparsebench.errors import UserError
from sparsebench.tasks.base import Task

OVERFITTING = Overfitting(tokens=6, d=40, signal=3, noise=0.5, strong=10, test=7)
SPATIAL = Spatial(tokens=12, group=3, d=16, test=9)
SPARSE = SparseTokens(tokens=9, d=5, relevant=3, theta=2.5, test=7)


# ---- theory


def pattern_of(data, split):
    """Return (n, L), the pattern nearest to each token."""
    distances = np.linalg.norm(split.inputs[:, :, None] - data.patterns.T, axis=3)
    return distances.argmin(axis=2)


def test_the_counts_are_the_rounded_shares_and_the_rest_is_spread_evenly():
    assert Theory(tokens=50, relevant=0.2, confusion=0.04).counts().tolist() == [10, 2, 13, 13, 12]
    assert Theory(tokens=100, relevant=0.5, confusion=0.05).counts().tolist() == [50, 5, 15, 15, 15]
    assert Theory(tokens=20, patterns=3, relevant=0.5, confusion=0.45).counts().tolist() == [10, 9, 1]
    assert Theory(tokens=50, patterns=6, relevant=0.2, confusion=0.16, classes=4).counts().tolist() == [
        10, 3, 3, 2, 16, 16,
    ]  # fmt: skip


def test_the_same_counts_are_the_same_data_whatever_rule_gave_them():
    same = [{}, {"confusion": 0.04}, {"irrelevant": 0.76}, {"confusion_ratio": 0.2}, {"relevant": 0.201}]
    drawn = [Theory(**rule).draw(3, 0, {}).train.inputs for rule in same]
    assert all(np.array_equal(drawn[0], other) for other in drawn[1:])
    assert not np.array_equal(drawn[0], Theory(confusion=0.06).draw(3, 0, {}).train.inputs)


@given(
    st.integers(2, 120),
    st.integers(3, 12),
    st.sampled_from([2, 4]),
    st.floats(0.01, 0.99),
    st.sampled_from(RULES),
    st.floats(0.01, 0.99),
    st.sampled_from([0, 0.1, 0.3]),
)
@settings(max_examples=150, deadline=None)
def test_counts_are_whole_tokens_of_the_shares_asked_for_or_a_user_error(
    L, M, classes, relevant, rule, share, spurious
):
    task = Theory(
        tokens=L, d=13, patterns=M, classes=classes, relevant=relevant, spurious=spurious * (classes == 2),
        **{rule: share},
    )  # fmt: skip
    try:
        task.check()
    except UserError as error:
        for asked in (task.counts, task.realised_shares):
            with pytest.raises(UserError, match="cannot have these shares"):
                asked()
        assert "allowed: " in str(error)
        return
    counts, realised = task.counts(), task.realised_shares()
    assert counts.shape == (M,) and counts.sum() == L
    assert counts[0] > counts[1:classes].max() and counts[classes:].min() >= 1
    assert np.ptp(counts[1:classes]) <= 1 and np.ptp(counts[classes:]) <= 1
    np.testing.assert_allclose(realised, np.add.reduceat(counts, [0, 1, classes]) / L)
    asked = {"confusion": share, "confusion_ratio": share * relevant, "irrelevant": 1 - relevant - share}[rule]
    assert realised[0] == pytest.approx(relevant, abs=0.501 / L)
    assert realised[1] == pytest.approx(asked, abs=(1.001 if rule == "irrelevant" else 0.501) / L)
    draw = task.draw(4, 0, {}).train
    assert (draw.relevance.sum(axis=1) == counts[0]).all()


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
        np.testing.assert_array_equal(split.relevance, which == 1 - split.labels[:, None])
    assert data.classes == ("-1", "+1")


def test_patterns_are_orthonormal():
    """Patterns are orthonormal and tokens are patterns with the noise asked for."""
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


def test_places_are_permuted_in_each_sample_unless_they_are_fixed():
    which = Theory(tokens=50).draw(400, 0, {}).train.relevance
    assert len({tuple(row) for row in which}) == 400
    assert np.abs(which.mean(axis=0) - 0.2).max() < 0.08
    data = Theory(tokens=50, positions="fixed").draw(30, 0, {})
    assert (data.train.relevance == (np.arange(50) < 10)).all()
    for label in (0, 1):
        (result,) = {tuple(row) for row in pattern_of(data, data.train)[data.train.labels == label]}
        assert np.bincount(result).tolist() == ([10, 2, 13, 13, 12] if label else [2, 10, 13, 13, 12])


def test_labels_are_balanced_in_every_stretch_or_drawn_independently():
    for classes, shares in ((2, {}), (4, {"relevant": 0.3})):
        each = Theory(classes=classes, **shares).draw(10 * classes, 0, {}).train.labels.reshape(10, classes)
        assert (np.sort(each, axis=1) == np.arange(classes)).all()
        assert len({tuple(row) for row in each}) > 1
        labels = Theory(classes=classes, labels="iid", **shares).draw(2000, 0, {}).train.labels
        np.testing.assert_allclose(np.bincount(labels) / 2000, 1 / classes, atol=0.04)
        pairs = np.bincount(classes * labels[:-1] + labels[1:], minlength=classes**2) / 1999
        np.testing.assert_allclose(pairs, 1 / classes**2, atol=0.04)


def test_four_classes_have_a_pattern_each_from_all_plus_to_all_minus():
    data = Theory(tokens=50, patterns=6, relevant=0.2, confusion=0.16, classes=4).draw(40, 0, {})
    assert data.classes == ("(-1,-1)", "(-1,+1)", "(+1,-1)", "(+1,+1)")
    which = pattern_of(data, data.train)
    expected = {3: [10, 3, 3, 2, 16, 16], 2: [2, 10, 3, 3, 16, 16], 1: [3, 2, 10, 3, 16, 16], 0: [3, 3, 2, 10, 16, 16]}
    for result, label, relevance in zip(which, data.train.labels, data.train.relevance, strict=True):
        assert np.bincount(result).tolist() == expected[label]
        np.testing.assert_array_equal(relevance, result == 3 - label)
    assert (data.train.groups == 0).all() and data.group_names == ("all",)


def test_a_pattern_is_a_set_of_equally_frequent_vectors():
    """A pattern is a set of vectors at half the diameter and each is drawn as often."""
    data = Theory(tokens=50, noise=0, set_size=4, set_diameter=0.6).draw(60, 0, {})
    which = pattern_of(data, data.train)
    for k in range(5):
        members, times = np.unique(data.train.inputs[which == k], axis=0, return_counts=True)
        assert len(members) == 4
        np.testing.assert_allclose(np.linalg.norm(members - data.patterns[:, k], axis=1), 0.3, rtol=1e-5)
        assert np.abs(members[:, None] - members).max() > 0.05
        assert times.min() > 0.7 * times.mean()
        tests = np.unique(data.test.inputs[pattern_of(data, data.test) == k], axis=0)
        np.testing.assert_array_equal(tests, members)
    mixed = [len({tuple(x) for x in row[w == 2]}) for row, w in zip(data.train.inputs, which, strict=True)]
    assert min(mixed) > 1


def test_the_spurious_pattern_follows_the_label_in_training_only():
    """The spurious pattern goes with the label in training and not in the test."""
    task = Theory(tokens=50, spurious=0.2, spurious_rate=0.8, test=2000)
    data = task.draw(2000, 0, {})
    assert data.group_names == ("-1 without spurious", "-1 with spurious", "+1 without spurious", "+1 with spurious")
    assert data.patterns.shape == (10, 6)
    np.testing.assert_allclose(data.patterns.T @ data.patterns, np.eye(6), atol=1e-12)
    for split, rates in ((data.train, (0.2, 0.8)), (data.test, (0.5, 0.5))):
        which = pattern_of(data, split)
        there = (which == 5).any(axis=1)
        np.testing.assert_array_equal(split.groups, 2 * split.labels + there)
        for label, rate in enumerate(rates):
            assert there[split.labels == label].mean() == pytest.approx(rate, abs=0.04)
        counts = np.stack([(which == k).sum(axis=1) for k in range(6)], axis=1)
        for label, discriminative in enumerate(([2, 10], [10, 2])):
            for present, others in enumerate(([13, 13, 12, 0], [10, 9, 9, 10])):
                mine = counts[(split.labels == label) & (there == present)]
                assert (mine == discriminative + others).all()
        np.testing.assert_array_equal(split.relevance, which == 1 - split.labels[:, None])
    assert task.counts().tolist() == [10, 2, 13, 13, 12] and task.realised_shares() == (0.2, 0.04, 0.76)


# ---- overfitting


def longest_but_signal(split):
    """Return (n,) the position of the longest token other than the signal."""
    return (np.linalg.norm(split.inputs, axis=2) * (1 - split.relevance)).argmax(axis=1)


def test_each_sample_has_one_signal_token_that_is_its_label():
    data = OVERFITTING.draw(30, 0, {})
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
    assert spread.min() > 0.17 and spread.max() < 0.23  # exactly one strong token


def test_signal_and_strong_noise_are_at_random_places_of_their_own():
    split = Overfitting(tokens=4, d=20, noise=0.1, strong=50).draw(1200, 0, {}).train
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (split.relevance.argmax(axis=1), longest_but_signal(split)), 1)
    assert (np.diag(pairs) == 0).all()
    np.testing.assert_allclose(pairs[~np.eye(4, dtype=bool)] / 1200, 1 / 12, atol=0.03)


def test_the_noise_is_orthogonal_to_both_signals_if_it_is_projected():
    for split in (
        OVERFITTING.model_copy(update={"projected": True}).draw(10, 0, {}).train,
        OVERFITTING.model_copy(update={"projected": True}).draw(10, 0, {}).test,
    ):
        noise = split.inputs[split.relevance == 0]
        assert (noise[:, :2] == 0).all() and (np.abs(noise[:, 2:]) > 0).all()
        assert (split.inputs[split.relevance == 1][:, :2].sum(axis=1) == 3).all()
    plain = OVERFITTING.draw(10, 0, {}).train
    along = plain.inputs[plain.relevance == 0][:, :2]
    assert (along != 0).all() and along.std() > 0.3


@given(st.floats(0.5, 100), st.integers(2, 12), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_noise_labels_and_order_do_not_depend_on_the_signal(signal, n, repetition):
    one, other = (
        OVERFITTING.draw(n, repetition, {}),
        OVERFITTING.model_copy(update={"signal": signal}).draw(n, repetition, {}),
    )
    for mine, theirs in ((one.train, other.train), (one.test, other.test)):
        np.testing.assert_array_equal(mine.labels, theirs.labels)
        np.testing.assert_array_equal(mine.relevance, theirs.relevance)
        noise = mine.relevance == 0
        np.testing.assert_array_equal(mine.inputs[noise], theirs.inputs[noise])
        np.testing.assert_allclose(theirs.inputs[~noise].max(axis=1), signal, rtol=1e-6)


def test_labels_do_not_depend_on_the_places():
    """Half of an even set is of each class and labels tell nothing of the places."""
    for n in (2, 4, 10, 500):
        labels = OVERFITTING.draw(n, 3, {}).train.labels
        assert labels.sum() * 2 == n
        assert (np.sort(labels.reshape(-1, 2), axis=1) == (0, 1)).all()
    split = OVERFITTING.draw(1200, 3, {}).train
    places = split.relevance.argmax(axis=1)
    shares = [np.bincount(places[split.labels == label], minlength=6) / 600 for label in (0, 1)]
    np.testing.assert_allclose(shares, 1 / 6, atol=0.06)


def test_the_signal_to_noise_ratio_is_that_of_the_weak_noise():
    assert Overfitting().snr == pytest.approx(64 / (0.2 * 32)) == pytest.approx(10)
    assert Overfitting(tokens=3, d=2048, signal=1, noise=0.05, strong=7).snr == pytest.approx(0.442, abs=5e-4)
    assert Overfitting(signal=32).snr == pytest.approx(5) and Overfitting(strong=1).snr == pytest.approx(10)


# ---- spatial


def changed(task=SPATIAL, **updates):
    return type(task)(**task.model_dump() | updates)


def shown(data, split):
    """Return (n, tokens), the coefficient of w* in each patch."""
    return split.inputs.astype(float) @ data.patterns[:, 0]


def test_sets_belong_to_the_structure():
    sets = [changed(structure=structure).sets() for structure in range(4)]
    assert len({tuple(s) for s in sets}) == 4
    np.testing.assert_array_equal(sets[0], changed(feature=3, permuted=True, rate=0.5, noise=1).sets())
    assert any(np.ptp(np.flatnonzero(sets[0] == k)) > 2 for k in range(4))  # not contiguous
    for repetition in (0, 5):
        relevance = SPATIAL.draw(40, repetition, {}).train.relevance
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
    assert set(which) == {0, 1, 2, 3}  # each set is drawn
    assert data.train.labels.sum() == 30 and data.classes == ("-1", "+1") and (data.train.groups == 0).all()


@pytest.mark.parametrize("label", [0, 1])
def test_any_set_carries_either_label(label):
    split = SPATIAL.draw(1200, 0, {}).train
    which = (split.relevance @ SPATIAL.sets() / 3).astype(int)[split.labels == label]
    np.testing.assert_allclose(np.bincount(which) / 600, 1 / 4, atol=0.07)


@pytest.mark.parametrize(("rate", "q"), [(0.4, 0.4), (1.0, 1.0), (0.0, 0.0), (None, math.log(16) / 12)])
def test_other_patches_show_the_feature_or_its_opposite(rate, q):
    """Another patch shows the feature or its opposite at half the rate each."""
    data = changed(rate=rate, noise=0.0).draw(3000, 0, {})
    other = data.train.relevance == 0
    delta = shown(data, data.train)[other].round(4)
    assert set(np.abs(delta)) <= {0.0, 1.0}
    n = other.sum()
    bound = 5 * math.sqrt(q / 2 * (1 - q / 2) / n)  # five standard deviations
    assert abs((delta == 1).mean() - q / 2) <= bound and abs((delta == -1).mean() - q / 2) <= bound
    labels = np.broadcast_to(data.train.labels[:, None], other.shape)[other]
    if q > 0:
        assert delta[labels == 1].mean() == pytest.approx(0, abs=0.05)  # independent of the label


def test_noise_has_the_requested_width():
    """Noise is of the width asked for and orthogonal to the feature if it is projected."""
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


def test_permuted_patches_are_the_plain_ones_in_another_order():
    """Permuted patches are the plain ones in another order one for all samples."""
    plain, task = SPATIAL.draw(10, 2, {}), changed(permuted=True)
    moved, order = task.draw(10, 2, {}), task.order()
    assert sorted(order) == list(range(12)) and not np.array_equal(order, np.arange(12))
    np.testing.assert_array_equal(SPATIAL.order(), np.arange(12))
    assert not np.array_equal(order, changed(permuted=True, structure=1).order())
    for mine, theirs in ((moved.train, plain.train), (moved.test, plain.test)):
        np.testing.assert_array_equal(mine.labels, theirs.labels)
        for place in range(12):
            np.testing.assert_array_equal(mine.inputs[:, place], theirs.inputs[:, order[place]])
            np.testing.assert_array_equal(mine.relevance[:, place], theirs.relevance[:, order[place]])


def test_training_begins_from_zero_or_feature_0():
    """Training begins with nothing or with what feature 0 taught in plain order."""
    assert changed(feature=2, permuted=True).initial() is None
    task = changed(feature=2, permuted=True, start="pretrained", structure=3, lr_attention=5, watch=10, steps=40)
    first, samples = task.initial()
    assert first == changed(task, feature=0, permuted=False, start="random", watch=0)
    assert samples == PRETRAINED_ON == 2000 and first.initial() is None
    np.testing.assert_array_equal(first.sets(), task.sets())


# ---- sparse tokens


def test_a_positive_sample_has_the_signal_in_r_tokens():
    """A positive sample is noise with the signal in r tokens and a negative one is noise."""
    strong, silent = SPARSE.draw(40, 0, {}), SPARSE.model_copy(update={"theta": 0.0}).draw(40, 0, {})
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


# ---- all tasks

THEORY = {"tokens": 12, "relevant": 0.3, "confusion": 0.1, "test": 9}
TASKS = [
    Theory(**THEORY), Theory(**THEORY, labels="iid"), Theory(**THEORY, positions="fixed"),
    Theory(**THEORY, noisy_share=0.3), Theory(**THEORY, set_size=3, set_diameter=0.3), Theory(**THEORY, spurious=0.2),
    Theory(**THEORY, classes=4, labels="iid", noisy_share=0.5, set_size=2, set_diameter=1),
    Theory(**THEORY, labels="iid", positions="fixed", noisy_share=0.5, set_size=3, set_diameter=0.3, spurious=0.1),
    *(Overfitting(tokens=6, d=40, signal=3, noise=0.5, strong=10, test=9, projected=p) for p in (False, True)),
    *(Spatial(tokens=12, group=3, d=16, test=9, permuted=p, feature=f) for p, f in ((False, 0), (True, 0), (True, 3))),
    SparseTokens(tokens=9, d=5, relevant=3, theta=2.5, test=9),
]  # fmt: skip
FIELDS = ("inputs", "labels", "groups", "relevance")


@given(st.sampled_from(TASKS), st.integers(0, 10**6), st.integers(2, 30), st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_a_smaller_set_begins_the_larger_and_the_test_set_is_the_same(task, repetition, n, more):
    longer = task.model_copy(update={"test": 9 + more})
    small, large = task.draw(n, repetition, {}), longer.draw(n + more, repetition, {})
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(small.train, field), getattr(large.train, field)[:n])
        np.testing.assert_array_equal(getattr(small.test, field), getattr(large.test, field)[:9])


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_repetition_is_the_same_again_and_unlike_the_next(task):
    first, again, other = (task.draw(9, repetition, {}) for repetition in (0, 0, 1))
    for part in ("train", "test"):
        mine, same, next_ = (getattr(data, part) for data in (first, again, other))
        assert all(np.array_equal(getattr(mine, field), getattr(same, field)) for field in FIELDS)
        noise = mine.relevance + next_.relevance == 0
        assert not np.isclose(mine.inputs, next_.inputs).all(axis=2)[noise].any()
    assert not np.isclose(first.train.inputs, first.test.inputs).all(axis=2).all(axis=1).any()


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        (TASKS[0], {"lr": 0.1, "batch": 3, "steps": 7, "threshold": 0.5, "test": 20, "watch": 3}),
        (TASKS[0], {"criterion": "error", "error": 0.05}),
        (TASKS[8], {"lr": 7.0, "steps": 3, "fitted": 0.5, "threshold": 0.9, "watch": 2}),
        (TASKS[10], {"lr": 1, "lr_attention": 2, "steps": 3, "threshold": 0.5, "watch": 1, "start": "pretrained"}),
        (TASKS[13], {"lr": 7.0, "steps": 3, "error": 0.3, "watch": 2}),
    ],
    ids=lambda part: part.name if isinstance(part, Task) else "",
)
def test_how_a_network_is_trained_and_judged_does_not_change_the_data(task, changes):
    plain, tuned = task.draw(6, 0, {}), task.model_copy(update=changes).draw(6, 0, {})
    np.testing.assert_array_equal(plain.train.inputs, tuned.train.inputs)
    np.testing.assert_array_equal(plain.test.inputs, tuned.test.inputs[:9])


DESCENT = {"loss": "logistic", "optimizer": "sgd", "batch": 0, "fixed_selection": True, "stop_at_zero_loss": False}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (Theory(batch=7, steps=9), {"loss": "hinge", "optimizer": "sgd", "batch": 7, "steps": 9, "lr": 1.0,
                                    "stop_at_zero_loss": True, "fixed_selection": True}),
        (Theory(tokens=100), {"lr": 2.0}), (Theory(tokens=100, lr=0.3), {"lr": 0.3}),
        (Overfitting(lr=0.3, steps=77, fitted=0.02, watch=5),
         DESCENT | {"lr": 0.3, "steps": 77, "epochs": 77, "stop_below": 0.02, "watch": 5, "rates": {}}),
        (Overfitting(), {"stop_below": 0.01, "lr": 0.1}),
        (Spatial(lr=0.3, steps=77, watch=5),
         DESCENT | {"lr": 0.3, "steps": 77, "epochs": 77, "stop_below": 0, "watch": 5, "rates": {}}),
        (Spatial(lr_attention=20), {"rates": {"A": 20}}),
        (SparseTokens(lr=0.7, steps=77, watch=5),
         DESCENT | {"lr": 0.7, "steps": 77, "epochs": 77, "stop_below": 0, "watch": 5, "rates": {}}),
    ],
    ids=lambda part: part.name if isinstance(part, Task) else "",
)  # fmt: skip
def test_the_recipe_is_that_of_the_paper(task, expected):
    assert {name: getattr(task.recipe(), name) for name in expected} == expected


@pytest.mark.parametrize(
    ("task", "loss", "accuracy", "succeeds"),
    [
        (Theory(threshold=0.01), 0.0099, 0.5, True), (Theory(threshold=0.01), 0.01, 1.0, False),
        *((Overfitting(), loss, accuracy, loss < 0.2) for loss in (0.0, 0.1999, 0.2, 5.0) for accuracy in (0.0, 1.0)),
        (Overfitting(threshold=6), 5.0, 0.0, True),
        *((Spatial(threshold=0.0501), loss, right, right > 0.94) for loss in (0.0, 9.0) for right in (1.0, 0.95, 0.94)),
        (Spatial(threshold=0.5), 1.0, 0.5, True), (Spatial(threshold=0), 1.0, 1.0, True),
        *((SparseTokens(), loss, right, right >= 0.9) for loss in (0.0, 9.0) for right in (1.0, 0.9, 0.899, 0.0)),
        (SparseTokens(error=0.5), 1.0, 0.6, True),
        *((Theory(criterion="error", error=percent / 100), loss, (n - n * percent // 100 - more) / n, more == 0)
          for n in (100, 200, 300, 700, 1000, 3000, 10**6) for percent in (0, 1, 2, 5, 7, 29)
          for loss, more in ((9.0, 0), (0.0, 1))),
    ],
)  # fmt: skip
def test_a_trial_succeeds_by_its_loss_or_its_error(task, loss, accuracy, succeeds):
    assert task.success(loss, accuracy) is succeeds


def test_beside_the_error_the_papers_criterion_is_told():
    task = Theory(criterion="error", threshold=0.1)
    assert task.successes(0.0999, 0.98) == {"success": False, "success_loss": True}
    assert task.successes(0.1, 0.99) == {"success": True, "success_loss": False}
    assert Theory(threshold=0.1).successes(0.0999, 0.5) == {"success": True}


@pytest.mark.parametrize(
    ("kind", "parameters", "said"),
    [
        *((Theory, *case) for case in (
            ({"relevant": 0.1, "confusion": 0.1}, "5 relevant, 5 confusing.*more relevant tokens than confusing ones"),
            ({"relevant": 0.1, "confusion": 0.4}, "5 relevant, 20 confusing.*more relevant tokens than confusing ones"),
            ({"relevant": 0.26, "irrelevant": 0.48}, "13 relevant, 13 confusing.*more relevant tokens than confusing"),
            ({"relevant": 0.2, "confusion": 0.58, "classes": 4}, "10 relevant, 29 confusing.*more relevant tokens"),
            ({"tokens": 10, "relevant": 0.04, "confusion": 0}, "0 relevant, 0 confusing"),
            ({"relevant": 0.7, "confusion": 0.5}, "35 relevant, 25 confusing and -10 irrelevant.*sum to at most 1"),
            ({"relevant": 0.4, "irrelevant": 0.7}, "20 relevant, -5 confusing and 35 irrelevant.*sum to at most 1"),
            ({"relevant": 0.6, "confusion": 0.4}, "and 0 irrelevant tokens.*each of the 3 irrelevant patterns"),
            ({"relevant": 0.92}, "and 2 irrelevant tokens.*each of the 3 irrelevant patterns"),
            ({"patterns": 4, "classes": 4}, "more patterns than the 4 classes"),
            ({"confusion": 0.1, "irrelevant": 0.5}, "more than once; got confusion and irrelevant; allowed: one of"),
            ({"spurious": 0.005}, "a spurious share of a token or more"),
            ({"spurious": 0.74}, "38 irrelevant tokens, 37 of them spurious.*beside it"),
            ({"spurious": 0.1, "classes": 4}, "classes=4; allowed: classes=2"),
            ({"d": 4}, "d must be at least their number"),
            ({"d": 5, "spurious": 0.1}, "d must be at least their number; got d=5; allowed: d of 6"),
            ({"set_size": 2, "set_diameter": 1.42}, "set_diameter < kappa"),
            ({"set_diameter": 0.3}, "set_size of 2 or more"),
        )),
        (Spatial, {"tokens": 36, "group": 5}, "one size; got tokens=36, group=5; allowed: a group that divides tokens"),
        (Spatial, {"tokens": 4, "group": 8}, "one size"),
        (Spatial, {"d": 16, "feature": 16}, "orthogonal; got feature=16; allowed: below d=16"),
        (SparseTokens, {"tokens": 3}, "got relevant=4, tokens=3; allowed: relevant of 3 or fewer"),
    ],
)  # fmt: skip
def test_parameters_that_contradict_each_other_are_a_user_error(kind, parameters, said):
    for ask in (lambda task: task.check(), lambda task: task.draw(2, 0, {})):
        with pytest.raises(UserError, match=said):
            ask(kind(**parameters))


def test_a_set_of_one_class_is_a_user_error():
    with pytest.raises(UserError, match=r"both classes.*got N=1; allowed: 2 or more"):
        Overfitting().draw(1, 0, {})
    assert set(Overfitting(d=3).draw(2, 0, {}).train.labels) == {0, 1}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(kind, {name: value}) for kind, cases in (
        (Theory, {"relevant": (0, 1), "confusion": (-0.1,), "irrelevant": (0,), "confusion_ratio": (-1,),
                  "patterns": (2,), "classes": (3,), "labels": ("fair",), "positions": ("sorted",), "set_size": (0,),
                  "set_diameter": (-1,), "spurious": (1,), "spurious_rate": (1.1,), "test": (0,), "watch": (-1,),
                  "criterion": ("accuracy",), "error": (-0.1, 1)}),
        (Overfitting, {"tokens": (2,), "d": (2,), "signal": (0, float("nan")), "noise": (0,), "strong": (0.5,),
                       "test": (0,), "threshold": (0,), "fitted": (-1,), "lr": (0,), "steps": (0,), "watch": (-1,)}),
        (Spatial, {"tokens": (1,), "group": (0,), "d": (1,), "rate": (1.1, -0.1), "noise": (-1,), "structure": (-1,),
                   "feature": (-1,), "start": ("learned",), "test": (0,), "threshold": (1,), "lr": (0,),
                   "lr_attention": (0,), "steps": (0,), "watch": (-1,)}),
        (SparseTokens, {"tokens": (0,), "d": (0,), "relevant": (0,), "theta": (-1, float("nan")), "positive": (0, 1),
                        "test": (0,), "error": (1,), "lr": (0,), "steps": (0,), "watch": (-1,)}),
    ) for name, values in cases.items() for value in values],
)  # fmt: skip
def test_a_parameter_out_of_range_is_refused(kind, wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        kind(**wrong)
