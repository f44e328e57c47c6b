import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
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


def test_without_a_diameter_a_set_is_its_pattern():
    data = Theory(tokens=50, noise=0, set_size=3).draw(5, 0, {})
    np.testing.assert_allclose(data.train.inputs, data.patterns.T[pattern_of(data, data.train)], atol=1e-6)


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


@pytest.mark.parametrize("rate", [0, 1])
def test_a_spurious_rate_of_nought_or_one_is_certain(rate):
    split = Theory(spurious=0.1, spurious_rate=rate).draw(50, 0, {}).train
    assert set(split.groups) == ({0, 3} if rate else {1, 2})


OPTIONS = [
    {},
    {"labels": "iid"},
    {"positions": "fixed"},
    {"noisy_share": 0.3},
    {"set_size": 3, "set_diameter": 0.3},
    {"spurious": 0.2},
    {"classes": 4, "labels": "iid", "noisy_share": 0.5, "set_size": 2, "set_diameter": 1},
    {"labels": "iid", "positions": "fixed", "noisy_share": 0.5, "set_size": 3, "set_diameter": 0.3, "spurious": 0.1},
]


@given(st.sampled_from(OPTIONS), st.integers(0, 10**6), st.integers(1, 30), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_a_smaller_set_begins_the_larger_and_the_test_set_is_the_same(options, repetition, n, more):
    task = Theory(tokens=12, relevant=0.3, confusion=0.1, test=5, **options)
    longer = task.model_copy(update={"test": 5 + more})
    small, large = task.draw(n, repetition, {}), longer.draw(n + more, repetition, {})
    for field in ("inputs", "labels", "groups", "relevance"):
        np.testing.assert_array_equal(getattr(small.train, field), getattr(large.train, field)[:n])
        np.testing.assert_array_equal(getattr(small.test, field), getattr(large.test, field)[:5])


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
    tuned = Theory(tokens=12, relevant=0.3, confusion=0.1, lr=0.1, batch=3, steps=7, threshold=0.5, test=9, watch=3)
    np.testing.assert_array_equal(plain.draw(6, 0, {}).train.inputs, tuned.draw(6, 0, {}).train.inputs)
    np.testing.assert_array_equal(plain.draw(6, 0, {}).test.inputs[:9], tuned.draw(6, 0, {}).test.inputs)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"relevant": 0.1, "confusion": 0.1}, "5 relevant, 5 confusing.*more relevant tokens than confusing ones"),
        ({"relevant": 0.1, "confusion": 0.4}, "5 relevant, 20 confusing.*more relevant tokens than confusing ones"),
        ({"relevant": 0.26, "irrelevant": 0.48}, "13 relevant, 13 confusing.*more relevant tokens than confusing ones"),
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
    ],
)
def test_parameters_that_contradict_each_other_are_a_user_error(parameters, said):
    for ask in (lambda task: task.check(), lambda task: task.draw(2, 0, {})):
        with pytest.raises(UserError, match=said):
            ask(Theory(**parameters))


@pytest.mark.parametrize(
    "wrong",
    [
        {"relevant": 1}, {"relevant": 0}, {"confusion": -0.1}, {"irrelevant": 0}, {"confusion_ratio": -1},
        {"patterns": 2}, {"classes": 3}, {"labels": "fair"}, {"positions": "sorted"}, {"set_size": 0},
        {"set_diameter": -1}, {"spurious": 1}, {"spurious_rate": 1.1}, {"test": 0}, {"watch": -1},
        {"criterion": "accuracy"}, {"error": -0.1}, {"error": 1},
    ],
)  # fmt: skip
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
    assert task.successes(0.0099, 0.5) == {"success": True}


@pytest.mark.parametrize("test", [100, 200, 300, 700, 1000, 3000, 10**6])
@pytest.mark.parametrize("percent", [0, 1, 2, 5, 7, 29])
def test_by_the_error_a_trial_succeeds_with_so_many_wrong_test_samples_and_not_with_one_more(test, percent):
    task, most = Theory(criterion="error", error=percent / 100), test * percent // 100
    assert task.success(9.0, (test - most) / test) is True
    assert task.success(0.0, (test - most - 1) / test) is False


def test_beside_the_error_the_papers_criterion_is_told():
    task = Theory(criterion="error", threshold=0.1)
    assert task.successes(0.0999, 0.98) == {"success": False, "success_loss": True}
    assert task.successes(0.1, 0.99) == {"success": True, "success_loss": False}


def test_the_criterion_does_not_change_the_data():
    plain = Theory(tokens=12, relevant=0.3, confusion=0.1, test=9)
    other = plain.model_copy(update={"criterion": "error", "error": 0.05})
    for one, same in zip(
        *((data.train, data.test) for data in (plain.draw(6, 0, {}), other.draw(6, 0, {}))), strict=True
    ):
        np.testing.assert_array_equal(one.inputs, same.inputs)
