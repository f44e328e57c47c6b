import numpy as np
import pytest
from sparsebench_theory.sparse_tokens.task import SparseTokens

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
