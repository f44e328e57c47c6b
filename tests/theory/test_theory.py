import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sparsebench_theory.shallow.task import RULES, Theory

from sparsebench.errors import UserError


def pattern_of(data, split):
    """Return (n, L), which pattern each token is nearest to."""
    distances = np.linalg.norm(split.inputs[:, :, None] - data.patterns.T, axis=3)
    return distances.argmin(axis=2)


def test_the_counts_are_the_rounded_shares_and_the_rest_is_spread_evenly():
    assert Theory(tokens=50, relevant=0.2, confusion=0.04).counts().tolist() == [10, 2, 13, 13, 12]
    assert Theory(tokens=100, relevant=0.5, confusion=0.05).counts().tolist() == [50, 5, 15, 15, 15]
    assert Theory(tokens=20, patterns=3, relevant=0.5, confusion=0.45).counts().tolist() == [10, 9, 1]
    assert Theory(tokens=50, patterns=6, relevant=0.2, confusion=0.16, classes=4).counts().tolist() == [
        10, 3, 3, 2, 16, 16,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "counts"),
    [
        ({}, [14, 2, 12, 11, 11]),
        ({"confusion": 0.1}, [14, 5, 11, 10, 10]),
        ({"irrelevant": 0.5}, [14, 11, 9, 8, 8]),
        ({"confusion_ratio": 0.5}, [14, 7, 10, 10, 9]),
        ({"confusion_ratio": 0}, [14, 0, 12, 12, 12]),
    ],
)
def test_the_share_of_confusing_tokens_is_given_by_one_of_three_rules(rule, counts):
    task = Theory(tokens=50, relevant=0.29 if "irrelevant" in rule else 0.28, **rule)
    assert task.counts().tolist() == counts
    assert task.realised_shares() == (counts[0] / 50, counts[1] / 50, sum(counts[2:]) / 50)


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
            with pytest.raises(UserError, match="cannot have shares"):
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


def test_places_are_permuted_in_each_sample_unless_they_are_fixed():
    which = Theory(tokens=50).draw(400, 0, {}).train.relevance
    assert len({tuple(row) for row in which}) == 400
    assert np.abs(which.mean(axis=0) - 0.2).max() < 0.08
    data = Theory(tokens=50, positions="fixed").draw(30, 0, {})
    assert (data.train.relevance == (np.arange(50) < 10)).all()
    for label in (0, 1):
        (found,) = {tuple(row) for row in pattern_of(data, data.train)[data.train.labels == label]}
        assert np.bincount(found).tolist() == ([10, 2, 13, 13, 12] if label else [2, 10, 13, 13, 12])


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
    for found, label, relevance in zip(which, data.train.labels, data.train.relevance, strict=True):
        assert np.bincount(found).tolist() == expected[label]
        np.testing.assert_array_equal(relevance, found == 3 - label)
    assert (data.train.groups == 0).all() and data.group_names == ("all",)


def test_a_pattern_is_a_set_of_vectors_at_half_the_diameter_and_each_is_drawn_as_often():
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


def test_the_spurious_pattern_goes_with_the_label_in_training_and_not_in_the_test():
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
