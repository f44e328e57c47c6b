import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebench.measure.spuriosity import token_spuriosity


def by_hand(z, inside):
    """Return A-TSI and M-TSI as sums over images, in plain Python."""
    sums = [[0.0, 0.0], [0.0, 0.0]]
    for row, within in zip(z.tolist(), inside.tolist(), strict=True):
        parts = [[x for x, i in zip(row, within, strict=True) if i == side] for side in (False, True)]
        if not all(parts):
            continue
        for side, part in enumerate(parts):
            sums[0][side] += sum(part) / len(part)
            sums[1][side] += max(part)
    return [out / within if within > 0 else math.nan for out, within in sums]


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 9))
@settings(deadline=None)
def test_both_indices_are_the_ratios_of_the_sums_over_images(seed, n, N):
    rng = np.random.default_rng(seed)
    z = rng.random((n, N)) * rng.integers(0, 2, (n, N))
    inside = rng.random((n, N)) < 0.5
    assert token_spuriosity(z, inside) == pytest.approx(by_hand(z, inside), nan_ok=True)


def test_an_example():
    z = np.array([[0.1, 0.3, 0.4, 0.0], [0.2, 0.2, 0.5, 0.1]])
    inside = np.array([[False, False, True, True], [False, True, True, True]])
    average, largest = token_spuriosity(z, inside)
    assert average == pytest.approx((0.2 + 0.2) / (0.2 + 0.8 / 3))
    assert largest == pytest.approx((0.3 + 0.2) / (0.4 + 0.5))


def test_an_image_in_which_nothing_inside_matters_does_not_make_it_infinite():
    z = np.array([[0.5, 0.0], [0.1, 0.3]])
    inside = np.array([[False, True], [False, True]])
    assert token_spuriosity(z, inside) == (pytest.approx(2), pytest.approx(2))


@pytest.mark.parametrize("inside", [[True, True], [False, False]])
def test_images_without_both_kinds_of_tokens_say_nothing(inside):
    z = np.array([[0.5, 0.5], [0.1, 0.3]])
    both = np.array([inside, [False, True]])
    assert token_spuriosity(z, both) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert all(map(math.isnan, token_spuriosity(z[:1], both[:1])))
    assert all(map(math.isnan, token_spuriosity(np.zeros((1, 2)), both[1:])))
