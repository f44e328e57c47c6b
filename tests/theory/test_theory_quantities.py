import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betainc
from sparsebench_theory.shallow import theorems as theory
from sparsebench_theory.shallow.network import FirstWeights, ShallowViT
from sparsebench_theory.shallow.task import Theory

FIGURE_4 = np.array([0.5, 0.05, 0.15, 0.15, 0.15])


@pytest.mark.parametrize(("kap", "mass"), [(0.5, 0.540), (0.64, 0.550), (1.0, 0.567)])
def test_the_first_attention_mass_of_figure_4(kap, mass):
    assert theory.attention_mass(FIGURE_4, kap) == pytest.approx(mass, abs=0.001)
    assert theory.attention_mass(100 * FIGURE_4, kap) == pytest.approx(theory.attention_mass(FIGURE_4, kap))


@pytest.mark.parametrize("kap", [0.0, 0.5, 0.64, 1.0])
@pytest.mark.parametrize("shares", [{"relevant": 0.5, "confusion": 0.05}, {"irrelevant": 0.5, "relevant": 0.3}])
@torch.no_grad()
def test_the_first_attention_mass_is_that_of_a_network_on_noiseless_tokens(kap, shares):
    task = Theory(tokens=40, noise=0, **shares)
    data = task.draw(6, 0, {})
    rng = np.random.default_rng(0)
    net = ShallowViT(rng, data.patterns, 40, m=4, first=FirstWeights(0.1, 1 - kap**0.5, 0.01, "scale"))
    relevant = torch.from_numpy(data.train.relevance)[:, None, None]
    measured = (net.attention(torch.from_numpy(data.train.inputs)) * relevant).sum(dim=3).mean()
    assert theory.attention_mass(task.counts(), kap) == pytest.approx(float(measured), abs=1e-5)
    if kap == 0:
        assert float(measured) == pytest.approx(task.realised_shares()[0], abs=1e-5)


def test_the_attention_mass_of_any_pattern_may_be_asked_for_and_all_sum_to_one():
    assert sum(theory.attention_mass(FIGURE_4, 0.7, k) for k in range(5)) == pytest.approx(1)
    assert theory.attention_mass(FIGURE_4, 0.7, 1) == theory.attention_mass(FIGURE_4[[1, 0, 2, 3, 4]], 0.7)


def test_attention_tends_to_one_with_smaller_steps():
    assert theory.attention_limit(0.1) == pytest.approx(0.9)
    np.testing.assert_allclose(theory.attention_limit(np.array([0.5, 0.1]), C=2), [0.75, 0.99])


def test_the_formulas_of_the_theorems():
    sigma, tau, delta = 0.1, 0.05, 0.2
    assert theory.neurons_needed(math.e**2, 5, 0.1) == pytest.approx(5000)
    assert theory.relevant_needed(0.04, sigma, tau, delta) == pytest.approx(0.04 / (0.5 * math.exp(-0.25) * 0.85))
    assert theory.relevant_needed(0.04, sigma, tau, delta, eps_S=0.25) == pytest.approx(0.16 / (math.exp(-0.25) * 0.85))
    assert theory.batch_needed(0.5, sigma, tau, delta) == pytest.approx((0.5 - math.exp(-0.25) * 0.15) ** -2)
    assert theory.samples_needed(0.5, sigma, tau) == pytest.approx(0.35**-2)
    assert theory.samples_needed(0.5, sigma, tau, zeta=0.9, c1=2, c2=0.5) == pytest.approx(0.225**-2)
    assert theory.samples_needed_frozen(0.5, sigma, tau) == pytest.approx((0.5 * 0.35) ** -2)
    assert theory.steps_needed(0.5, 2, 5, sigma, tau, 0.1) == pytest.approx(1 / (0.9 - 0.75 / math.pi))
    assert theory.lucky_bound(1000, 5, sigma, tau, 0.1) == pytest.approx(200 * (0.9 - 0.75 / math.pi))


@given(st.floats(0.3, 0.9), st.floats(1.01, 1.5))
def test_without_errors_the_bounds_grow_with_the_powers_that_the_paper_names(alpha, factor):
    def growth(bound, *others):
        return float(bound(alpha / factor, *others) / bound(alpha, *others))

    assert growth(theory.samples_needed, 0, 0) == pytest.approx(factor**2)
    assert growth(theory.batch_needed, 0, 0, 0.2) == pytest.approx(factor**2)
    assert growth(theory.samples_needed_frozen, 0, 0) == pytest.approx(factor**4)
    assert growth(theory.steps_needed, 1, 5, 0.1, 0.05) == pytest.approx(factor)


def test_where_a_condition_fails_there_is_no_bound():
    alphas = np.array([0.1, 0.15, 0.5])
    for bound in (
        theory.samples_needed(alphas, 0.1, 0.05),
        theory.samples_needed_frozen(alphas, 0.1, 0.05),
        theory.batch_needed(alphas, 0.1, 0.05, -0.05),
    ):
        assert bound[0] == np.inf and np.isfinite(bound[2])
    assert theory.relevant_needed(0.1, 0.7, 0.4, 0) == np.inf
    assert theory.steps_needed(0.5, 1, 20, 0.1, 0.1) == np.inf
    assert theory.lucky_bound(1000, 20, 0.1, 0.1) == 0


def test_lucky_neurons_are_those_within_the_angle():
    angles = np.array([0, 0.1, 0.149, 0.151, 1, math.pi / 2, math.pi, -0.1])
    W_O = np.stack([np.cos(angles), np.sin(angles)], axis=1) * np.arange(1, 9)[:, None]
    expected = [True, True, True, False, False, False, False, True]
    assert theory.lucky_neurons(W_O, np.array([3.0, 0.0]), 0.1, 0.05).tolist() == expected
    assert theory.lucky_neurons(W_O, np.array([0.0, 1.0]), 0.1, 0.05).tolist() == [False] * 5 + [True] + [False] * 2


def test_hardly_a_gaussian_row_is_lucky_in_ten_dimensions():
    rows = np.random.default_rng(0).standard_normal((10**5, 10))
    assert theory.lucky_neurons(rows, np.eye(10)[0], 0.1, 0.03).sum() == 0
    share = theory.lucky_neurons(rows, np.eye(10)[0], 0.8, 0.0).mean()
    assert share == pytest.approx(0.5 * betainc(4.5, 0.5, math.sin(0.8) ** 2), rel=0.1)
